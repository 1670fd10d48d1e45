"""Requests for weights: which ones, where, and that they change no result."""

import itertools

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.s_tir import SBlockRealize
from tvm.sym import Analyzer

from lib import backends, prefetch, search, structure, workloads
from tests.helpers import matmul, packed, run_on

ROWS, COLUMNS, DEPTH = 16, 128, 8
LINE = 16  # float32 numbers


@pytest.fixture(scope="module")
def workload():
    """A product whose weights may be packed."""
    function = matmul(ROWS, COLUMNS, DEPTH)["main"].with_attr("layout_free_buffers", [1])
    return workloads.as_workload(function)


@pytest.fixture(scope="module")
def programs(workload, cpu):
    """Random programs of the space, before requests are inserted."""
    found = search.sample(workload, cpu.tvm(), 10, known=set(), seed=0)
    return [packed(workload, proposal.trace, cpu.tvm()) for proposal in found]


def asks(function):
    """What a function asks for, as loads."""
    calls = structure.walk(function.body, tvm.ir.Call)
    return [call.args[0].args[0] for call in calls if call.op.name == "tirx.prefetch"]


def reads(nest, weights):
    """What is loaded of the weights within a nest of loops, by those loops."""
    [realization] = structure.walk(nest[-1].body, SBlockRealize)
    axes = [axis.var for axis in realization.block.iter_vars]
    bound = dict(zip(axes, realization.iter_values, strict=True))
    loads = structure.walk(realization.block.body, tvm.ir.TensorLoad)
    return [
        tirx.BufferLoad(weights, [structure.replaced(index, bound) for index in load.indices])
        for load in loads
        if load.source.same_as(weights)
    ]


def lines(loads, loops):
    """The cache lines of loads in all turns of some loops, where the others begin."""
    found = set()
    for turn in itertools.product(*(range(int(loop.extent)) for loop in loops)):
        at = {loop.loop_var: tirx.IntImm("int64", n) for loop, n in zip(loops, turn, strict=True)}
        for load in loads:
            place = 0
            for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
                others = {v: tirx.IntImm("int64", 0) for v in structure.walk(index, tirx.Var) if v not in at}
                place = place * int(extent) + int(Analyzer().simplify(structure.replaced(index, {**at, **others})))
            found.add(place // LINE)
    return found


def test_passes_over_a_panel_ask_for_every_line_of_the_next_one(programs):
    asking = [(program["main"], prefetch.insert(program["main"])) for program in programs]
    asking = [(before, after) for before, after in asking if asks(after)]

    assert len(asking) > len(programs) // 2
    for before, after in asking:
        [nest] = [nest for nest in structure.nests(before.body) if prefetch.MARK in nest[-1].annotations]
        _task, _columns, *passes_and_sums = nest
        inner = structure.walk(nest[-1].body, tirx.For)
        panel = lines(reads(nest, before.params[1]), [*passes_and_sums, *inner])
        asked = lines(asks(after), passes_and_sums)

        assert panel == set(range(len(panel)))
        assert asked >= {line + len(panel) for line in panel}
        assert len(asked) < 2 * len(panel)


def test_requests_change_no_result(programs, cpu):
    rng = np.random.default_rng(0)
    for program in programs[:6]:
        shapes = [[int(extent) for extent in param.ty.shape] for param in program["main"].params]
        x, weights, out = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
        plain = tvm.runtime.tensor(np.zeros_like(out))
        tvm.tirx.build(program, cpu.tvm())["main"](*map(tvm.runtime.tensor, (x, weights)), plain)

        np.testing.assert_array_equal(run_on(program, cpu.tvm(), [x, weights], out), plain.numpy())


def test_weights_that_are_not_packed_are_not_asked_for(cpu):
    workload = matmul(ROWS, COLUMNS, DEPTH)
    for proposal in search.sample(workload, cpu.tvm(), 8, known=set(), seed=0):
        function = packed(workload, proposal.trace, cpu.tvm())["main"]

        assert any(prefetch.MARK in nest[-1].annotations for nest in structure.nests(function.body))
        assert not asks(prefetch.insert(function))


def test_the_weights_of_a_single_row_are_not_asked_for(cpu):
    workload = workloads.as_workload(matmul(1, COLUMNS, DEPTH)["main"].with_attr("layout_free_buffers", [1]))
    for proposal in search.sample(workload, cpu.tvm(), 8, known=set(), seed=0):
        function = packed(workload, proposal.trace, cpu.tvm())["main"]

        assert any(prefetch.MARK in nest[-1].annotations for nest in structure.nests(function.body))
        assert not asks(prefetch.insert(function))


def test_a_cpu_gets_its_requests_when_programs_are_compiled(programs, cpu):
    texts = [backends.build(program, cpu.tvm()).inspect_source("ll") for program in programs]

    assert any("call void @llvm.prefetch" in text for text in texts)
