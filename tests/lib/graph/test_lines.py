"""Convolutions of few channels by lines: which, and that they are NumPy's; run untuned, so on any CPU."""

import numpy as np
import pytest
from tvm.relax import op

from lib.graph import precision
from lib.graph.lines import FUNCTION
from lib.graph.rewrite import CHANNELS_LAST
from lib.machine.dots import AMX_BF16, AMX_INT8
from tests.lib.graph.test_precision import functions, model, of_bytes, rounded, run


def convolved(x, w, strides, padding):
    """Channels last, with weights as `CHANNELS_LAST` has them, in float64."""
    rank, axes = len(strides), tuple(range(1, len(strides) + 1))
    around = list(zip(padding[:rank], padding[rank:], strict=True))
    padded = np.pad(x.astype(np.float64), ((0, 0), *around, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, w.shape[:rank], axis=axes)
    every = windows[(slice(None), *(slice(None, None, step) for step in strides))]
    taps = "abc"[:rank]
    return np.einsum(f"n...m{taps},{taps}mo->n...o", every, w.astype(np.float64))


def convolution(strides, padding, **attrs):
    data, kernel = CHANNELS_LAST[f"relax.nn.conv{len(strides)}d"]
    convolve = getattr(op.nn, f"conv{len(strides)}d")
    return lambda _builder, x, w: convolve(
        x, w, strides=strides, padding=padding, data_layout=data, kernel_layout=kernel, **attrs
    )


@pytest.mark.parametrize(
    ("image", "kernel", "strides", "padding"),
    [
        ((1, 16, 16, 3), (7, 7, 3, 16), (2, 2), (3, 3, 3, 3)),
        ((2, 8, 12, 3), (4, 4, 3, 16), (4, 4), (0, 0, 0, 0)),
        ((1, 9, 11, 4), (3, 5, 4, 16), (1, 2), (0, 1, 2, 3)),
        ((1, 4, 10, 9, 3), (3, 7, 7, 3, 16), (1, 2, 2), (1, 3, 3, 1, 3, 3)),
        ((2, 64, 1), (10, 1, 16), (5,), (3, 2)),
    ],
    ids=["a ResNet's first", "patches", "one side more than the other", "volumes", "signals"],
)
def test_convolutions_of_few_channels_are_numpys(cpu, image, kernel, strides, padding):
    plain = model([image, kernel], convolution(strides, padding))
    x = np.random.default_rng(1).standard_normal(image).astype(np.float32)

    by_lines = precision.in_bf16(plain, 16, AMX_BF16)

    [weight] = by_lines.weights.values()
    assert weight.ndim == len(kernel) - 1
    assert any(FUNCTION in name for name, _ in functions(by_lines, cpu))
    expected = convolved(rounded(x), rounded(plain.weights["p1"]), strides, padding)
    np.testing.assert_allclose(run(by_lines, [x], cpu), expected, rtol=1e-4, atol=1e-4)


def test_groups_that_are_merged_to_one_are_summed_by_lines_as_well(cpu):
    image, kernel = (1, 9, 11, 8), (3, 3, 4, 16)
    plain = model([image, kernel], convolution((1, 1), (1, 1, 1, 1), groups=2))
    x = np.random.default_rng(1).standard_normal(image).astype(np.float32)

    by_lines = precision.in_bf16(plain, 16, AMX_BF16)

    assert any(FUNCTION in name for name, _ in functions(by_lines, cpu))
    weight, padding = rounded(plain.weights["p1"]), (1, 1, 1, 1)
    parts = [
        convolved(rounded(x)[..., 4 * n : 4 * n + 4], weight[..., 8 * n : 8 * n + 8], (1, 1), padding) for n in (0, 1)
    ]
    np.testing.assert_allclose(run(by_lines, [x], cpu), np.concatenate(parts, -1), rtol=1e-4, atol=1e-4)


def test_bytes_are_numpys_to_the_last_bit(cpu):
    image, kernel, strides, padding = (1, 10, 10, 3), (3, 3, 3, 16), (2, 2), (1, 1, 1, 1)
    plain, x, w = of_bytes(image, kernel, convolution(strides, padding, out_dtype="int32"))

    by_lines = precision.in_quads(plain, 16, AMX_INT8)

    assert by_lines.weights["w"].shape == (3, 3 * 4, 16)  # nine elements are no quads
    np.testing.assert_array_equal(run(by_lines, [x], cpu), convolved(x, w, strides, padding).astype(np.int32))


def test_a_border_of_the_zero_point_is_a_part_of_the_convolution(cpu):
    image, kernel, zero = (1, 10, 11, 3), (3, 3, 3, 16), 90

    def padded_by_itself(builder, x, w):
        around = builder.emit(op.nn.pad(x, [0, 0, 1, 2, 1, 1, 0, 0], "constant", float(zero)))
        return convolution((2, 1), (0, 0, 0, 0), out_dtype="int32")(builder, around, w)

    plain, x, w = of_bytes(image, kernel, padded_by_itself)

    by_lines = precision.in_quads(plain, 16, AMX_INT8)

    assert not any(name.startswith(("pad", "fused_pad")) for name, _ in functions(by_lines, cpu))
    padded = np.pad(x, ((0, 0), (1, 2), (1, 1), (0, 0)), constant_values=zero)
    expected = convolved(padded, w, (2, 1), (0, 0, 0, 0)).astype(np.int32)
    np.testing.assert_array_equal(run(by_lines, [x], cpu), expected)


@pytest.mark.parametrize(
    ("kernel", "attrs"),
    [((3, 3, 32, 16), {}), ((1, 1, 8, 16), {}), ((3, 3, 4, 32), {"groups": 2}), ((3, 3, 8, 16), {"dilation": 2})],
    ids=["of many channels", "of one pixel", "in groups", "of pixels apart"],
)
def test_others_stay_convolutions(cpu, kernel, attrs):
    image = (1, 9, 9, kernel[2] * attrs.get("groups", 1))
    plain = model([image, kernel], convolution((1, 1), (1, 1, 1, 1), **attrs))

    found = precision.in_bf16(plain, 16, AMX_BF16)

    assert not any(FUNCTION in name for name, _ in functions(found, cpu))


def test_without_such_an_instruction_all_stay():
    plain = model([(1, 16, 16, 3), (7, 7, 3, 16)], convolution((2, 2), (3, 3, 3, 3)))

    found = precision.in_bf16(plain, 16)

    assert found.weights["p1"].shape == (7, 7, 4, 16)
