"""Prefetches of weights: which ones, where, and that they change no result."""

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.s_tir import SBlockRealize

from lib.search import evolution
from lib.tir import analysis, lowering, prefetch
from lib.tir.workload import as_workload
from tests.helpers import matmul, packed, run_on

ROWS, COLUMNS, DEPTH = 16, 128, 8
LINE = 16  # float32 elements


@pytest.fixture(scope="module")
def workload():
    """A product whose weights may be packed."""
    function = matmul(ROWS, COLUMNS, DEPTH)["main"].with_attr("layout_free_buffers", [1])
    return as_workload(function)


@pytest.fixture(scope="module")
def programs(workload, cpu):
    """Random programs of the space, before prefetches are inserted."""
    found = evolution.sample(workload, cpu.tvm(), 10, known=set(), seed=0)
    assert len(found) == 10
    return [packed(workload, proposal.trace, cpu.tvm()) for proposal in found]


def prefetched(function):
    """What a function prefetches, as loads."""
    calls = analysis.walk(function.body, tvm.ir.Call)
    return [call.args[0].args[0] for call in calls if call.op.name == "tirx.prefetch"]


def reads(nest, weights):
    """What is loaded of the weights within a nest of loops, by those loops."""
    [realization] = analysis.walk(nest[-1].body, SBlockRealize)
    axes = [axis.var for axis in realization.block.iter_vars]
    bound = dict(zip(axes, realization.iter_values, strict=True))
    loads = analysis.walk(realization.block.body, tvm.ir.TensorLoad)
    return [
        tirx.BufferLoad(weights, [analysis.replaced(index, bound) for index in load.indices])
        for load in loads
        if load.source.same_as(weights)
    ]


OPERATIONS = {
    tirx.Add: np.add, tirx.Sub: np.subtract, tirx.Mul: np.multiply, tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod, tirx.Min: np.minimum, tirx.Max: np.maximum,
}  # fmt: skip


def evaluated(index, values):
    """An index of loops' variables, of which others than those that have values are zero."""
    if isinstance(index, tirx.Var):
        return values.get(index, 0)
    if isinstance(index, tirx.IntImm):
        return int(index)
    if isinstance(index, tirx.Cast):
        return evaluated(index.value, values)
    return OPERATIONS[type(index)](evaluated(index.a, values), evaluated(index.b, values))


def lines(loads, loops, line=LINE):
    """The cache lines, of so many elements, of loads in all iterations of some loops, with the others at zero."""
    iterations = np.ix_(*(np.arange(int(loop.extent)) for loop in loops))
    values = {loop.loop_var: numbers for loop, numbers in zip(loops, iterations, strict=True)}
    found = set()
    for load in loads:
        place = 0
        for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
            place = place * int(extent) + evaluated(index, values)
        found |= set(np.unique(place // line).tolist())
    return found


def test_passes_over_a_panel_prefetch_every_line_of_the_next_one(programs):
    pairs = [(program["main"], prefetch.insert(program["main"])) for program in programs]
    pairs = [(before, after) for before, after in pairs if prefetched(after)]

    assert len(pairs) > len(programs) // 2
    for before, after in pairs:
        [nest] = [nest for nest in analysis.nests(before.body) if prefetch.MARK in nest[-1].annotations]
        _task, _columns, *passes_and_sums = nest
        inner = analysis.walk(nest[-1].body, tirx.For)
        panel = lines(reads(nest, before.params[1]), [*passes_and_sums, *inner])
        found = lines(prefetched(after), passes_and_sums)

        assert panel == set(range(len(panel)))
        assert found >= {line + len(panel) for line in panel}
        assert len(found) < 2 * len(panel)


def test_prefetches_change_no_result(programs, cpu):
    rng = np.random.default_rng(0)
    for program in programs[:6]:
        shapes = [[int(extent) for extent in param.ty.shape] for param in program["main"].params]
        x, weights, out = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
        plain = tvm.runtime.tensor(np.zeros_like(out))
        tvm.tirx.build(program, cpu.tvm())["main"](*map(tvm.runtime.tensor, (x, weights)), plain)

        np.testing.assert_array_equal(run_on(program, cpu.tvm(), [x, weights], out), plain.numpy())


def test_weights_that_are_not_packed_are_not_prefetched(cpu):
    workload = matmul(ROWS, COLUMNS, DEPTH)
    found = evolution.sample(workload, cpu.tvm(), 8, known=set(), seed=0)

    assert found
    for proposal in found:
        function = packed(workload, proposal.trace, cpu.tvm())["main"]

        assert any(prefetch.MARK in nest[-1].annotations for nest in analysis.nests(function.body))
        assert not prefetched(prefetch.insert(function))


def test_weights_of_a_single_row_are_prefetched_each_line_once(cpu):
    workload = as_workload(matmul(1, COLUMNS, 64)["main"].with_attr("layout_free_buffers", [1]))
    found = evolution.sample(workload, cpu.tvm(), 8, known=set(), seed=0)

    assert found
    for proposal in found:
        function = packed(workload, proposal.trace, cpu.tvm())["main"]
        [nest] = [nest for nest in analysis.nests(function.body) if prefetch.MARK in nest[-1].annotations]
        inner = analysis.walk(nest[-1].body, tirx.For)
        n_reads = len(lines(reads(nest, function.params[1]), [*nest, *inner]))
        n_prefetched = len(lines(prefetched(prefetch.insert(function)), nest))

        assert n_reads == COLUMNS * 64 // LINE
        assert n_prefetched == n_reads


def test_a_cpus_programs_prefetch_when_they_are_compiled(programs, cpu):
    texts = [lowering.build(program, cpu.tvm()).inspect_source("ll") for program in programs]

    assert any("call void @llvm.prefetch" in text for text in texts)


def test_programs_prefetch_where_the_remainder_is_a_single_row(cpu):
    workload = as_workload(matmul(197, 256, 64)["main"].with_attr("layout_free_buffers", [1]))
    sampled = evolution.sample(workload, cpu.tvm(), 48, known=set(), seed=0)
    programs = [packed(workload, proposal.trace, cpu.tvm()) for proposal in sampled]
    programs = [program for program in programs if prefetched(prefetch.insert(program["main"]))]

    assert programs
    for program in programs:
        assert "call void @llvm.prefetch" in lowering.build(program, cpu.tvm()).inspect_source("ll")
