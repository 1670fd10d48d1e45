"""A space for the convolutions of `lib.graph.winograd` on CPUs: parallel loops over data, products and results.

The transforms are vectorised over channels; their intermediate results stay in registers or in L1. The products have
the micro-kernel of contractions. What is left to the search, beside its register tile: how many vectors of channels a
parallel task of the two transforms takes; and whether the products are shared out by positions, so that each core reads
its part of the kernels alone, or by tiles, so that it reads the data that it has transformed itself.
"""

from dataclasses import replace
from functools import partial

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from lib.machine.registers import Registers
from lib.search.spaces import primitives, tiling
from lib.search.spaces.contraction import instruction
from lib.search.spaces.microkernel import tile_contraction
from lib.search.spaces.roles import contraction_roles
from lib.search.spaces.space import feasible
from lib.search.spaces.tiling import Tile
from lib.tir.operators import WINOGRAD, core_operator, operators


def fits(workload: tvm.IRModule, _target: Target) -> bool:
    """Whether a workload is such a convolution."""
    return core_operator(operators(workload)).startswith(WINOGRAD)


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """Of a convolution, when the rule comes to the block of its products, one for each number of vectors in a tile."""
    roles = contraction_roles(schedule.get(block))
    if roles is None or not roles.batch:
        return []
    extents = [int(axis.dom.extent) for axis in schedule.get(block).iter_vars]
    dot = instruction(schedule.mod["main"], schedule.get(block), roles, machine)

    def tiled(tile: Tile, rows_first: bool, sketch: Schedule) -> None:
        _transform_data(sketch, block, tiling.lanes_for(extents[roles.reduction[-1]], machine))
        tile_contraction(sketch, block, roles, tile, rows_first=rows_first)
        _transform_results(sketch, block, machine)

    tiles = [replace(tile, dot=dot) for tile in tiling.tiles(extents[roles.rows[-1]], extents[roles.columns], machine)]
    return feasible(schedule, [partial(tiled, tile, first) for tile in tiles for first in (False, True)])


def _transform_data(schedule: Schedule, product: SBlockRV, lanes: int) -> None:
    [spread] = schedule.get_producers(product)
    is_rounded = schedule.get(spread).init is None
    [columns] = schedule.get_producers(spread) if is_rounded else [spread]
    [lines] = schedule.get_producers(columns)
    for block in schedule.get_producers(lines):
        primitives.pad(schedule, block, None)
    a, b, tile, channel, *k = schedule.get_loops(spread)
    channel, lane = schedule.split(channel, [None, lanes])
    schedule.reorder(tile, channel, a, b, *k, lane)
    task = _tasks(schedule, [tile], channel)
    if is_rounded:
        for loop in (a, b):
            schedule.unroll(loop)
        schedule.vectorize(lane)
        _within(schedule, columns, task, first=0)
    else:
        _in_registers(schedule, columns, [a, b], k[0], lane)
    _within(schedule, lines, task)


def _within(schedule: Schedule, block: SBlockRV, task: LoopRV, first: int = 1) -> None:
    """Compute in a task what it reads of a transform, which stays in registers or in L1.

    Args:
        first: Which axis of the block is the first of the two within a tile.
    """
    schedule.compute_at(block, task, preserve_unit_loops=True)
    loops = schedule.get_loops(block)[-len(schedule.get(block).iter_vars) :]
    (a, b), (channel, k) = loops[first : first + 2], loops[-2:]
    _in_registers(schedule, block, [a, b], k, channel)
    schedule.set_scope(block, 0, "local")


def _transform_results(schedule: Schedule, product: SBlockRV, machine: Registers) -> None:
    [copy] = schedule.get_consumers(product)  # of the accumulators
    [lines] = schedule.get_consumers(copy)
    [columns] = schedule.get_consumers(lines)
    [last] = schedule.get_consumers(columns)
    while following := schedule.get_consumers(last):
        schedule.compute_inline(last)
        [last] = following
    size = int(schedule.get(columns).iter_vars[1].dom.extent)
    *images, line, column, channel = schedule.get_loops(last)
    line, y = schedule.split(line, [None, size])
    column, x = schedule.split(column, [None, size])
    # Channels that only fill vectors (`lib.graph.widen`) are dropped here.
    lanes = tiling.lanes_for(primitives.extent_of(schedule, channel), machine)
    channel, lane = schedule.split(channel, [None, lanes])
    schedule.reorder(*images, line, column, channel, y, x, lane)
    task = _tasks(schedule, [*images, line, column], channel)
    schedule.vectorize(lane)
    schedule.unroll(x)
    schedule.unroll(y)
    for block in (columns, lines):
        _within(schedule, block, task)


def _tasks(schedule: Schedule, tiles: list[LoopRV], channel: LoopRV) -> LoopRV:
    """Run tiles and a part of their channels in parallel; returns the loop over the channels of a task."""
    channels_0, channels_1 = primitives.sampled_split(schedule, channel)
    schedule.parallel(schedule.fuse(*tiles, channels_0))
    return channels_1


def _in_registers(schedule: Schedule, block: SBlockRV, positions: list[LoopRV], k: LoopRV, channel: LoopRV) -> None:
    """Multiply a tile with a constant matrix: unrolled, so that its entries become literals."""
    schedule.reorder(*positions, k, channel)
    schedule.vectorize(channel)
    for loop in (*positions, k):
        schedule.unroll(loop)
    initial = schedule.decompose_reduction(block, k)
    schedule.vectorize(schedule.get_loops(initial)[-1])
