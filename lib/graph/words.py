"""Depthwise convolutions of bytes by words: lines that a window covers are brought side by side, four to a word.

An instruction of `lib.machine.dots` adds four products to each lane, of bytes beside each other. A depthwise
convolution adds no channels, though, and the pixels that its window covers are a line or all channels apart. So words
are made first: for each line of results, column and channel, the bytes of up to four lines of the image. That takes a
shift and an `or` for each; a word is then read for as many results as the window has columns, and each time it is one
lane of an instruction, in place of up to four products that would have one each.
"""

from collections.abc import Sequence
from functools import partial, reduce
from operator import or_

import numpy as np
from tvm import relax, te, tirx, topi

from lib.graph import patterns
from lib.graph.padding import taken_in
from lib.graph.reweight import Replacement, shape_of
from lib.graph.rewrite import dtype, groups_of, is_call, is_channels_last
from lib.machine.dots import INT8
from lib.machine.registers import narrowed

FUNCTION = "by_words"  # in the names of the functions, for people
_BITS = 8  # of a byte


def replacement(lanes: int, call: relax.Call) -> Replacement | None:
    """Of a depthwise convolution in NHWC whose window has several lines and columns; its channels must fill vectors."""
    types = tuple(map(dtype, (*call.args[:2], call))) if is_call(call, "relax.nn.conv2d") else ()
    if types != (INT8.data, INT8.weights, INT8.sums) or not is_channels_last(call) or not shape_of(call):
        return None
    lines, columns, inputs, channels = shape_of(call.args[1]) or (0, 0, 0, 0)
    if inputs != 1 or groups_of(call) != channels or min(lines, columns) < 2 or narrowed(lanes, channels) == 1:
        return None
    words = -(-lines // INT8.depth)
    together = -(-lines // words)
    return Replacement(
        kind=FUNCTION, value=partial(_in_words, words, together), dtype=INT8.weights,
        shape=(words, columns, channels, INT8.depth), emit=partial(_emit, together),
    )  # fmt: skip


def _in_words(words: int, together: int, weight: np.ndarray) -> np.ndarray:
    """A window (H, W, 1, C) as (words, W, C, 4), so many lines in each word, and zeros after the last of them."""
    lines, columns, _, channels = weight.shape
    whole = np.pad(weight[:, :, 0], [(0, words * together - lines), (0, 0), (0, 0)])
    apart = whole.reshape(words, together, columns, channels).transpose(0, 2, 3, 1)
    return np.pad(apart, [(0, 0)] * 3 + [(0, INT8.depth - together)])


def _emit(together: int, builder: relax.BlockBuilder, call: relax.Call, args: Sequence[relax.Expr]) -> relax.Expr:
    data, padding, value = taken_in(builder, args[0], [int(n) for n in call.attrs.padding])
    steps, apart = ([int(n) for n in of] for of in (call.attrs.strides, call.attrs.dilation))
    convolution = partial(_convolution, shape_of(call), together, steps, apart, value)
    return builder.call_te(
        convolution, data, args[1], padding,
        primfunc_name_hint=f"conv2d_{FUNCTION}", primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE),
    )  # fmt: skip


def _convolution(
    shape: Sequence[int],
    together: int,
    steps: Sequence[int],
    apart: Sequence[int],
    value: int,
    image: te.Tensor,
    weight: te.Tensor,
    padding: Sequence[int],
) -> te.Tensor:
    """An image (N, H, W, C), padded with a value, by a window (words, columns, C, 4), with so many lines in each word;
    of a shape. What the last word has after the window's last line is multiplied by zeros, whatever it is."""
    n_words, n_columns, _, n_bytes = (int(extent) for extent in weight.shape)
    top, left, bottom, right = padding
    height = (shape[1] - 1) * steps[0] + (n_words * together - 1) * apart[0] + 1
    bottom = max(bottom, height - top - int(image.shape[1]))
    if any((top, left, bottom, right)):
        image = topi.nn.pad(image, [0, top, left, 0], [0, bottom, right, 0], tirx.const(value, image.dtype))
    width = (shape[2] - 1) * steps[1] + (n_columns - 1) * apart[1] + 1

    def word(n: tirx.Var, line: tirx.Var, of_window: tirx.Var, column: tirx.Var, channel: tirx.Var) -> tirx.Expr:
        first = line * steps[0] + of_window * (together * apart[0])
        pixels = [image(n, first + k * apart[0], column, channel).astype("uint32") for k in range(together)]
        return reduce(or_, (pixel << tirx.const(k * _BITS, "uint32") for k, pixel in enumerate(pixels)))

    words = te.compute([shape[0], shape[1], n_words, width, shape[3]], word, name="words")
    of_window, tap, k = (
        te.reduce_axis((0, extent), name) for name, extent in (("word", n_words), ("tap", n_columns), ("byte", n_bytes))
    )

    def at(n: tirx.Var, line: tirx.Var, column: tirx.Var, channel: tirx.Var) -> tirx.Expr:
        found = words(n, line, of_window, column * steps[1] + tap * apart[1], channel)
        byte = (found >> (k * _BITS).astype("uint32")) & tirx.const(2**_BITS - 1, "uint32")
        factors = [each.astype(INT8.sums) for each in (byte, weight(of_window, tap, channel, k))]
        return te.sum(factors[0] * factors[1], axis=[of_window, tap, k])

    return te.compute([tirx.IntImm("int64", n) for n in shape], at, name=f"conv2d_{FUNCTION}")
