"""A space for the convolutions of `lib.graph.winograd_1d` on CPUs, with the loops that images have.

Data are transformed, multiplied and transformed back in parallel loops of their own (`lib.search.spaces.winograd`), or
by one task for some tiles that follow one another, which stay in L2:

    parallel (images, blocks.0)
        padded data
        transformed data
        products: positions, columns, tiles: a register tile
        blocks.1, places within a distance, other axes, vectors: results and what follows, in registers
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from lib.machine.registers import Registers
from lib.search.spaces import primitives, tiling
from lib.search.spaces.contraction import instruction
from lib.search.spaces.microkernel import tile_contraction, tile_in_task
from lib.search.spaces.roles import Roles, contraction_roles
from lib.search.spaces.space import feasible
from lib.search.spaces.tiling import Tile
from lib.search.spaces.winograd import in_registers, in_tasks
from lib.tir.operators import WINOGRAD_1D, core_operator, operators

_TILES = range(8, 129)  # of a task


def fits(workload: tvm.IRModule, _target: Target) -> bool:
    """Whether a workload is such a convolution."""
    return core_operator(operators(workload)).startswith(WINOGRAD_1D)


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """Of a convolution, when the rule comes to the block of its products: one for each number of vectors in a tile,
    with products by positions or by tiles; of many tiles, one more for each register tile of a task that does all."""
    roles = contraction_roles(schedule.get(block))
    if roles is None or not roles.batch:
        return []
    extents = [int(axis.dom.extent) for axis in schedule.get(block).iter_vars]
    lanes = tiling.lanes_for(extents[roles.reduction[-1]], machine)
    dot = instruction(schedule.mod["main"], schedule.get(block), roles, machine)

    def tiled(tile: Tile, rows_first: bool, sketch: Schedule) -> None:
        _transform_data(sketch, block, lanes)
        tile_contraction(sketch, block, roles, tile, rows_first=rows_first)
        [copy] = sketch.get_consumers(block)  # of the accumulators
        _transform_results(sketch, copy, machine)

    found = tiling.tiles(extents[roles.rows[-1]], extents[roles.columns], machine)
    choices = [partial(tiled, replace(tile, dot=dot), first) for tile in found for first in (False, True)]
    sizes = _task_sizes(schedule, block)
    heights = {height for size in sizes for height in tiling.divisors(size)}
    found = tiling.tiles(math.lcm(*heights), extents[roles.columns], machine) if heights else []
    whole = [
        Tile(each.lanes, each.vectors, (height,), dot) for each in found for height in each.rows if height in heights
    ]
    for tile in whole:
        of_tile = [size for size in sizes if size % tile.rows[0] == 0]
        choices.append(partial(_in_blocks, product=block, roles=roles, tile=tile, sizes=of_tile, machine=machine))
    return feasible(schedule, choices)


def _task_sizes(schedule: Schedule, product: SBlockRV) -> list[int]:
    """How many tiles a task may have: whole blocks of an image, in all places of other axes."""
    [columns] = schedule.get_consumers(product)
    _, blocks, *in_block = (int(axis.dom.extent) for axis in schedule.get(columns).iter_vars[:4])
    return [n for n in _TILES if any(n == some * math.prod(in_block) for some in tiling.divisors(blocks)[:-1])]


def _in_blocks(
    schedule: Schedule, product: SBlockRV, roles: Roles, tile: Tile, sizes: list[int], machine: Registers
) -> None:  # fmt: skip
    """Some tiles that follow one another in each task, from their data to their results."""
    channels = primitives.extent_of(schedule, schedule.get_loops(product)[roles.reduction[-1]])
    copy = schedule.cache_write(product, 0, "local")
    task = _transform_results(schedule, copy, machine, sizes)
    for block in (copy, product):
        schedule.compute_at(block, task, preserve_unit_loops=True)
    _transform_data(schedule, product, tiling.lanes_for(channels, machine), task)
    tile_in_task(schedule, product, copy, tile, roles)


def _transform_data(schedule: Schedule, product: SBlockRV, lanes: int, within: LoopRV | None = None) -> None:
    """Transform all data in a parallel loop of its own, or, within a loop, what that needs."""
    [spread] = schedule.get_producers(product)
    is_rounded = schedule.get(spread).init is None
    [columns] = schedule.get_producers(spread) if is_rounded else [spread]
    padding = schedule.get_producers(columns)
    if within is not None:
        schedule.compute_at(spread, within, preserve_unit_loops=True)
    position, image, tile, channel, *place = schedule.get_loops(spread)[-len(schedule.get(spread).iter_vars) :]
    channel, lane = schedule.split(channel, [None, lanes])
    schedule.reorder(image, tile, channel, position, *place, lane)
    around = in_tasks(schedule, [image, tile], channel) if within is None else channel
    if is_rounded:
        schedule.unroll(position)
        schedule.vectorize(lane)
        schedule.compute_at(columns, around, preserve_unit_loops=True)
        position, *_, lane, place = schedule.get_loops(columns)[-len(schedule.get(columns).iter_vars) :]
        in_registers(schedule, columns, [position], place, lane)
        schedule.set_scope(columns, 0, "local")
    else:
        in_registers(schedule, columns, [position], place[0], lane)
    for block in padding:
        primitives.pad(schedule, block, within)


def _transform_results(schedule: Schedule, copy: SBlockRV, machine: Registers, sizes: Sequence[int] = ()) -> LoopRV:
    """Transform products in a parallel loop of its own; returns the loop over its tasks, or over channels in them.

    Args:
        copy: The block that reads the accumulators.
        sizes: A task has all channels of so many tiles, one of these; if there are none, some channels of any.
    """
    [columns] = schedule.get_consumers(copy)
    last = primitives.following(schedule, columns)
    image, block, phase, other, result, channel, position = schedule.get_loops(columns)
    lanes = tiling.lanes_for(primitives.columns_of(schedule, last), machine)
    channel, lane = schedule.split(channel, [None, lanes])
    schedule.reorder(image, block, other, channel, phase, result, lane)
    if sizes:
        across = primitives.extent_of(schedule, phase) * primitives.extent_of(schedule, other)
        counts = [size // across for size in sizes]
        block, _ = schedule.split(block, [None, primitives.sampled_choice(schedule, counts)])
        task = schedule.fuse(image, block)
        schedule.parallel(task)
    else:
        task = channel = in_tasks(schedule, [image, block, other], channel)
    schedule.reverse_compute_at(last, channel, preserve_unit_loops=True)
    *rows, _ = schedule.get_loops(last)[-len(schedule.get(last).iter_vars) :]
    primitives.vectorize_last(schedule, last, lanes)
    for row in rows:
        schedule.unroll(row)
    in_registers(schedule, columns, [phase, result], position, lane)
    schedule.set_scope(columns, 0, "local")
    return task
