"""Depthwise convolutions of bytes by words: which, and that they are NumPy's; run untuned, so on any CPU."""

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

from lib.graph import precision, words
from lib.graph.rewrite import CHANNELS_LAST
from lib.graph.words import FUNCTION
from lib.machine.dots import AMX_INT8
from tests.lib.graph.test_precision import functions, of_bytes, run

DATA, KERNEL = CHANNELS_LAST["relax.nn.conv2d"]


def convolved(x, w, strides, padding, dilation=(1, 1)):
    """Each channel by itself, in NHWC, with weights (H, W, 1, C)."""
    top, left, bottom, right = padding
    padded = np.pad(x.astype(np.int64), ((0, 0), (top, bottom), (left, right), (0, 0)))
    reach = [(n - 1) * apart + 1 for n, apart in zip(w.shape, dilation, strict=False)]
    every = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=(1, 2))
    every = every[:, :: strides[0], :: strides[1], :, :: dilation[0], :: dilation[1]]
    return np.einsum("nyxcij,ijc->nyxc", every, w[:, :, 0].astype(np.int64))


def convolution(channels, strides=(1, 1), padding=(1, 1, 1, 1), dilation=(1, 1), around=0):
    def build(builder, x, w):
        if around:
            x = builder.emit(op.nn.pad(x, [0, 0, 1, 1, 1, 1, 0, 0], "constant", float(around)))
        return op.nn.conv2d(
            x, w, strides=strides, padding=(0, 0, 0, 0) if around else padding, dilation=dilation, groups=channels,
            data_layout=DATA, kernel_layout=KERNEL, out_dtype="int32",
        )  # fmt: skip

    return build


@pytest.mark.parametrize(
    ("image", "window", "strides", "padding", "dilation", "n_words"),
    [
        ((1, 9, 11, 16), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
        ((2, 9, 12, 24), (5, 5), (2, 2), (2, 2, 2, 2), (1, 1), 2),
        ((1, 14, 14, 32), (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 2),
        ((1, 12, 12, 16), (3, 3), (2, 1), (0, 2, 1, 0), (2, 3), 1),
        ((1, 10, 9, 4), (4, 2), (2, 2), (1, 0, 1, 0), (1, 1), 1),
        ((1, 13, 9, 8), (9, 3), (1, 1), (0, 0, 0, 0), (1, 1), 3),
    ],
    ids=["3x3", "5x5 by twos, a batch", "7x7", "dilated, padded unevenly", "whole words", "three words"],
)
def test_depthwise_convolutions_are_numpys_to_the_last_bit(cpu, image, window, strides, padding, dilation, n_words):
    channels = image[-1]
    plain, x, w = of_bytes(image, (*window, 1, channels), convolution(channels, strides, padding, dilation))

    by_words = precision.in_quads(plain, 16, AMX_INT8)

    assert by_words.weights["w"].shape == (n_words, window[1], channels, 4)
    assert any(FUNCTION in name for name, _ in functions(by_words, cpu))
    np.testing.assert_array_equal(run(by_words, [x], cpu), convolved(x, w, strides, padding, dilation))


def test_a_zero_point_around_the_image_is_taken_in(cpu):
    image, zero = (1, 8, 8, 16), 7
    plain, x, w = of_bytes(image, (3, 3, 1, 16), convolution(16, around=zero))

    by_words = precision.in_quads(plain, 16)

    assert "nn.pad" in plain.module.script()
    assert "nn.pad" not in by_words.module.script()
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=zero)
    np.testing.assert_array_equal(run(by_words, [x], cpu), convolved(padded, w, (1, 1), (0, 0, 0, 0)))


@pytest.mark.parametrize(
    ("kernel", "channels"),
    [((1, 7, 1, 16), 16), ((7, 1, 1, 16), 16), ((3, 3, 1, 32), 16), ((3, 3, 1, 6), 6), ((3, 3, 2, 16), 8)],
    ids=["one line", "one column", "two results of each", "no vectors of channels", "groups"],
)
def test_other_convolutions_stay_as_they_are(kernel, channels):
    image = (1, 9, 9, channels * kernel[2])
    plain, _, _ = of_bytes(image, kernel, convolution(channels))

    assert FUNCTION not in precision.in_quads(plain, 16).module.script()


@pytest.mark.parametrize(("height", "is_replaced"), [(9, True), (tirx.Var("n", "int64"), False)])
def test_images_of_any_size_keep_the_convolution(height, is_replaced):
    builder, image = relax.BlockBuilder(), relax.Var("x", relax.TensorType((1, height, 9, 16), "uint8"))
    weight = relax.Var("w", relax.TensorType((3, 3, 1, 16), "int8"))
    with builder.function("main", [image, weight]):
        sums = builder.emit(convolution(16)(builder, image, weight))
        call = builder.lookup_binding(sums)
        builder.emit_func_output(sums)

    assert (words.replacement(16, call) is not None) == is_replaced


def test_a_cpu_without_the_instruction_keeps_the_convolution():
    plain, _, _ = of_bytes((1, 9, 9, 16), (3, 3, 1, 16), convolution(16))

    assert FUNCTION not in precision.in_quads(plain, 16, packs=False).module.script()
