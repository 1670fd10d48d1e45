"""Convolutions of the same data that are added up, as one with the sum of their kernels.

Branches of a network as it was trained (RepVGG's 3x3 beside 1x1 beside nothing, RepLKNet's large kernel beside a small
one), or of several sizes on purpose (TimesNet): a smaller kernel is a larger one with zeros around it, and data that
are added as they are, or scaled by channel, are a kernel of one tap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import CONVOLUTIONS, Rewriter, Rule, alike, constant, dtype, groups_of, rule


@dataclass(frozen=True, slots=True)
class _Convolved:
    """A convolution, and a constant behind it."""

    call: relax.Call
    kernel: np.ndarray  # as the convolution has it
    shift: np.ndarray | None

    @property
    def data(self) -> relax.Expr:
        return self.call.args[0]


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Data, scaled, and a constant behind them."""

    data: relax.Expr
    scale: np.ndarray
    shift: np.ndarray | None


@rule("relax.add")
def sum_of_convolutions(rewriter: Rewriter, add: relax.Call) -> relax.Expr | None:
    """conv(x, v) + conv(x, w) is conv(x, v + w), where the larger kernel holds the smaller one."""
    branches = [branch for each in add.args if (branch := _branch(rewriter, each))]
    convolved = [each for each in branches if isinstance(each, _Convolved)]
    scaled = [each for each in branches if isinstance(each, _Scaled)]
    if len(branches) < 2 or not convolved or not branches[0].data.same_as(branches[1].data):
        return None
    joined = _with_data(rewriter, convolved[0], scaled[0]) if scaled else _joined(rewriter, *convolved)
    if joined is None or rewriter.shape(joined) != rewriter.shape(add):
        return None
    shifts = [each.shift for each in branches if each.shift is not None]
    if not shifts:
        return joined
    shift = sum(shifts[1:], shifts[0])
    if shift.size > max(each.size for each in shifts):  # of channels and of places, which are as many as both
        return None
    return op.add(rewriter.emit(joined), constant(shift))


def _branch(rewriter: Rewriter, expr: relax.Expr) -> _Convolved | _Scaled | None:
    """None if it is something else, or something else reads it."""
    if dtype(expr) != "float32":
        return None
    inner, shift = _undone(rewriter, "relax.add", expr)
    if (call := rewriter.calls(inner, *CONVOLUTIONS)) is not None:
        kernel = rewriter.value(call.args[1])
        return None if kernel is None or not rewriter.read_once(inner) else _Convolved(call, kernel, shift)
    data, scale = _undone(rewriter, "relax.multiply", inner)
    return _Scaled(data, np.ones(1, np.float32) if scale is None else scale, shift)


def _undone(rewriter: Rewriter, operator: str, expr: relax.Expr) -> tuple[relax.Expr, np.ndarray | None]:
    """What a constant is added to or multiplied with, and that constant; the expression itself if it is something else,
    or something else reads it."""
    call = rewriter.calls(expr, operator)
    value = None if call is None or not rewriter.read_once(expr) else rewriter.value(call.args[1])
    return (expr, None) if call is None or value is None else (call.args[0], value)


def _with_data(rewriter: Rewriter, convolved: _Convolved, scaled: _Scaled) -> relax.Call | None:
    """A convolution plus its data, each channel scaled: as much more at the tap that sees a result's own place."""
    call, kernel = convolved.call, convolved.kernel.copy()
    layout, axes = str(call.attrs.kernel_layout), _spatial(call)
    shape, scale = rewriter.shape(call.args[0]), scaled.scale
    channel = str(call.attrs.data_layout).index("C")
    if shape is None or rewriter.shape(call) != shape or any(int(s) != 1 for s in call.attrs.strides):
        return None
    along = (1,) * (len(shape) - scale.ndim) + scale.shape
    if scale.size not in (1, shape[channel]) or along[channel] != scale.size:
        return None
    before, distance = _before(call), [int(d) for d in call.attrs.dilation]
    taps = [p // d for p, d in zip(before, distance, strict=True)]
    is_there = all(p % d == 0 and tap < kernel.shape[axis]
                   for p, d, tap, axis in zip(before, distance, taps, axes, strict=True))  # fmt: skip
    if not is_there:
        return None
    outputs = np.arange(shape[channel])
    at: list[Any] = [0] * len(layout)
    at[layout.index("O")] = outputs
    at[layout.index("I")] = outputs % kernel.shape[layout.index("I")]
    for tap, axis in zip(taps, axes, strict=True):
        at[axis] = tap
    kernel[tuple(at)] += scale.reshape(-1)
    return alike(call, call.args[0], constant(kernel), dtype(call))


def _joined(rewriter: Rewriter, first: _Convolved, second: _Convolved) -> relax.Call | None:
    """One convolution for two; None if they do not fit, or its kernel has more taps than both."""
    a, b = first.call, second.call
    if a.op.name != b.op.name or groups_of(a) != groups_of(b) or rewriter.shape(a) != rewriter.shape(b):
        return None
    if any(str(a.attrs[name]) != str(b.attrs[name]) for name in ("data_layout", "kernel_layout", "out_layout")):
        return None
    strides = [[int(s) for s in call.attrs.strides] for call in (a, b)]
    extents = [[each.kernel.shape[axis] for axis in _spatial(a)] for each in (first, second)]
    distance = _distance([[int(d) for d in call.attrs.dilation] for call in (a, b)], extents)
    if strides[0] != strides[1] or distance is None:
        return None
    before = [max(pair) for pair in zip(_before(a), _before(b), strict=True)]
    moved = [[(most - own) for most, own in zip(before, _before(call), strict=True)] for call in (a, b)]
    if any(move % step for each in moved for move, step in zip(each, distance, strict=True)):
        return None
    places = [[move // step for move, step in zip(each, distance, strict=True)] for each in moved]
    taps = [max(p + n for p, n in zip(*pair, strict=True))
            for pair in zip(zip(*places, strict=True), zip(*extents, strict=True), strict=True)]  # fmt: skip
    if np.prod(taps) > np.prod(extents[0]) + np.prod(extents[1]):
        return None
    kernels = [_placed(each.kernel, _spatial(a), place, taps)
               for each, place in zip((first, second), places, strict=True)]  # fmt: skip
    after = _after(rewriter, a, strides[0], before, distance, taps)
    wider = a if np.prod(extents[0]) >= np.prod(extents[1]) else b  # whose dilation it is
    return (
        None
        if after is None
        else alike(wider, first.data, constant(kernels[0] + kernels[1]), dtype(a), [*before, *after])
    )


def _distance(dilations: Sequence[Sequence[int]], extents: Sequence[Sequence[int]]) -> list[int] | None:
    """Between taps, along each axis: of a single tap it says nothing; None if two differ."""
    found = []
    for pair, taps in zip(zip(*dilations, strict=True), zip(*extents, strict=True), strict=True):
        known = {own for own, n in zip(pair, taps, strict=True) if n > 1} or {pair[0]}
        if len(known) > 1:
            return None
        found.append(known.pop())
    return found


def _after(
    rewriter: Rewriter, call: relax.Call, strides: Sequence[int], before: Sequence[int], distance: Sequence[int],
    taps: Sequence[int],
) -> list[int] | None:  # fmt: skip
    """Zeros behind the data that such a kernel needs for as many results."""
    data, out, layout = rewriter.shape(call.args[0]), rewriter.shape(call), str(call.attrs.data_layout)
    if data is None or out is None:
        return None
    places = [n for n, axis in enumerate(layout) if axis not in "NC"]
    return [
        max(0, (out[axis] - 1) * stride - first + (n - 1) * step - (data[axis] - 1))
        for axis, stride, first, step, n in zip(places, strides, before, distance, taps, strict=True)
    ]


def _placed(kernel: np.ndarray, axes: Sequence[int], place: Sequence[int], taps: Sequence[int]) -> np.ndarray:
    """A kernel among so many taps, from a place on."""
    around = [(0, 0)] * kernel.ndim
    for axis, first, n in zip(axes, place, taps, strict=True):
        around[axis] = first, n - first - kernel.shape[axis]
    return np.pad(kernel, around)


def _spatial(call: relax.Call) -> list[int]:
    """The axes of a convolution's kernel along which it has taps."""
    return [n for n, axis in enumerate(str(call.attrs.kernel_layout)) if axis not in "OI"]


def _before(call: relax.Call) -> list[int]:
    """Zeros before the data along each of these."""
    return [int(p) for p in call.attrs.padding][: len(_spatial(call))]


RULES: list[Rule] = [sum_of_convolutions]
