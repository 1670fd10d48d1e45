"""What formulas of one tensor are called: exporters of before ONNX had a Gelu write one as five to eight operators, in
many an order.

A formula is known by its values: what multiplies a tensor is computed on some numbers, and compared with what the
function would be. So all orders, and all ways to write a cube or a root of two, are one.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import erf
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import Rewriter, Rule, rule
from lib.graph.rules import constants

_X = np.linspace(-6, 6, 193)
_EQUAL = 2e-6  # of what differs by how constants were rounded; the two kinds of Gelu are 5e-4 apart
_FUNCTIONS = {
    op.nn.gelu: _X * (1 + erf(_X / np.sqrt(2))) / 2,
    op.nn.gelu_tanh: _X * (1 + np.tanh(np.sqrt(2 / np.pi) * (_X + 0.044715 * _X**3))) / 2,
}
_DEEPEST = 8  # operators from the tensor to the product


@rule("relax.multiply", "relax.divide")
def gelu(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A tensor, what of it is between zero and one, and a constant, multiplied in any order."""
    factors, scale = _factors(rewriter, call)
    if len(factors) != 2:
        return None
    for x, function in (factors, factors[::-1]):
        if rewriter.calls(function, "relax.add", "relax.multiply") is None or rewriter.shape(x) != rewriter.shape(call):
            continue
        values = _values(rewriter, function, rewriter.definition(x), _DEEPEST)
        if values is None or values.shape != _X.shape:
            continue
        for made, expected in _FUNCTIONS.items():
            if np.abs(scale * _X * values - expected).max() < _EQUAL:
                return made(x)
    return None


def _factors(rewriter: Rewriter, call: relax.Call) -> tuple[list[relax.Expr], float]:
    """Of a product, through products that it alone reads; and the product of those that are constant numbers."""
    factors, scale = list[relax.Expr](), 1.0
    left, right = call.args
    pending: list[tuple[relax.Expr, bool]] = [(left, False), (right, call.op.name == "relax.divide")]
    while pending:
        expr, is_divisor = pending.pop()
        value = _number(rewriter, expr)
        inner = rewriter.calls(expr, "relax.multiply", "relax.divide")
        if value is not None and value:
            scale *= 1 / value if is_divisor else value
        elif inner is not None and not is_divisor and rewriter.read_once(expr) and len(factors) + len(pending) < 3:
            pending += [(inner.args[0], False), (inner.args[1], inner.op.name == "relax.divide")]
        elif is_divisor:
            return [], scale
        else:
            factors.append(expr)
    return factors, scale


def _number(rewriter: Rewriter, expr: relax.Expr) -> float | None:
    value = rewriter.value(expr)
    return float(value.reshape(())) if value is not None and value.size == 1 and value.dtype.kind == "f" else None


def _values(rewriter: Rewriter, expr: relax.Expr, x: relax.Expr, depth: int) -> np.ndarray | None:
    """What an expression is where a tensor has the values of `_X`; None if it depends on something else."""
    definition = rewriter.definition(expr)
    if definition.same_as(x):
        return _X
    if (number := _number(rewriter, expr)) is not None:
        return np.asarray(number)
    if depth == 0 or not isinstance(definition, relax.Call) or rewriter.calls(expr, *constants.ELEMENTWISE) is None:
        return None
    args: Sequence[np.ndarray | None] = [_values(rewriter, arg, x, depth - 1) for arg in definition.args]
    known = [arg for arg in args if arg is not None]
    if len(known) < len(args):
        return None
    with np.errstate(all="ignore"):
        return np.asarray(constants.FUNCTIONS[definition.op.name](*known))


RULES: list[Rule] = [gelu]
