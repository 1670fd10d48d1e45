"""Taps as columns: which convolutions, and that they compute what TVM's own do."""

import numpy as np
import pytest
from tvm.relax import op

from lib.graph import fusion, reweight, taps
from lib.graph.subgraphs import extract_subgraphs
from lib.search.spaces import table
from lib.tir.workload import load_module
from tests.lib.graph.rules.helpers import const, module, random, run

LANES = 16
LAYOUTS = {3: ("NWC", "WIO"), 4: ("NHWC", "HWIO"), 5: ("NDHWC", "DHWIO")}


def conv(x, *kernel, seed=1, **attrs):
    data, weight = LAYOUTS[len(kernel)]
    convolve = getattr(op.nn, f"conv{len(kernel) - 2}d")
    return convolve(x, const(random(kernel, seed)), data_layout=data, kernel_layout=weight, **attrs)


def changed(build, shape):
    model = fusion.lift_constants(module(build, shape))
    return model, reweight.replaced(model, [taps.replacement(LANES)])


@pytest.mark.parametrize(
    ("shape", "kernel", "attrs", "columns"),
    [
        ((2, 6, 7, 32), (3, 3, 32, 3), {"padding": 1}, 16),
        ((1, 6, 7, 32), (3, 3, 32, 1), {"padding": (1, 2), "dilation": (1, 2)}, 16),
        ((1, 7, 9, 16), (9, 9, 16, 3), {"padding": (4, 3, 4, 5)}, 32),
        ((1, 7, 9, 16), (3, 5, 16, 2), {"strides": (2, 1)}, 16),
        ((2, 40, 8), (7, 8, 1), {"padding": 3}, 16),
        ((1, 20, 64), (5, 64, 4), {"padding": (0, 2), "dilation": 3}, 32),
        ((1, 4, 5, 6, 16), (2, 3, 3, 16, 4), {"padding": 1}, 16),
    ],
)
def test_what_is_computed_stays_the_same_with_fewer_vectors(cpu, shape, kernel, attrs, columns):
    build = lambda x: op.nn.relu(conv(x, *kernel, **attrs))  # noqa: E731
    _, found = changed(build, shape)
    x = random(shape)

    [weight] = found.weights.values()
    assert weight.shape == (*kernel[:-3], 1, kernel[-2], columns)
    [expected] = run(module(build, shape), x)
    [y] = run(fusion.fuse(found.module, cpu.tvm()), x, weight)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "kernel", "attrs", "why"),
    [
        ((1, 6, 7, 32), (3, 3, 32, 8), {}, "24 columns are two vectors, for three"),
        ((1, 6, 7, 32), (3, 3, 32, 9), {}, "more than half of a vector is of use"),
        ((1, 6, 7, 32), (3, 1, 32, 3), {}, "one tap along a line"),
        ((1, 6, 7, 2), (3, 3, 2, 3), {}, "sums would cost more than the products do"),
        ((1, 6, 7, 32), (3, 3, 32, 3), {"strides": 2}, "of every other pixel the wide image would have one too many"),
        ((1, 6, 7, 32), (3, 3, 16, 2), {"groups": 2}, "channels see data of their own"),
    ],
)
def test_other_convolutions_stay(shape, kernel, attrs, why):
    model, found = changed(lambda x: conv(x, *kernel, **attrs), shape)

    assert found is model, why


def test_a_sum_takes_what_follows_and_has_a_space(cpu):
    def build(x):
        return op.permute_dims(op.tanh(op.add(conv(x, 3, 3, 32, 3, padding=1), const(random((3,), 2)))), [0, 3, 1, 2])

    _, found = changed(build, (1, 16, 16, 32))
    subgraphs = extract_subgraphs(fusion.fuse(found.module, cpu.tvm()))

    assert sorted(each.core_operator for each in subgraphs) == ["conv2d", "data_movement", "elementwise"]
    for subgraph in subgraphs:
        assert table.fitting(load_module(subgraph.workload), cpu.tvm()) is not None
