import numpy as np
import pytest
from tvm.relax import op

from lib.graph import fusion, parts
from lib.graph.subgraphs import extract_subgraphs
from lib.search import evolution
from lib.tir import traces
from lib.tir.workload import as_workload, load_module
from tests.helpers import run_on
from tests.lib.graph.rules.helpers import const, module, operators, random, run

IMAGE = (2, 6, 7, 48)  # N, H, W, C


def conv(x, channels, out, seed=1, size=1, groups=1, **attrs):
    weight = const(random((size, size, channels // groups, out), seed))
    return op.nn.conv2d(x, weight, padding=size // 2, groups=groups, data_layout="NHWC", kernel_layout="HWIO", **attrs)


def part(x, begin, end, axis=3, stride=1):
    return op.strided_slice(x, [axis], [begin], [end], [stride])


def mixed(x):
    """Kernels of several sizes, each of channels of its own, as in MixNet."""
    return op.concat([conv(part(x, 16 * n, 16 * n + 16), 16, 16, n, 2 * n + 1, 16) for n in range(3)], 3)


def split_and_joined(x):
    return op.concat([op.nn.relu(conv(part(x, 24 * n, 24 * n + 24, -1), 24, 32, n)) for n in range(2)], 3)


READ = [
    mixed,
    split_and_joined,
    lambda x: conv(part(x, -32, 48), 32, 16, size=3, strides=2),
    lambda x: conv(part(x, 8, 40), 32, 32, size=3, groups=4),
    lambda x: conv(part(op.nn.relu(x), 0, 32), 32, 16),
]


def fused(build, cpu):
    model = fusion.lift_constants(module(build, IMAGE))
    return fusion.fuse(model.module, cpu.tvm()), list(model.weights.values())


@pytest.mark.parametrize("build", READ)
def test_a_convolution_of_some_channels_reads_them_where_they_are(build, cpu):
    made, weights = fused(build, cpu)
    x = random(IMAGE)

    [y] = run(made, x, *weights)

    np.testing.assert_allclose(y, run(module(build, IMAGE), x)[0], rtol=1e-4, atol=1e-4)
    assert not any("strided_slice" in name for name in operators(made))


def test_convolutions_of_other_channels_to_other_channels_are_one_workload(cpu):
    made, _ = fused(split_and_joined, cpu)

    [subgraph] = extract_subgraphs(made)

    assert subgraph.weight == 2
    assert len(subgraph.functions) == 2


def test_a_trace_of_one_gives_the_right_program_of_the_other(cpu):
    made, weights = fused(split_and_joined, cpu)
    [subgraph] = extract_subgraphs(made)
    x = random(IMAGE)
    expected = run(module(split_and_joined, IMAGE), x)[0]
    in_order = sorted(subgraph.functions, key=lambda name: "+ T.int64(32)]" in made[name].script())
    assert "+ T.int64(32)]" not in made[in_order[0]].script()

    for program in evolution.sample(load_module(subgraph.workload), cpu.tvm(), 4, known=set(), seed=0):
        out = np.zeros(expected.shape, np.float32)
        for n, name in enumerate(in_order):
            workload = as_workload(made[name])
            out = run_on(traces.apply(workload, program.trace).mod, cpu.tvm(), [x, weights[n]], out)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: conv(part(x, 0, 48, stride=2), 24, 16),  # every other channel
        lambda x: conv(part(x, 1, 5, axis=1), 48, 16),  # lines
        lambda x: conv(op.nn.relu(part(x, 0, 32)), 32, 16),  # something is computed in between
    ],
)
def test_other_slices_stay(build):
    assert "strided_slice" in operators(parts.read_in_place(module(build, IMAGE)))
