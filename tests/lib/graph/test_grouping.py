"""Groups of few channels, merged: which, and that they are NumPy's; run untuned, so on any CPU."""

import numpy as np
import pytest
from tvm.relax import op

from lib.graph import precision
from lib.machine.dots import AMX_BF16, AMX_INT8
from tests.lib.graph.test_lines import convolved
from tests.lib.graph.test_precision import model, of_bytes, rounded, run


def convolution(groups, **attrs):
    return lambda _builder, x, w: op.nn.conv2d(
        x, w, padding=1, groups=groups, data_layout="NHWC", kernel_layout="HWIO", **attrs
    )


def in_numpy(x, w, groups):
    """NHWC and HWIO, padded by one."""
    parts = [
        convolved(a, b, (1, 1), (1, 1, 1, 1))
        for a, b in zip(np.split(x, groups, -1), np.split(w, groups, -1), strict=True)
    ]
    return np.concatenate(parts, axis=-1)


@pytest.mark.parametrize(
    ("groups", "channels", "columns", "merged"),
    [
        (8, 4, 4, 4),
        (4, 8, 8, 2),
        (6, 2, 8, 2),
        (8, 4, 8, 2),
        (3, 4, 4, 1),
        (4, 16, 16, 1),
        (16, 1, 1, 1),
        (4, 24, 8, 1),
    ],
)
def test_groups_of_few_channels_are_merged_and_compute_the_same(cpu, groups, channels, columns, merged):
    image, kernel = (1, 5, 6, groups * channels), (3, 3, channels, groups * columns)
    plain = model([image, kernel], convolution(groups))
    x = np.random.default_rng(1).standard_normal(image).astype(np.float32)

    found = precision.in_bf16(plain, 16, AMX_BF16)

    [weight] = found.weights.values()
    assert weight.shape == (3, 3, merged * channels, groups * columns)
    if channels > 1:
        x = rounded(x)
    expected = in_numpy(x, rounded(plain.weights["p1"]) if channels > 1 else plain.weights["p1"], groups)
    np.testing.assert_allclose(run(found, [x], cpu), expected, rtol=1e-4, atol=1e-4)


def test_bytes_are_numpys_to_the_last_bit(cpu):
    image, kernel, groups = (1, 5, 6, 32), (3, 3, 4, 32), 8
    plain, x, w = of_bytes(image, kernel, convolution(groups, out_dtype="int32"))

    merged = precision.in_quads(plain, 16, AMX_INT8)

    assert merged.weights["w"].shape == (3, 3, 16, 32)
    np.testing.assert_array_equal(run(merged, [x], cpu), in_numpy(x, w, groups).astype(np.int32))


def test_without_an_instruction_for_matrices_groups_stay():
    plain = model([(1, 5, 6, 32), (3, 3, 4, 32)], convolution(8))

    assert precision.in_bf16(plain, 16).weights["p1"].shape == (3, 3, 4, 32)
