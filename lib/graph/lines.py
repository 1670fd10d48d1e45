"""Convolutions of few channels by lines: pixels beside each other are summed as if they were one pixel's channels.

An instruction for matrices (`lib.machine.dots`) multiplies 32 neighbours along the reduction at once, or 64 of bytes.
The three channels of an image are a tenth of that, and most of the first convolution of a network would be
multiplications by nothing. In NHWC the pixels of a line lie one after the other, and so do those that a line of the
kernel covers: its columns and their channels are one axis, 7 x 4 of them for the first convolution of a ResNet, which
begins `stride` pixels further for the next result.
"""

from collections.abc import Sequence
from functools import partial

import ml_dtypes
import numpy as np
from tvm import relax, te, tirx, topi
from tvm.relax import op

from lib.graph import patterns, reweight
from lib.graph.padding import taken_in
from lib.graph.reweight import Replacement, shape_of
from lib.graph.rewrite import CONVOLUTIONS, dtype, is_call, is_channels_last
from lib.machine.dots import Matrix

FUNCTION = "by_lines"  # in the names of the functions, for people
_NARROW = {"bfloat16": ml_dtypes.bfloat16, "int8": np.int8}


def replacement(matrix: Matrix, given: str, call: relax.Call) -> Replacement | None:
    """Of a convolution in NHWC (signals in NWC, volumes in NDHWC) whose channels fill at most half of a step of an
    instruction.

    Args:
        given: The element type of its weights: that of the instruction, or what is to be rounded to it.
    """
    dot = matrix.dot
    if not is_call(call, *CONVOLUTIONS) or (dtype(call.args[1]), dtype(call)) != (given, dot.sums):
        return None
    attrs, kernel = call.attrs, shape_of(call.args[1])
    is_plain = int(attrs.groups) == 1 and {int(n) for n in attrs.dilation} == {1}
    if not is_plain or not is_channels_last(call) or not kernel or not shape_of(call.args[0]):
        return None
    *outer, width, channels, columns = kernel
    more = -width * channels % dot.depth
    if width == 1 or 2 * channels > dot.depth * matrix.STEPS:
        return None
    return Replacement(
        kind=(FUNCTION, more), value=partial(_by_lines, more, dot.weights), dtype=dot.weights,
        shape=(*outer, width * channels + more, columns), emit=partial(_emit, matrix),
    )  # fmt: skip


def _by_lines(more: int, kind: str, weight: np.ndarray) -> np.ndarray:
    """(..., W, I, O) as (..., W * I, O), with so many zeros after each line."""
    *outer, width, channels, columns = weight.shape
    return reweight.deeper(more, weight.reshape(*outer, width * channels, columns)).astype(_NARROW[kind])


def _emit(matrix: Matrix, builder: relax.BlockBuilder, call: relax.Call, args: Sequence[relax.Expr]) -> relax.Expr:
    data, weight = args
    if dtype(data) != matrix.dot.data:
        data = builder.emit(op.astype(data, matrix.dot.data))
    data, padding, value = taken_in(builder, data, [int(n) for n in call.attrs.padding])
    *outer, width, channels = shape_of(data)
    lines = builder.emit(op.reshape(data, (*outer, width * channels)))
    steps = [int(n) for n in call.attrs.strides]
    return builder.call_te(
        partial(_convolution, matrix.dot.sums, shape_of(call), steps, channels, value), lines, weight, padding,
        primfunc_name_hint=_name(steps), primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE),
    )  # fmt: skip


def _convolution(
    sums: str,
    shape: Sequence[int],
    steps: Sequence[int],
    channels: int,
    value: int,
    lines: te.Tensor,
    weight: te.Tensor,
    padding: Sequence[int],
) -> te.Tensor:
    """Lines (N, ..., W * channels) by kernels (..., W * channels, O): channels last, of a shape, in the type of the
    sums; padded with a value. What a line of the kernel has after its own is multiplied by zeros, whatever it is."""
    before, after = ([*padding[n * len(steps) :][: len(steps)]] for n in (0, 1))
    first, last = (([0, *of[:-1], of[-1] * channels]) for of in (before, after))
    there = first[-1] + int(lines.shape[-1]) + last[-1]
    last[-1] += max((shape[-2] - 1) * steps[-1] * channels + int(weight.shape[-2]) - there, 0)
    if any([*first, *last]):
        lines = topi.nn.pad(lines, first, last, tirx.const(value, lines.dtype))
    names, apart = ("image", "line", "place")[-len(steps) :], [*steps[:-1], steps[-1] * channels]
    window = [te.reduce_axis((0, weight.shape[n]), name) for n, name in enumerate(names)]

    def at(n: tirx.Var, *rest: tirx.Var) -> tirx.Expr:
        *pixel, o = rest
        data = lines(n, *(x * step + tap for x, step, tap in zip(pixel, apart, window, strict=True)))
        return te.sum(data.astype(sums) * weight(*window, o).astype(sums), axis=window)

    return te.compute([tirx.IntImm("int64", n) for n in shape], at, name=_name(steps))


def _name(steps: Sequence[int]) -> str:
    return f"conv{len(steps)}d_{FUNCTION}"
