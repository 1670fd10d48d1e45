"""Element-wise operators behind a concatenation, before it.

Where several convolutions are joined and what follows is of the whole (MixNet: kernels of several sizes, then one batch
norm and one activation), it is of each part here: a batch norm becomes part of weights then, and an activation of the
convolution's own loop nest, where it would be one more pass over the image.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import CONVOLUTIONS, Rewriter, Rule, constant, is_call, rule

_WITH_CONSTANTS = ("relax.add", "relax.subtract", "relax.multiply", "relax.divide", "relax.maximum", "relax.minimum")
_ALONE = ("relax.nn.relu", "relax.clip", "relax.sigmoid", "relax.tanh", "relax.nn.silu", "relax.nn.gelu")


@rule(*_WITH_CONSTANTS, *_ALONE)
def before_join(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """An operator on what several convolutions computed, and constants, on the results of each of them."""
    join, others = rewriter.calls(call.args[0], "relax.concat"), call.args[1:]
    parts = None if join is None else _parts(rewriter, join, call.args[0], readers=1)
    if join is None or parts is None:
        return None
    sliced = [_slices(rewriter, each, join, parts) for each in others]
    known = [each for each in sliced if each is not None]
    if len(known) < len(sliced):
        return None
    made = [
        rewriter.emit(relax.Call(call.op, [part, *rest], call.attrs, call.ty_args))
        for part, *rest in zip(parts, *known, strict=True)
    ]
    return op.concat(made, join.attrs.axis)


@rule("relax.multiply")
def gate_before_join(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """`x * sigmoid(x)` likewise."""
    for x, gate in (tuple(call.args), tuple(call.args)[::-1]):
        sigmoid, join = rewriter.calls(gate, "relax.sigmoid"), rewriter.calls(x, "relax.concat")
        if sigmoid is None or join is None or not sigmoid.args[0].same_as(x) or not rewriter.read_once(gate):
            continue
        parts = _parts(rewriter, join, x, readers=2)
        if parts is not None:
            made = [rewriter.emit(op.multiply(part, rewriter.emit(op.sigmoid(part)))) for part in parts]
            return op.concat(made, join.attrs.axis)
    return None


def _parts(rewriter: Rewriter, join: relax.Call, joined: relax.Expr, readers: int) -> list[relax.Expr] | None:
    """What is joined, if all of it is of convolutions, and nothing else reads it or the whole."""
    parts = rewriter.fields(join.args[0])
    if parts is None or join.attrs.axis is None or rewriter.readers(joined) != readers:
        return None
    is_own = all(rewriter.read_once(part) and _is_convolved(rewriter, part) for part in parts)
    return parts if is_own and all(rewriter.shape(part) for part in parts) else None


def _is_convolved(rewriter: Rewriter, expr: relax.Expr) -> bool:
    """Whether a convolution computes it, with element-wise operators behind it."""
    call = rewriter.definition(expr)
    while is_call(call, *_WITH_CONSTANTS, *_ALONE):
        call = rewriter.definition(call.args[0])
    return is_call(call, *CONVOLUTIONS)


def _slices(
    rewriter: Rewriter, expr: relax.Expr, join: relax.Call, parts: Sequence[relax.Expr]
) -> list[relax.Expr] | None:
    """A constant that is broadcast to a concatenation, for each of its parts."""
    value, shapes = rewriter.value(expr), [rewriter.shape(part) or () for part in parts]
    rank = len(shapes[0])
    if value is None or value.ndim > rank:
        return None
    axis = int(join.attrs.axis) % rank
    own = axis - (rank - value.ndim)  # of the constant, which may have fewer axes
    if own < 0 or value.shape[own] == 1:
        return [expr] * len(parts)
    ends = np.cumsum([0, *(shape[axis] for shape in shapes)])
    return [constant(np.take(value, range(begin, end), own)) for begin, end in pairwise(ends)]


RULES: list[Rule] = [before_join, gate_before_join]
