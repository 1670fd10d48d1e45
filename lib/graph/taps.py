"""Convolutions to a few channels, whose taps along a line become columns.

The last convolution of a network that makes images, sounds or maps has three channels, or one: of a vector of sixteen
columns the others are computed for nothing (`lib.graph.widen`). Here each tap along the lines is a column of its own
for each channel. A convolution one tap wide computes them all, nine in place of three for a kernel of 3x3 and three
channels, for a third of the work; and each result is the sum of those that its taps have at its neighbours:

    out[y, x, c] = sum over r of wide[y, x + r, r, c]

Padding at the ends of lines is padding of the wide image, whose numbers there come from zeros.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from tvm import relax, te, tirx

from lib.graph import patterns
from lib.graph.reweight import Choose, Replacement, shape_of
from lib.graph.rewrite import CONVOLUTIONS, alike, dtype, groups_of, is_call, is_channels_last

_FUNCTION = "summed_taps"
_GAIN = 2  # times fewer vectors to compute, from which on the sums are paid for
_SUMMAND = 4  # what a summand costs: as much as so many products of a vector


def replacement(lanes: int) -> Choose:
    """What computes a convolution's taps along its lines as columns, where that fills vectors of `lanes` better."""
    return partial(_replacement, lanes)


def _replacement(lanes: int, call: relax.Call) -> Replacement | None:
    if not is_call(call, *CONVOLUTIONS) or {dtype(call), dtype(call.args[1])} != {"float32"}:
        return None
    if groups_of(call) > 1 or not is_channels_last(call) or int(call.attrs.strides[-1]) != 1:
        return None
    *before, taps, inputs, columns = shape_of(call.args[1])
    vectors = -(-taps * columns // lanes)
    saved = (taps - vectors) * int(np.prod(before)) * inputs
    if columns > lanes // 2 or taps < _GAIN * vectors or saved < _SUMMAND * taps * columns:
        return None
    shape = (*before, 1, inputs, vectors * lanes)
    return Replacement(
        kind=(_FUNCTION, shape), value=partial(side_by_side, vectors * lanes), shape=shape, emit=partial(_emit, taps)
    )


def side_by_side(columns: int, weight: np.ndarray) -> np.ndarray:
    """A kernel (..., taps, inputs, channels) as one of a single tap (..., 1, inputs, columns): the channels of each tap
    after those of the one before, and zeros."""
    *before, taps, inputs, channels = weight.shape
    rows = np.moveaxis(weight, -3, -2).reshape(*before, 1, inputs, taps * channels)
    return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, columns - taps * channels)])


def _emit(taps: int, builder: relax.BlockBuilder, call: relax.Call, args: Sequence[relax.Expr]) -> relax.Expr:
    wide = builder.emit(alike(call, args[0], args[1], dtype(call)))
    summed = partial(_summed, taps, int(call.attrs.dilation[-1]), shape_of(call))
    return builder.call_te(
        summed, wide, primfunc_name_hint=_FUNCTION, primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE)
    )


def _summed(taps: int, distance: int, shape: Sequence[int], wide: te.Tensor) -> te.Tensor:
    def result(*index: tirx.Var) -> tirx.Expr:
        *before, x, channel = index
        parts = [wide(*before, x + tap * distance, tap * shape[-1] + channel) for tap in range(taps)]
        return sum(parts[1:], parts[0])

    return te.compute(tuple(shape), result, name=_FUNCTION)
