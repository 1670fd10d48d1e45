"""A space for the convolutions of `lib.graph.winograd` on CPUs: parallel loops over data, products and results.

The transforms are vectorised over channels; their intermediate results stay in registers or in L1. The products have
the micro-kernel of contractions. What is left to the search, beside its register tile: how many vectors of channels a
parallel task of the two transforms takes; and whether the products are shared out by positions, so that each core reads
its part of the kernels alone, or by tiles, so that it reads the data that it has transformed itself.

Transformed data and products have two to four times the elements of an image, and those of a large one leave caches.
So one task may as well do all for some lines of tiles, or for a part of one, if a line leaves L2 as well, and read all
kernels for that:

    parallel (images, lines.0)  # or (images, lines, tiles.0)
        padded data
        transformed data
        products: positions, columns, tiles: a register tile
        lines.1, tiles, vectors: results and what follows, in registers
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from lib.machine.dots import INT16, Dot
from lib.machine.registers import Registers, narrowed
from lib.search.spaces import primitives, tiling
from lib.search.spaces.contraction import instruction
from lib.search.spaces.microkernel import tile_contraction, tile_in_task
from lib.search.spaces.roles import Roles, contraction_roles
from lib.search.spaces.space import feasible
from lib.search.spaces.tiling import Tile
from lib.tir.operators import WINOGRAD, WINOGRAD_LINES, core_operator, operators

_WIDE = 1 << 16  # elements of transformed data and products of a line, from which on tasks may have parts of it


def fits(workload: tvm.IRModule, _target: Target) -> bool:
    """Whether a workload is such a convolution."""
    return core_operator(operators(workload)).startswith(WINOGRAD)


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """Of a convolution, when the rule comes to the block of its products: one for each number of vectors in a tile,
    with products by positions or by tiles; of large images, one more for each tile of a task that does all."""
    roles = contraction_roles(schedule.get(block))
    if roles is None or not roles.batch:
        return []
    extents = [int(axis.dom.extent) for axis in schedule.get(block).iter_vars]
    dot = instruction(schedule.mod["main"], schedule.get(block), roles, machine)

    def tiled(tile: Tile, rows_first: bool, sketch: Schedule) -> None:
        transform_data(sketch, block, roles, _lanes(extents[roles.reduction[-1]], dot, machine))
        tile_contraction(sketch, block, roles, tile, rows_first=rows_first)
        [copy] = sketch.get_consumers(block)  # of the accumulators
        _transform_results(sketch, copy, machine)

    columns = extents[roles.columns] // roles.groups
    left = machine.beside(dot)
    tiles = [replace(tile, dot=dot) for tile in tiling.tiles(extents[roles.rows[-1]], columns, left)]
    transforms = [partial(tiled, tile, first) for tile in tiles for first in (False, True)]
    lines, across = _lines_and_columns(schedule, block)
    if lines and len(roles.reduction) == 1:  # of volumes it is over frames, too
        of_tile = math.prod(extents[n] for n in roles.batch) * (extents[roles.reduction[-1]] + extents[roles.columns])
        for tile, in_parts in _tiles_in_blocks(lines, across, columns, left, is_wide=across * of_tile > _WIDE):
            results = partial(_transform_results, machine=machine, height=tile.rows[0], in_parts=in_parts)
            blocked = partial(in_blocks, product=block, roles=roles, machine=machine, transform_results=results)
            transforms.append(partial(blocked, tile=replace(tile, dot=dot)))
    return feasible(schedule, transforms)


def _tiles_in_blocks(
    lines: int, across: int, columns: int, machine: Registers, *, is_wide: bool
) -> Iterator[tuple[Tile, bool]]:
    """Register tiles, of one height each, for tasks that have some lines of an image's tiles, and, if these are wide,
    for such as have a part of one line; with which of the two.

    Heights divide all tiles of a task, for some size of tasks: one line of 26 has no tile of four rows, two have.
    """
    heights = {
        False: {height for n in tiling.divisors(lines)[:-1] for height in tiling.divisors(n * across)},
        True: {height for n in tiling.divisors(across)[:-1] for height in tiling.divisors(n)} if is_wide else set(),
    }
    for tile in tiling.tiles(math.lcm(*heights[False]), columns, machine):
        for in_parts, dividing in heights.items():
            yield from ((replace(tile, rows=(height,)), in_parts) for height in tile.rows if height in dividing)


def _lanes(channels: int, dot: Dot | None, machine: Registers) -> int:
    """Of the vectors in which data are transformed, of integers of 16 bits twice as many."""
    return narrowed(machine.lanes * (2 if dot == INT16 else 1), channels)


def _lines_and_columns(schedule: Schedule, product: SBlockRV) -> tuple[int, int]:
    """How many tiles an image is high and wide, where there are enough lines of them to share out; else none."""
    _, columns, *_, last = primitives.after(schedule, product)
    size = _side(schedule, columns)
    *_, height, width, _ = (int(axis.dom.extent) for axis in schedule.get(last).iter_vars)
    return (0, 0) if height < WINOGRAD_LINES * size else (-(-height // size), -(-width // size))


def in_blocks(
    schedule: Schedule, product: SBlockRV, roles: Roles, tile: Tile, machine: Registers,
    transform_results: Callable[[Schedule, SBlockRV], LoopRV],
) -> None:  # fmt: skip
    """Some tiles that follow one another in each task, from their data to their results.

    Args:
        transform_results: Cuts what follows the copy of the accumulators into tasks, and returns the loop over them.
    """
    channels = primitives.extent_of(schedule, schedule.get_loops(product)[roles.reduction[-1]])
    copy = schedule.cache_write(product, 0, "local")
    task = transform_results(schedule, copy)
    for block in (copy, product):
        schedule.compute_at(block, task, preserve_unit_loops=True)
    transform_data(schedule, product, roles, _lanes(channels, tile.dot, machine), task)
    tile_in_task(schedule, product, copy, tile, roles)


def transform_data(
    schedule: Schedule, product: SBlockRV, roles: Roles, lanes: int, within: LoopRV | None = None
) -> None:  # fmt: skip
    """Transform all data in a parallel loop of its own, or, within a loop, what that needs; along one axis or two, as
    many as the products have positions."""
    [spread] = schedule.get_producers(product)
    is_rounded = schedule.get(spread).init is None
    [columns] = schedule.get_producers(spread) if is_rounded else [spread]
    along = len(roles.batch)
    lines = schedule.get_producers(columns) if along > 1 else []
    padding = schedule.get_producers([columns, *lines][-1])
    if within is not None:
        schedule.compute_at(spread, within, preserve_unit_loops=True)
    loops = schedule.get_loops(spread)[-len(schedule.get(spread).iter_vars) :]
    positions, others = loops[:along], loops[along:]
    k = [] if is_rounded else [others.pop()]
    *tiles, channel = others
    channel, lane = schedule.split(channel, [None, lanes])
    schedule.reorder(*tiles, channel, *positions, *k, lane)
    around = in_tasks(schedule, tiles, channel) if within is None else channel
    if is_rounded:
        for loop in positions:
            schedule.unroll(loop)
        schedule.vectorize(lane)
        _within(schedule, columns, around, 0, along)
    else:
        in_registers(schedule, columns, positions, k[0], lane)
    for block in lines:
        _within(schedule, block, around)
    for block in padding:
        primitives.pad(schedule, block, within)


def _within(schedule: Schedule, block: SBlockRV, task: LoopRV, first: int = 1, along: int = 2) -> None:
    """Compute in a task what it reads of a transform, which stays in registers or in L1.

    Args:
        first: Which axis of the block is the first of those within a tile.
        along: How many these are.
    """
    schedule.compute_at(block, task, preserve_unit_loops=True)
    loops = schedule.get_loops(block)[-len(schedule.get(block).iter_vars) :]
    channel, k = loops[-2:]
    in_registers(schedule, block, loops[first : first + along], k, channel)
    schedule.set_scope(block, 0, "local")


def _transform_results(
    schedule: Schedule, copy: SBlockRV, machine: Registers, *, height: int = 0, in_parts: bool = False
) -> LoopRV:
    """Transform products in a parallel loop of its own; returns the loop over its tasks, or over channels in them.

    Args:
        copy: The block that reads the accumulators.
        height: Of register tiles, if a task has all channels of some lines of tiles: as many as that divides.
        in_parts: It has some tiles of one line instead.
    """
    lines, columns, *following = primitives.after(schedule, copy)
    for block in following[:-1]:
        schedule.compute_inline(block)
    size, last = _side(schedule, columns), following[-1]
    *images, line, column, channel = schedule.get_loops(last)
    line, y = schedule.split(line, [None, size])
    column, x = schedule.split(column, [None, size])
    # Channels that only fill vectors (`lib.graph.widen`) are dropped here.
    lanes = tiling.lanes_for(primitives.extent_of(schedule, channel), machine)
    channel, lane = schedule.split(channel, [None, lanes])
    schedule.reorder(*images, line, column, channel, y, x, lane)
    if height:
        n_lines, across = (primitives.extent_of(schedule, loop) for loop in (line, column))
        shared_out, n, each = (column, across, 1) if in_parts else (line, n_lines, across)
        counts = [count for count in tiling.divisors(n) if count > 1 and n // count * each % height == 0]
        part, _ = schedule.split(shared_out, [primitives.sampled_choice(schedule, counts), None])
        task = schedule.fuse(*images, *([line, part] if in_parts else [part]))
        schedule.parallel(task)
    else:
        task = channel = in_tasks(schedule, [*images, line, column], channel)
    schedule.vectorize(lane)
    schedule.unroll(x)
    schedule.unroll(y)
    for block in (columns, lines):
        _within(schedule, block, channel)
    return task


def _side(schedule: Schedule, columns: SBlockRV) -> int:
    """m: outputs in a line of a tile."""
    return int(schedule.get(columns).iter_vars[1].dom.extent)


def in_tasks(schedule: Schedule, tiles: list[LoopRV], channel: LoopRV) -> LoopRV:
    """Run tiles and a part of their channels in parallel; returns the loop over the channels of a task."""
    channels_0, channels_1 = primitives.sampled_split(schedule, channel)
    schedule.parallel(schedule.fuse(*tiles, channels_0))
    return channels_1


def in_registers(schedule: Schedule, block: SBlockRV, positions: list[LoopRV], k: LoopRV, channel: LoopRV) -> None:
    """Multiply a tile with a constant matrix: unrolled, so that its entries become literals."""
    schedule.reorder(*positions, k, channel)
    schedule.vectorize(channel)
    for loop in (*positions, k):
        schedule.unroll(loop)
    initial = schedule.decompose_reduction(block, k)
    schedule.vectorize(schedule.get_loops(initial)[-1])
