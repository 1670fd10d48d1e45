import numpy as np
import pytest
from tvm.relax import op

from lib.tir import analysis
from lib.tir.addresses import access
from tests.helpers import gather, subgraph

ROWS, HEADS, SIZE = 6, 3, 8


def moved(builder, x):
    """(rows, heads * size) to (heads, size, rows)."""
    return op.permute_dims(builder.emit(op.reshape(x, (ROWS, HEADS, SIZE))), [1, 2, 0])


def rolled(builder, x):
    """Rows, the first two of them last."""
    first, last = op.strided_slice(x, [0], [0], [2]), op.strided_slice(x, [0], [2], [ROWS])
    return op.concat([builder.emit(last), builder.emit(first)], 0)


def accesses(block):
    """Those of what a block reads, and of what it writes."""
    axes, extents = [axis.var for axis in block.iter_vars], list(analysis.extents(block).values())
    store = analysis.stored(block)
    reads = [access(axes, extents, load.indices, load.source.ty.shape) for load in analysis.loaded(store)]
    return reads, access(axes, extents, store.indices, store.buffer.ty.shape)


def block_of(cpu, make, shape):
    return analysis.leaf_blocks(subgraph(cpu, make, shape)["main"])[-1]


def test_addresses_are_those_of_numpy(cpu):
    """A reshape in several blocks: each one's addresses, one after another, move the numbers to their places."""
    x = np.random.default_rng(0).normal(size=(ROWS, HEADS * SIZE))
    held = x.ravel()
    for block in analysis.leaf_blocks(subgraph(cpu, moved, x.shape)["main"]):
        [read], written = accesses(block)
        places = np.indices(read.extents).reshape(len(read.extents), -1)
        results = np.empty(written.size)
        results[written.address(places)] = held[read.address(places)]
        held = results

    assert np.array_equal(held.reshape(HEADS, SIZE, ROWS), x.reshape(ROWS, HEADS, SIZE).transpose(1, 2, 0))


def test_steps_are_those_that_tvm_finds(cpu):
    block = block_of(cpu, moved, (ROWS, HEADS * SIZE))
    [load] = analysis.loaded(analysis.stored(block))
    [read], _ = accesses(block)

    for n, axis in enumerate(block.iter_vars):
        assert read.step((n,), 1) == analysis.stride(load.indices, load.source.ty.shape, axis.var)


def test_a_step_along_several_axes_carries_over(cpu):
    """Of (heads, size, rows), which are read as (rows, heads, size)."""
    [read], written = accesses(block_of(cpu, moved, (ROWS, HEADS * SIZE)))

    assert [written.step((0, 1, 2), n) for n in (1, ROWS, ROWS * SIZE + 1)] == [1, ROWS, ROWS * SIZE + 1]
    assert [read.step((0, 1, 2), n) for n in (1, ROWS, ROWS * SIZE + 1)] == [HEADS * SIZE, 1, SIZE + HEADS * SIZE]


def test_a_run_ends_where_neighbours_are_no_longer_equally_far_apart(cpu):
    [read], written = accesses(block_of(cpu, moved, (ROWS, HEADS * SIZE)))

    assert written.run((0, 1, 2)) == (ROWS * HEADS * SIZE, 1)
    assert read.run((0, 1, 2)) == (ROWS, HEADS * SIZE)
    assert read.run((0, 1)) == (HEADS * SIZE, 1)


def test_what_is_read_under_a_condition_has_addresses_too(cpu):
    reads, _ = accesses(block_of(cpu, rolled, (ROWS, SIZE)))

    assert [read.run((0, 1)) for read in reads] == [(ROWS * SIZE, 1)] * 2


def test_addresses_that_are_read_from_memory_are_not_known():
    block = analysis.leaf_blocks(gather()["main"])[-1]
    reads, written = accesses(block)

    assert None in reads
    assert written is not None


@pytest.mark.parametrize("n", [0, 1])
def test_what_is_one_element_has_a_run_of_one(cpu, n):
    [read], _ = accesses(block_of(cpu, lambda _, x: op.nn.relu(x), (1, 1)))

    assert read.run(tuple(range(n))) == (1, 1)
