"""Vectors that run on from row to row: read and written as contiguous memory, and otherwise as they were."""

import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.s_tir import Schedule

from lib.tir import analysis, lowering, parallel, remainder, straight
from lib.tir.workload import as_workload

SHAPE = (4, 6, 24)


def added(read):
    """Two tensors, one of which is read by `read`, in one row, by tasks of a few vectors of 32."""
    x, y = (te.placeholder(SHAPE, "float32", name=name) for name in "xy")
    out = te.compute(SHAPE, lambda *at: read(x, *at) + y(*at), name="out")
    schedule = Schedule(as_workload(te.create_prim_func([x, y, out])))
    elements = schedule.fuse(*schedule.get_loops(schedule.get_sblock("out")))
    task, _, lane = schedule.split(elements, [None, 3, 32])
    schedule.parallel(task)
    schedule.vectorize(lane)
    return schedule.mod


def cut(function):
    """The tensors whose indices are those of the block's axes."""
    [block] = analysis.leaf_blocks(function)
    axes = {axis.var for axis in block.iter_vars}
    loads = [(load.source, load.indices) for load in analysis.walk(block.body, tvm.ir.TensorLoad)]
    stores = [(store.buffer, store.indices) for store in analysis.walk(block.body, tirx.BufferStore)]
    return [str(tensor.name) for tensor, indices in (*loads, *stores) if analysis.variables(indices) & axes]


def test_what_is_in_one_row_is_addressed_as_one():
    module = added(lambda x, *at: x(*at))
    assert len(cut(module["main"])) == 3

    found = straight.insert(module["main"])

    assert not cut(found)
    [block] = analysis.leaf_blocks(found)
    assert not analysis.walk(block.body, tirx.FloorMod)


def test_what_is_read_in_another_order_stays_as_it_is():
    module = added(lambda x, i, j, k: x(i, 5 - j, k))

    assert cut(straight.insert(module["main"])) == ["x"]


@pytest.mark.parametrize(
    ("read", "expected"),
    [(lambda x, *at: x(*at), lambda x: x), (lambda x, i, j, k: x(i, 5 - j, k), lambda x: x[:, ::-1])],
    ids=["in its order", "in another order"],
)
def test_it_is_numpys(cpu, read, expected):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(SHAPE).astype(np.float32) for _ in "xy")
    out = tvm.runtime.empty(SHAPE, "float32")

    lowering.build(added(read), cpu.tvm())["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y), out)

    np.testing.assert_array_equal(out.numpy(), expected(x) + y)


def test_a_program_without_vectors_stays_the_same():
    x = te.placeholder(SHAPE, "float32", name="x")
    function = as_workload(te.create_prim_func([x, te.compute(SHAPE, lambda *at: x(*at) * 2, name="out")]))["main"]

    assert straight.insert(function) is function


def test_rows_that_end_within_a_vector_are_straight_as_far_as_they_go(cpu):
    x = te.placeholder((3, 2, 85), "uint8", name="x")
    out = te.compute((6, 85), lambda i, j: x((i * 85 + j) // 170, (i * 85 + j) % 170 // 85, j % 85), name="out")
    schedule = Schedule(as_workload(te.create_prim_func([x, out])))
    row, column = schedule.get_loops(schedule.get_sblock("out"))
    vectors, lane = schedule.split(column, [None, 64])
    schedule.vectorize(lane)
    schedule.annotate(vectors, remainder.MARK, 1)
    schedule.annotate(row, parallel.MARK, 1)
    assert cut(schedule.mod["main"]) == ["x", "out"]

    assert cut(straight.insert(schedule.mod["main"])) == ["out"]

    given, found = np.arange(510).astype(np.uint8).reshape(3, 2, 85), tvm.runtime.empty((6, 85), "uint8")
    lowering.build(schedule.mod, cpu.tvm())["main"](tvm.runtime.tensor(given), found)
    np.testing.assert_array_equal(found.numpy(), given.reshape(6, 85))
