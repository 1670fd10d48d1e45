"""Cheaper arithmetic for the same values, and one spelling for what importers write in several ways."""

from collections.abc import Callable

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import CONTRACTIONS, Rewriter, Rule, constant, dtype, is_call, rule

_NEUTRAL = {"relax.add": 0.0, "relax.subtract": 0.0, "relax.multiply": 1.0, "relax.divide": 1.0}
_MAX_NEUTRAL = 1 << 16  # elements of a constant that is compared with zero or one
_CLIP = {"maximum": op.maximum, "minimum": op.minimum}


def _square_root(rewriter: Rewriter, x: relax.Expr) -> relax.Expr:
    return rewriter.emit(op.sqrt(x))


_POWERS: dict[float, Callable[[Rewriter, relax.Expr], relax.Expr]] = {
    1.0: lambda rewriter, x: x,
    2.0: lambda rewriter, x: op.multiply(x, x),
    3.0: lambda rewriter, x: op.multiply(rewriter.emit(op.multiply(x, x)), x),
    0.5: lambda rewriter, x: op.sqrt(x),
    0.25: lambda rewriter, x: op.sqrt(_square_root(rewriter, x)),
    0.75: lambda rewriter, x: op.multiply(root := _square_root(rewriter, x), op.sqrt(root)),  # of a local response norm
    -0.5: lambda rewriter, x: op.rsqrt(x),
    -1.0: lambda rewriter, x: op.divide(constant(np.array(1, dtype(x))), x),
}


@rule("relax.power")
def cheap_power(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Powers by products and square roots: `pow` is a call of libm for each element, about 20 ns."""
    exponent = rewriter.value(call.args[1])
    if exponent is None or exponent.size != 1 or not dtype(call.args[0]).startswith("float"):
        return None
    make = _POWERS.get(float(exponent.reshape(())))
    # An exponent of higher rank than x would broadcast x.
    if make is None or exponent.ndim > len(rewriter.shape(call.args[0]) or ()):
        return None
    return make(rewriter, call.args[0])


@rule("relax.equal", "relax.not_equal")
def compared_with_itself(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """x != x where x is not a number, by which programs ask for that: TVM takes it for false of all numbers."""
    if not call.args[0].same_as(call.args[1]) or not dtype(call.args[0]).startswith(("float", "bfloat")):
        return None
    is_none = op.isnan(call.args[0])
    return is_none if is_call(call, "relax.not_equal") else op.logical_not(rewriter.emit(is_none))


@rule(*_NEUTRAL)
def drop_neutral(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """x + 0 and x * 1 are x."""
    neutral = _NEUTRAL[call.op.name]
    first, second = call.args
    operands = [(first, second)]  # what is kept, and what may be neutral
    if call.op.name in ("relax.add", "relax.multiply"):
        operands.append((second, first))
    for kept, other in operands:
        value = rewriter.value(other)
        if value is None or value.size > _MAX_NEUTRAL or not np.all(value == neutral):
            continue
        if rewriter.value(kept) is None and _same_shape(rewriter, kept, call):
            return kept
    return None


@rule("relax.add", "relax.multiply", "relax.maximum", "relax.minimum")
def constant_last(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """c + x as x + c: one spelling, so that equal subgraphs are found to be equal."""
    first, second = call.args
    if rewriter.value(first) is None or rewriter.value(second) is not None:
        return None
    return relax.Call(call.op, [second, first], call.attrs, call.ty_args)


@rule("relax.add")
def product_first(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """residual + product as product + residual: again one spelling; FuseOps fuses both."""
    first, second = (_is_contraction(rewriter, argument) for argument in call.args)
    return relax.Call(call.op, [call.args[1], call.args[0]], call.attrs, call.ty_args) if second and not first else None


def _is_contraction(rewriter: Rewriter, expr: relax.Expr) -> bool:
    """Whether it is a convolution or a matrix product, with a bias or without, that is read once."""
    if not rewriter.read_once(expr):
        return False
    shifted = rewriter.calls(expr, "relax.add")
    if shifted is not None and rewriter.value(shifted.args[1]) is not None:
        expr = shifted.args[0]
    return rewriter.calls(expr, *CONTRACTIONS, "relax.einsum") is not None


@rule("relax.divide")
def divide_by_constant(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """x / c is x * (1 / c): within one rounding, and many times faster."""
    value = rewriter.value(call.args[1])
    if value is None or value.dtype.kind != "f" or not np.all(np.isfinite(value)) or np.any(value == 0):
        return None
    with np.errstate(over="ignore", under="ignore"):
        reciprocal = (1 / value.astype(np.float64)).astype(value.dtype)
    if not np.all(np.isfinite(reciprocal)) or np.any(np.abs(reciprocal) < np.finfo(value.dtype).tiny):
        return None
    return op.multiply(call.args[0], constant(reciprocal))


@rule("relax.sum")
def unstack_sum(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """sum(stack(a, b), axis=0) is how the importer spells ONNX's Sum: a + b."""
    stack = rewriter.calls(call.args[0], "relax.stack")
    first_axis = [int(axis) for axis in call.attrs.axis or []] == [0] and not call.attrs.keepdims
    if stack is None or not first_axis or int(stack.attrs.axis or 0) != 0:
        return None
    total = None
    for term in rewriter.fields(stack.args[0]) or []:
        spread = rewriter.calls(term, "relax.broadcast_to")
        if spread is not None and rewriter.shape(spread.args[0]) == rewriter.shape(term):
            term = spread.args[0]
        total = term if total is None else rewriter.emit(op.add(total, term))
    return total


@rule("relax.call_tir")
def plain_clip(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """The importer writes each bound of ONNX's Clip as a TIR function, which ConvertLayout cannot see through."""
    operator = _CLIP.get(call.args[0].name_hint.rstrip("0123456789"))
    if operator is None or len(call.args[1].fields) != 2:
        return None
    x, bound = call.args[1].fields
    value = rewriter.value(bound)
    return None if value is None or value.ndim else operator(x, constant(value))


@rule("relax.clip")
def two_sided_clip(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """clip(x, a, b) as maximum and minimum, for which ConvertLayout has rules."""
    low, high = (rewriter.value(bound) for bound in call.args[1:])
    if low is None or high is None or not dtype(call.args[0]).startswith("float"):
        return None
    x, kind = call.args[0], dtype(call.args[0])
    with np.errstate(over="ignore"):  # the lowest float32 as a bound of float16
        low, high = low.astype(kind), high.astype(kind)
    if low != -np.inf:
        x = rewriter.emit(op.maximum(x, constant(low)))
    return op.minimum(x, constant(high)) if high != np.inf else x


@rule("relax.where")
def decided_where(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Where the condition is known and the same everywhere, one side is left."""
    condition = rewriter.value(call.args[0])
    if condition is None or condition.size == 0 or not (np.all(condition) or not np.any(condition)):
        return None
    side = call.args[1 if np.all(condition) else 2]
    return side if _same_shape(rewriter, side, call) else None


def _same_shape(rewriter: Rewriter, a: relax.Expr, b: relax.Expr) -> bool:
    """Whether the shapes of both are known, and equal."""
    shape = rewriter.shape(a)
    return shape is not None and shape == rewriter.shape(b)


@rule("relax.nn.prelu")
def prelu_by_element(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """max(x, 0) + slope * min(x, 0), which FuseOps takes for an epilogue of a convolution; TVM's own selects, and is
    a kernel of its own."""
    x, slope = call.args
    shape, slopes = rewriter.shape(x), rewriter.shape(slope)
    if shape is None or slopes is None or not dtype(x).startswith("float"):
        return None
    by_channel = [1] * len(shape)
    by_channel[int(call.attrs.axis)] = slopes[0]
    zero = constant(np.array(0, dtype(x)))
    below = rewriter.emit(op.minimum(x, zero))
    scaled = rewriter.emit(op.multiply(below, rewriter.emit(op.reshape(slope, by_channel))))
    return op.add(rewriter.emit(op.nn.relu(x)), scaled)


@rule("relax.nn.leakyrelu")
def leaky_relu_by_element(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """max(x, slope * x): ConvertLayout knows no leaky ReLU, and leaves a transposition before and after each."""
    x, slope = call.args[0], float(call.attrs.alpha)
    if not 0 <= slope <= 1 or not dtype(x).startswith("float"):
        return None
    return op.maximum(rewriter.emit(op.multiply(x, constant(np.array(slope, dtype(x))))), x)


@rule("relax.nn.softplus")
def softplus_by_element(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """max(x, 0) + log(1 + exp(-|x|)), which overflows nowhere; ConvertLayout does not know softplus either."""
    x = call.args[0]
    if float(call.attrs.beta) != 1 or not dtype(x).startswith("float"):
        return None
    decayed = rewriter.emit(op.exp(rewriter.emit(op.negative(rewriter.emit(op.abs(x))))))
    logarithm = rewriter.emit(op.log(rewriter.emit(op.add(decayed, constant(np.array(1, dtype(x)))))))
    return op.add(rewriter.emit(op.nn.relu(x)), logarithm)


@rule("relax.astype")
def same_type(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A cast to what it is already."""
    return call.args[0] if dtype(call.args[0]) == str(call.attrs.dtype) else None


@rule("relax.nn.dropout[0]")
def drop_dropout(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Dropout is the identity at inference."""
    return call.args[0]


RULES: list[Rule] = [
    cheap_power,
    compared_with_itself,
    drop_neutral,
    constant_last,
    product_first,
    divide_by_constant,
    unstack_sum,
    plain_clip,
    two_sided_clip,
    decided_where,
    prelu_by_element,
    leaky_relu_by_element,
    softplus_by_element,
    same_type,
    drop_dropout,
]
