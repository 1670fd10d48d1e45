"""A space for the products of `lib.graph.strassen` on CPUs: sums of data, then products and results task by task.

    parallel (rows): sums of data
    parallel (lines.0, rows.0, columns.0)
        products, columns.1, lines.1, rows.1: a register tile
        lines.1, rows.1, columns.1: sums of products, and what follows, in registers

The seven products of a task stay in L2 until they are summed. Where the sums of all data do not, a task has its rows of
all columns instead, and computes their sums itself:

    parallel (lines.0, rows.0)
        sums of data
        columns.0
            products, columns.1, lines.1, rows.1 ...

Which of the two, how large a task is and its register tile are left to the search.
"""

import itertools
from functools import partial

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from lib.machine.registers import Registers
from lib.search.spaces import primitives, tiling
from lib.search.spaces.microkernel import tile_in_task
from lib.search.spaces.roles import contraction_roles
from lib.search.spaces.space import feasible
from lib.search.spaces.tiling import Tile
from lib.tir.operators import STRASSEN, core_operator, operators


def fits(workload: tvm.IRModule, _target: Target) -> bool:
    """Whether a workload is such a product."""
    return core_operator(operators(workload)) == STRASSEN


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """When the rule comes to the block of the products: one for each register tile, with tasks of either kind."""
    roles = contraction_roles(schedule.get(block))
    if roles is None or not roles.batch:
        return []
    extents = [int(axis.dom.extent) for axis in schedule.get(block).iter_vars]
    k_lanes = tiling.lanes_for(extents[roles.reduction[-1]], machine)

    def tiled(tile: Tile, has_all_columns: bool, sketch: Schedule) -> None:
        [sums], [consumer] = sketch.get_producers(block), sketch.get_consumers(block)
        results = sketch.get_sblock(sketch.get(consumer).name_hint)  # by name: features find it in the trace so
        task, around = _tile_results(sketch, results, tile, has_all_columns)
        copy = sketch.cache_write(block, 0, "local")
        for each in (copy, block):
            sketch.compute_at(each, around, preserve_unit_loops=True)
        _sum_data(sketch, sums, k_lanes, task if has_all_columns else None)
        tile_in_task(sketch, block, copy, tile, roles)

    # The rows of a task are whole tiles of one height.
    found = tiling.tiles(extents[roles.rows[-1]], extents[roles.columns], machine)
    tiles = [Tile(tile.lanes, tile.vectors, (height,)) for tile in found for height in tile.rows]
    return feasible(schedule, [partial(tiled, *choice) for choice in itertools.product(tiles, (False, True))])


def _tile_results(schedule: Schedule, results: SBlockRV, tile: Tile, has_all_columns: bool) -> tuple[LoopRV, LoopRV]:
    """Cut the sums of products into tasks, and have what follows come after each vector of them.

    Returns:
        The loop over tasks, and that in which the products are computed.
    """
    last = primitives.following(schedule, results)
    *outer, row, lower, vectors, right, lane = schedule.get_loops(results)
    lines = primitives.sampled_split(schedule, outer.pop()) if outer else []
    row, row_in_tile = schedule.split(row, [None, tile.rows[0]])
    rows_0, rows_1 = primitives.sampled_split(schedule, row)
    columns, vector = schedule.split(vectors, [None, tile.vectors])
    columns_0, columns_1 = primitives.sampled_split(schedule, columns)
    tasks = [*outer, *lines[:1], rows_0]
    schedule.reorder(*tasks, columns_0, *lines[1:], rows_1, row_in_tile, columns_1, vector, lower, right, lane)
    task = schedule.fuse(*tasks, *([] if has_all_columns else [columns_0]))
    schedule.parallel(task)
    schedule.unroll(lower)
    schedule.unroll(right)
    schedule.vectorize(lane)
    schedule.reverse_compute_at(last, vector, preserve_unit_loops=True)
    primitives.vectorize_last(schedule, last, tile.lanes)
    schedule.set_scope(results, 0, "local")
    return task, columns_0 if has_all_columns else task


def _sum_data(schedule: Schedule, sums: SBlockRV, lanes: int, task: LoopRV | None) -> None:
    """Compute the sums of data in each task, or, if that is None, of all in a parallel loop of their own."""
    for padding in schedule.get_producers(sums):
        schedule.compute_inline(padding)
    if task is not None:
        schedule.compute_at(sums, task, preserve_unit_loops=True)
    which, *rows, channel = schedule.get_loops(sums)[-len(schedule.get(sums).iter_vars) :]
    channel, lane = schedule.split(channel, [None, lanes])
    schedule.reorder(*rows, channel, which, lane)
    if task is None:
        schedule.parallel(schedule.fuse(*rows))
    schedule.unroll(which)
    schedule.vectorize(lane)
