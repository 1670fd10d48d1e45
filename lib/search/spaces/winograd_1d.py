"""A space for the convolutions of `lib.graph.winograd_1d` on CPUs, with the loops that images have.

Data are transformed, multiplied and transformed back in parallel loops of their own (`lib.search.spaces.winograd`), or
by one task for some tiles that follow one another, which stay in L2:

    parallel (images, blocks.0), or (images, blocks, other axes.0)
        padded data
        transformed data
        products: positions, columns, tiles: a register tile
        blocks.1, other axes, vectors, places within a distance: results and what follows, in registers
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV
from tvm.target import Target

from lib.machine.registers import Registers
from lib.search.spaces import primitives, tiling
from lib.search.spaces.contraction import instruction
from lib.search.spaces.microkernel import tile_contraction
from lib.search.spaces.roles import Roles, contraction_roles
from lib.search.spaces.space import feasible
from lib.search.spaces.tiling import Tile
from lib.search.spaces.winograd import in_blocks, in_registers, in_tasks, transform_data
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
        transform_data(sketch, block, roles, lanes)
        tile_contraction(sketch, block, roles, tile, rows_first=rows_first)
        [copy] = sketch.get_consumers(block)  # of the accumulators
        _transform_results(sketch, copy, machine)

    found = tiling.tiles(extents[roles.rows[-1]], extents[roles.columns], machine)
    choices = [partial(tiled, replace(tile, dot=dot), first) for tile in found for first in (False, True)]
    for sizes in _task_sizes(schedule, block, roles):
        heights = {height for size in sizes.tiles for height in tiling.divisors(size)}
        found = tiling.tiles(math.lcm(*heights), extents[roles.columns], machine) if heights else []
        whole = [replace(each, rows=(height,), dot=dot) for each in found for height in each.rows if height in heights]
        for tile in whole:
            results = partial(_transform_results, machine=machine, sizes=sizes, height=tile.rows[0])
            choices.append(
                partial(in_blocks, product=block, roles=roles, tile=tile, machine=machine, transform_results=results)
            )
    return feasible(schedule, choices)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How many tiles a task may have that computes all of them."""

    axis: int  # of results, that tasks share: blocks (1), or places in other axes (2)
    tiles: list[int]  # to choose from
    each: int  # tiles of one place along the axis

    def that_divide(self, schedule: Schedule, height: int) -> ExprRV:
        """How many places along the axis a task has, whose tiles a height divides."""
        return primitives.sampled_choice(schedule, [n // self.each for n in self.tiles if n % height == 0])


def _task_sizes(schedule: Schedule, product: SBlockRV, roles: Roles) -> list[_Sizes]:
    """Whole blocks of an image; or of one block, if no tile needs data of others, parts of the places in other axes."""
    [columns] = schedule.get_consumers(product)
    _, blocks, across, phases = (int(axis.dom.extent) for axis in schedule.get(columns).iter_vars[:4])
    pieces = int(schedule.get(product).iter_vars[roles.reduction[0]].dom.extent)
    found = [(1, blocks, across * phases)] + ([(2, across, phases)] if pieces == 1 else [])
    return [
        _Sizes(axis, [each * n for n in tiling.divisors(extent) if n < extent and each * n in _TILES], each)
        for axis, extent, each in found
    ]


def _transform_results(
    schedule: Schedule, copy: SBlockRV, machine: Registers, sizes: _Sizes | None = None, height: int = 1
) -> LoopRV:  # fmt: skip
    """Transform products in a parallel loop of its own; returns the loop over its tasks, or over channels in them.

    Args:
        copy: The block that reads the accumulators.
        sizes: A task has all channels of so many tiles, a multiple of `height`; None: some channels of any.
    """
    [columns] = schedule.get_consumers(copy)
    last = primitives.following(schedule, columns)
    *outer, phase, result, channel, position = schedule.get_loops(columns)
    lanes = tiling.lanes_for(primitives.columns_of(schedule, last), machine)
    channel, lane = schedule.split(channel, [None, lanes])
    schedule.reorder(*outer, channel, phase, result, lane)
    if sizes:
        shared, _ = schedule.split(outer[sizes.axis], [None, sizes.that_divide(schedule, height)])
        task = schedule.fuse(*outer[: sizes.axis], shared)
        schedule.parallel(task)
    else:
        task = channel = in_tasks(schedule, outer, channel)
    schedule.reverse_compute_at(last, channel, preserve_unit_loops=True)
    *rows, _ = schedule.get_loops(last)[-len(schedule.get(last).iter_vars) :]
    primitives.vectorize_last(schedule, last, lanes)
    for row in rows:
        schedule.unroll(row)
    in_registers(schedule, columns, [phase, result], position, lane)
    schedule.set_scope(columns, 0, "local")
    return task
