"""A space for the convolutions of `lib.winograd` on CPUs: three parallel passes, over data, products and results.

The transforms run through vectors of channels; what they need in between stays in registers or the nearest cache. The
products are register tiles, as `contraction` has them. What is left to the search, beside those: how many vectors of
channels a task of the first and of the last pass takes.
"""

from functools import partial

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from lib import structure, winograd
from lib.spaces import contraction, tiling
from lib.spaces.rule import tried
from lib.spaces.tiling import Registers, Tile


def fits(workload: tvm.IRModule) -> bool:
    """Whether a workload is such a convolution."""
    return any(str(block.name_hint).startswith(winograd.FUNCTION) for block in structure.leaf_blocks(workload["main"]))


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """Of all blocks of a convolution, when it comes to the products, one for each register tile."""
    roles = structure.roles(schedule.get(block))
    if roles is None or not roles.batch:
        return []
    extents = [int(axis.dom.extent) for axis in schedule.get(block).iter_vars]

    def way(tile: Tile, sketch: Schedule) -> None:
        _transform_data(sketch, block, tiling.lanes_for(extents[roles.reduction[-1]], machine))
        contraction.tile_sums(sketch, block, roles, tile)
        _transform_results(sketch, block, tile.lanes)

    tiles = tiling.tiles(extents[roles.rows[-1]], extents[roles.columns], machine)
    return tried(schedule, [partial(way, tile) for tile in tiles])


def _transform_data(schedule: Schedule, product: SBlockRV, lanes: int) -> None:
    [columns] = schedule.get_producers(product)
    [lines] = schedule.get_producers(columns)
    for block in schedule.get_producers(lines):
        contraction.pad(schedule, block, None)
    a, b, tile, channel, summed = schedule.get_loops(columns)
    channel, lane = schedule.split(channel, [None, lanes])
    schedule.reorder(tile, channel, a, b, summed, lane)
    place = _tasks(schedule, [tile], channel)
    schedule.compute_at(lines, place, preserve_unit_loops=True)
    _in_registers(schedule, columns, [a, b], summed, lane)
    *_, a, b, channel, summed = schedule.get_loops(lines)
    _in_registers(schedule, lines, [a, b], summed, channel)
    schedule.set_scope(lines, 0, "local")


def _transform_results(schedule: Schedule, product: SBlockRV, lanes: int) -> None:
    [copy] = schedule.get_consumers(product)  # out of the registers
    [lines] = schedule.get_consumers(copy)
    [columns] = schedule.get_consumers(lines)
    [last] = schedule.get_consumers(columns)
    while following := schedule.get_consumers(last):
        schedule.compute_inline(last)
        [last] = following
    size = int(schedule.get(columns).iter_vars[1].dom.extent)
    image, line, column, channel = schedule.get_loops(last)
    line, y = schedule.split(line, [None, size])
    column, x = schedule.split(column, [None, size])
    channel, lane = schedule.split(channel, [None, lanes])
    schedule.reorder(image, line, column, channel, y, x, lane)
    place = _tasks(schedule, [image, line, column], channel)
    schedule.vectorize(lane)
    schedule.unroll(x)
    schedule.unroll(y)
    for block in (columns, lines):
        schedule.compute_at(block, place, preserve_unit_loops=True)
        *_, a, b, channel, summed = schedule.get_loops(block)
        _in_registers(schedule, block, [a, b], summed, channel)
        schedule.set_scope(block, 0, "local")


def _tasks(schedule: Schedule, tiles: list[LoopRV], channel: LoopRV) -> LoopRV:
    """Share tiles and part of their channels out to threads; returns the loop over the channels of a task."""
    channels_0, channels_1 = tiling.halves(schedule, channel)
    schedule.parallel(schedule.fuse(*tiles, channels_0))
    return channels_1


def _in_registers(
    schedule: Schedule, block: SBlockRV, positions: list[LoopRV], summed: LoopRV, channel: LoopRV
) -> None:
    """Multiply a tile with a constant matrix: unrolled, so that its entries become numbers."""
    schedule.reorder(*positions, summed, channel)
    schedule.vectorize(channel)
    for loop in (*positions, summed):
        schedule.unroll(loop)
    initial = schedule.decompose_reduction(block, summed)
    schedule.vectorize(schedule.get_loops(initial)[-1])
