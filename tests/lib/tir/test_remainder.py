"""Tiles that do not divide an output: their extents and predicates, and that every element is computed once."""

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.s_tir import SBlockRealize, Schedule
from tvm.script import tirx as T

from lib.search import evolution
from lib.tir import analysis, remainder
from lib.tir.workload import as_workload
from tests.helpers import matmul, packed, run_on


def tiled(rows, columns, tile, mark=remainder.SHORTER):
    """A product whose output is cut into tiles, which are marked; the loops around them are fused."""
    schedule = Schedule(matmul(rows, columns, 8))
    block = schedule.get_sblock("product")
    i, j, k = schedule.get_loops(block)
    (i, row), (j, vector, lane) = schedule.split(i, [None, tile[0]]), schedule.split(j, [None, *tile[1:]])
    schedule.reorder(i, j, k, row, vector, lane)
    j_0, j_1 = schedule.split(j, [None, 1])  # a loop of one iteration, as those of a space may be
    schedule.annotate(j_1, remainder.MARK, mark)
    schedule.parallel(schedule.fuse(i, j_0))
    schedule.vectorize(lane)
    schedule.decompose_reduction(block, k)
    return schedule.mod


def innermost(function):
    """The extents of the three innermost loops around each block."""
    nests = [nest for nest in analysis.nests(function.body) if not analysis.walk(nest[-1].body, tirx.For)]
    return {tuple(int(loop.extent) for loop in nest[-3:]) for nest in nests}


def predicates(function):
    """The predicate of each block."""
    return [realization.predicate for realization in analysis.walk(function.body, SBlockRealize)]


@pytest.mark.parametrize(
    ("extents", "tile", "expected"),
    [
        ((29, 32), (14, 2, 16), {(14, 2, 16), (1, 2, 16)}),
        ((28, 40), (14, 2, 16), {(14, 2, 16), (14, 1, 8)}),
        ((28, 48), (14, 2, 16), {(14, 2, 16), (14, 1, 16)}),
        ((29, 37), (14, 2, 16), {(14, 2, 16), (1, 2, 16), (14, 1, 5), (1, 1, 5)}),
    ],
)
def test_full_tiles_and_tiles_at_each_border_get_loops_without_predicates(cpu, extents, tile, expected):
    module = tiled(*extents, tile)
    peeled = remainder.peel(module["main"])

    assert innermost(peeled) == expected
    assert all(isinstance(predicate, tirx.IntImm) for predicate in predicates(peeled))
    assert computes_product(module, extents, cpu)


@pytest.mark.parametrize(
    ("extents", "tile"),
    [((28, 57), (14, 1, 16)), ((28, 57), (14, 2, 16)), ((29, 32), (14, 2, 16)), ((29, 57), (8, 1, 16))],
)
def test_tiles_at_a_border_may_begin_earlier_instead(cpu, extents, tile):
    module = tiled(*extents, tile, remainder.EARLIER)
    peeled = remainder.peel(module["main"])

    assert innermost(peeled) == {tile}
    assert all(isinstance(predicate, tirx.IntImm) for predicate in predicates(peeled))
    assert computes_product(module, extents, cpu)


def test_predicates_stay_where_no_extents_are_the_remainder(cpu):
    extents = (28, 48 + 21)  # one vector, and part of another
    module = tiled(*extents, (14, 3, 16))
    peeled = remainder.peel(module["main"])

    assert innermost(peeled) == {(14, 3, 16)}
    assert {isinstance(predicate, tirx.IntImm) for predicate in predicates(peeled)} == {True, False}
    assert computes_product(module, extents, cpu)


def test_loops_with_other_blocks_in_their_bodies_stay_as_they_are(cpu):
    peeled = remainder.peel(_shares_a_loop)

    tvm.ir.assert_structural_equal(peeled, _shares_a_loop)


@T.prim_func(s_tir=True)
def _shares_a_loop(a: T.Buffer((29,), "float32"), b: T.Buffer((32,), "float32")) -> None:
    with T.sblock("root"):
        for tile in T.serial(2, annotations={"peel_remainder": 1}):
            for row in range(16):
                with T.sblock("part"):
                    i = T.axis.spatial(29, tile * 16 + row)
                    T.where(tile * 16 + row < 29)
                    a[i] = T.float32(1)
                with T.sblock("whole"):
                    i = T.axis.spatial(32, tile * 16 + row)
                    b[i] = T.float32(1)


def test_programs_without_marks_or_remainders_stay_as_they_are():
    for function in (matmul(29, 37)["main"], tiled(28, 32, (14, 2, 16))["main"]):
        tvm.ir.assert_structural_equal(remainder.peel(function), function)


def test_weights_are_packed_where_only_rows_leave_a_remainder(cpu):
    workload = as_workload(matmul(37, 64, 8)["main"].with_attr("layout_free_buffers", [1]))
    found = evolution.sample(workload, cpu.tvm(), 6, known=set(), seed=0)

    assert found
    for proposal in found:
        assert len(packed(workload, proposal.trace, cpu.tvm())["main"].params[1].ty.shape) > 2


def test_weights_are_not_packed_where_columns_leave_a_remainder(cpu):
    workload = as_workload(matmul(37, 53, 8)["main"].with_attr("layout_free_buffers", [1]))
    found = evolution.sample(workload, cpu.tvm(), 6, known=set(), seed=0)

    assert found
    for proposal in found:
        function = packed(workload, proposal.trace, cpu.tvm())["main"]
        assert [int(extent) for extent in function.params[1].ty.shape] == [8, 53]


def computes_product(module, extents, cpu):
    """Whether a scheduled product is NumPy's."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((extents[0], 8), (8, extents[1])))
    found = run_on(module, cpu.tvm(), [x, w], np.full(extents, np.nan, np.float32))
    return np.allclose(found, x @ w, rtol=1e-5, atol=1e-5)
