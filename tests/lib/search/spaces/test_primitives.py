"""What follows a reduction and writes more than it computes: padding, for a residual sum with more channels, say."""

import numpy as np
import pytest
from tvm.relax import op

from lib.graph import fusion
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.graph.subgraphs import extract_subgraphs
from lib.search import evolution
from lib.tir import traces
from lib.tir.workload import load_module
from tests.helpers import run_on
from tests.lib.graph.rules.helpers import const, module, random

UNWRITTEN = 7.0  # what a result has before


def convolved(x, size, groups=1, **attrs):
    weight = const(random((size, size, 32 // groups, 32)))
    return op.nn.relu(
        op.nn.conv2d(x, weight, padding=size // 2, groups=groups, data_layout="NHWC", kernel_layout="HWIO", **attrs)
    )


def deep(x):
    weight = const(random((3, 3, 256, 64)))
    return op.nn.conv2d(x, weight, strides=2, padding=1, data_layout="NHWC", kernel_layout="HWIO")


@pytest.mark.parametrize(
    ("space", "build"),
    [
        ("window", lambda x: op.nn.pad(op.nn.max_pool2d(x, (2, 2), (2, 2), layout="NHWC"), [0] * 7 + [16])),
        ("window", lambda x: op.nn.pad(convolved(x, 3, groups=32), [0] * 7 + [16])),
        ("contraction", lambda x: op.nn.pad(convolved(x, 1), [0] * 7 + [16])),
        ("contraction", lambda x: op.nn.pad(convolved(x, 3, strides=2), [0, 0, 0, 1, 0, 2, 0, 0])),
        ("contraction", lambda x: op.nn.relu(op.nn.pad(op.matmul(x, const(random((32, 32)))), [0] * 7 + [16]))),
    ],
    ids=["pool", "depthwise", "1x1", "3x3", "product"],
)
def test_elements_around_the_results_are_written(cpu, space, build):
    shape = (1, 16, 16, 32)
    [subgraph] = extract_subgraphs(fusion.fuse(fusion.lift_constants(module(build, shape)).module, cpu.tvm()))
    workload = load_module(subgraph.workload)
    given = [random([int(n) for n in param.ty.shape], seed) for seed, param in enumerate(workload["main"].params)]
    before = np.full_like(given.pop(), UNWRITTEN)
    expected = run_on(workload, cpu.tvm(), given, before.copy())

    proposals = evolution.sample(workload, cpu.tvm(), 4, known=set(), seed=0)

    assert {proposal.space for proposal in proposals} == {space}
    for proposal in proposals:
        found = run_on(traces.apply(workload, proposal.trace).mod, cpu.tvm(), given, before.copy())
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("build", "shape", "config"),
    [
        (lambda x: op.nn.pad(op.matmul(x, const(random((768, 768)))), [0, 0, 0, 16]), (128, 768), AlgorithmConfig()),
        (lambda x: op.nn.pad(deep(x), [0] * 7 + [16]), (1, 14, 14, 256), AlgorithmConfig(winograd="never")),
    ],
    ids=["strassen", "slabs"],
)
def test_no_program_whose_tasks_finish_results_leaves_them_out(cpu, build, shape, config):
    model = choose_algorithms(fusion.lift_constants(module(build, shape)), cpu, config)
    [subgraph] = extract_subgraphs(fusion.fuse(model.module, cpu.tvm()))
    workload = load_module(subgraph.workload)
    given = [random([int(n) for n in param.ty.shape], seed) for seed, param in enumerate(workload["main"].params)]
    before = np.full_like(given.pop(), UNWRITTEN)
    expected = run_on(workload, cpu.tvm(), given, before.copy())

    for proposal in evolution.sample(workload, cpu.tvm(), 6, known=set(), seed=2):
        found = run_on(traces.apply(workload, proposal.trace).mod, cpu.tvm(), given, before.copy())
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3 * np.abs(expected).max())
