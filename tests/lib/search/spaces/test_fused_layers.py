import math

import numpy as np
import pytest
import tvm
from tvm import s_tir
from tvm.relax import op
from tvm.s_tir import SBlock

from lib.search import evolution
from lib.search.spaces.table import fitting
from lib.tir import analysis, traces
from lib.tir.workload import load_module
from tests.helpers import run_on
from tests.lib.graph.rules.helpers import random
from tests.lib.graph.test_fused_layers import IMAGE, LINES, PIXELS, WIDE, block, residual, silu, slid, subgraphs, wide


def workload_of(cpu, build, shape):
    """Of the first subgraph, with values for its parameters but the result, and what it computes untuned."""
    found = next(each for each in subgraphs(cpu, build, shape) if each.core_operator == "fused_layers")
    workload = load_module(found.workload)
    shapes = [[int(n) for n in param.ty.shape] for param in workload["main"].params]
    given = [random(each, seed) for seed, each in enumerate(shapes)]
    result = given.pop()
    return workload, given, run_on(workload, cpu.tvm(), given, np.zeros_like(result))


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (block, IMAGE),
        (residual, IMAGE),
        (lambda x: block(x, strides=2), IMAGE),
        (lambda x: block(x, strides=2, padding=[0, 0, 1, 1]), IMAGE),
        (lambda x: block(x, act=silu), IMAGE),
        (lambda x: block(x, size=5, padding=2), IMAGE),
        (lambda x: slid(wide(x)), IMAGE),
        (lambda x: slid(wide(x), strides=2), IMAGE),
        (lambda x: slid(wide(x), size=7, padding=3), IMAGE),  # more positions than are unrolled
        (lambda x: slid(wide(x, size=3, inputs=3, strides=2, padding=1)), (1, 2 * LINES, 2 * PIXELS, 3)),
        (lambda x: block(x, outputs=12), IMAGE),  # with AVX2 sixteen, of which twelve are written
        (block, (2, LINES, PIXELS, 8)),
        (block, (1, LINES + 15, PIXELS - 4, 8)),  # 79 lines are no bands
    ],
    ids=[
        "block",
        "residual",
        "stride",
        "asymmetric",
        "silu",
        "5x5",
        "two",
        "two, stride",
        "two, 7x7",
        "stem",
        "twelve",
        "images",
        "odd",
    ],
)
def test_every_program_computes_the_convolutions(cpu, build, shape):
    workload, given, expected = workload_of(cpu, build, shape)

    proposals = evolution.sample(workload, cpu.tvm(), 12, known=set(), seed=0)

    assert fitting(workload, cpu.tvm()).name == "fused_layers"
    assert {proposal.space for proposal in proposals} == {"fused_layers"}
    assert len(proposals) == 12
    for proposal in proposals:
        found = run_on(traces.apply(workload, proposal.trace).mod, cpu.tvm(), given, np.zeros_like(expected))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_bands_are_all_that_is_stored_between_convolutions_and_there_is_one_parallel_loop(cpu):
    workload, _, _ = workload_of(cpu, block, IMAGE)
    of_wide_image = LINES * PIXELS * WIDE

    for proposal in evolution.sample(workload, cpu.tvm(), 12, known=set(), seed=0):
        schedule = traces.apply(workload, proposal.trace)
        program = traces.program(workload, proposal.trace, cpu.tvm())
        stored = [math.prod(map(int, each.shape)) for each in stored_by(schedule.mod)]
        assert schedule.mod.script().count("T.parallel(") == 1
        assert schedule.mod.script().count('scope="local"') == 3  # accumulators of each
        assert max(stored) < of_wide_image
        assert "layout_rewrite_preproc" in program.script()  # weights are packed as they are read


def stored_by(module):
    """The buffers of a program, as small as what is read of them allows."""
    passes = [s_tir.transform.PlanAndUpdateBufferAllocationLocation(), s_tir.transform.ConvertBlocksToOpaque(),
              s_tir.transform.CompactBufferAllocation()]  # fmt: skip
    made = tvm.transform.Sequential(passes)(module)
    return [buffer for found in analysis.walk(made["main"].body, SBlock) for buffer in found.alloc_buffers]


def test_other_chains_have_other_spaces(cpu):
    names = [each.core_operator for each in subgraphs(cpu, lambda x: op.nn.relu(wide(x)), IMAGE)]

    assert names == ["conv2d_1x1"]
