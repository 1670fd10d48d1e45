"""A space for contractions on CPUs: a tile of the output lives in vector registers while its sums are formed.

MetaSchedule tiles every loop alike (SSRSRS) and leaves it to chance that an inner tile fits the registers, that its
columns fill vectors, and that LLVM keeps it there. Here that is how the space is made: `rows x vectors` accumulators,
as many as the machine has registers for, are filled by a loop over the reduction which, for each step, loads the
vectors of one row of weights once and multiplies them with as many broadcast elements of the data. It is the inner
kernel of Goto's product (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", TOMS 2008), for
convolutions as well: their rows are neighbouring pixels. What is left to the search is how many rows and vectors,
how far the reduction is unrolled, and which part of the output one task of a thread computes and in which order.

    parallel (batch, rows.0, columns.0)
        columns.1, rows.1, other rows
            reduction.0, kernel window
                reduction.1 (unrolled), rows (unrolled), vectors (unrolled), lanes (vectorised)
            the epilogue of the tile

Weights are packed to be read in order by MetaSchedule's RewriteLayout, where they are marked as free to be.
"""

from collections.abc import Sequence
from functools import partial

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV, ScheduleError
from tvm.target import Target

from lib import prefetch, remainder, structure
from lib.spaces import tiling
from lib.spaces.rule import tried
from lib.spaces.tiling import Registers, Tile
from lib.structure import Roles

_UNROLLED = (2, 4, 8)  # steps of the reduction


def fits(workload: tvm.IRModule, target: Target) -> bool:
    """Whether the space has programs of a workload: one contraction, with element-wise blocks around it."""
    return bool(_tiles_of(workload, target))


def packs_weights(workload: tvm.IRModule, target: Target) -> bool:
    """Whether RewriteLayout can bring the weights of all programs into their order.

    It knows no layouts with gaps, and where vectors do not fill the columns it finds one that tears them apart.
    """
    reduction, tiles = structure.only_reduction(workload["main"]), _tiles_of(workload, target)
    if reduction is None or not tiles:
        return True
    columns = int(reduction.iter_vars[structure.last_axis(reduction)].dom.extent)
    return all(columns % tile.lanes == 0 for tile in tiles)


def _tiles_of(workload: tvm.IRModule, target: Target) -> list[Tile]:
    reduction = structure.only_reduction(workload["main"])
    found = structure.roles(reduction) if reduction else None
    if reduction is None or found is None:
        return []
    return _tiles([int(axis.dom.extent) for axis in reduction.iter_vars], found, tiling.registers(target))


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """Of a contraction of float32, one for each number of vectors and each place of the padding; its neighbours were
    inlined."""
    roles = structure.roles(schedule.get(block))
    if roles is None or len(schedule.get_loops(block)) != len(schedule.get(block).iter_vars):
        return []
    extents = [int(axis.dom.extent) for axis in schedule.get(block).iter_vars]
    tiles = _tiles(extents, roles, machine)
    places = (False, True) if schedule.get_producers(block) else (False,)

    def way(tile: Tile, padded_in_task: bool, sketch: Schedule) -> None:
        tile_sums(sketch, block, roles, tile, sketch.get_producers(block), padded_in_task)

    return tried(schedule, [partial(way, tile, in_task) for tile in tiles for in_task in places])


def _tiles(extents: Sequence[int], roles: Roles, machine: Registers) -> list[Tile]:
    """Those for axes of such extents. Where groups of columns follow one another, what is beyond the border of one
    would be inside the next."""
    columns = extents[roles.columns] // roles.groups
    return tiling.tiles(extents[roles.rows[-1]], columns, machine, remainders=roles.groups == 1)


def tile_sums(
    schedule: Schedule,
    block: SBlockRV,
    roles: Roles,
    tile: Tile,
    producers: Sequence[SBlockRV] = (),
    padded_in_task: bool = False,
) -> None:
    """Tile a contraction, and place the blocks before it that pad its data."""
    loops = schedule.get_loops(block)
    n_rows, n_columns = (tiling.extent_of(schedule, loops[n]) for n in (roles.rows[-1], roles.columns))
    sums = epilogue(schedule, block, tile.lanes)
    *outer_rows, last_row = [loops[n] for n in roles.rows]
    last_row, row = schedule.split(last_row, [None, tiling.choice(schedule, tile.rows)])
    columns, groups = loops[roles.columns], []
    if roles.groups > 1:
        group, columns = schedule.split(columns, [roles.groups, None])
        groups.append(group)
    column, vector, lane = schedule.split(columns, [None, tile.vectors, tile.lanes])
    *window, last_sum = [loops[n] for n in roles.reduction]
    extent = tiling.extent_of(schedule, last_sum)
    steps = [n for n in _UNROLLED if extent % n == 0] or [extent if extent < _UNROLLED[-1] else 1]
    sum_outer, sum_inner = schedule.split(last_sum, [None, tiling.choice(schedule, steps)])
    shared_out = outer_rows.pop() if outer_rows else last_row  # of images, the lines
    rest = [] if shared_out is last_row else [last_row]
    rows_0, rows_1 = tiling.halves(schedule, shared_out)
    columns_0, columns_1 = tiling.halves(schedule, column)
    tasks = [*(loops[n] for n in roles.batch), *groups, *outer_rows, rows_0, columns_0]
    places = [columns_1, rows_1, *rest]
    schedule.reorder(*tasks, *places, sum_outer, *window, sum_inner, row, vector, lane)
    task = schedule.fuse(*tasks)
    schedule.parallel(task)
    if n_columns % (tile.vectors * tile.lanes) or any(n_rows % r for r in tile.rows):
        schedule.annotate(places[-1], remainder.MARK, 1)
    schedule.annotate(sum_inner, prefetch.MARK, 1)
    for loop in (sum_inner, row, vector):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    schedule.reverse_compute_at(sums, places[-1], preserve_unit_loops=True)
    written = tiling.columns_of(schedule, sums)
    # Of results that were widened (`lib.widen`), no part of a vector may be cut off.
    tiling.vectorize_last(schedule, sums, tile.lanes if written == n_columns else tiling.narrowed(tile.lanes, written))
    for producer in producers:
        pad(schedule, producer, task if padded_in_task else None)
    initial = schedule.decompose_reduction(block, sum_outer)
    *_, row, vector, lane = schedule.get_loops(initial)
    schedule.vectorize(lane)
    schedule.unroll(vector)
    schedule.unroll(row)


def pad(schedule: Schedule, block: SBlockRV, task: LoopRV | None) -> None:
    """The padded data: of the whole image before all else, or in each task of what it reads."""
    if task is not None:
        # A trace is replayed with other tiles: how many loops there are must not depend on them.
        schedule.compute_at(block, task, preserve_unit_loops=True)
    else:
        schedule.parallel(schedule.fuse(*schedule.get_loops(block)[:-2]))
    extent = tiling.extent_of(schedule, schedule.get_loops(block)[-1])
    tiling.vectorize_last(schedule, block, next(n for n in (16, 8, 4, extent) if extent % n == 0))


def _results_apart(schedule: Schedule, block: SBlockRV, length: int, lanes: int) -> None:
    """What follows the sums and reads them in stretches of a length, as a parallel pass of its own."""
    while following := schedule.get_consumers(block):
        schedule.compute_inline(block)
        [block] = following
    *outer, last = schedule.get_loops(block)
    stretch, last = schedule.split(last, [None, length])
    _, lane = schedule.split(last, [None, tiling.narrowed(lanes, length)])
    schedule.parallel(schedule.fuse(*outer, stretch))
    schedule.vectorize(lane)


def epilogue(schedule: Schedule, block: SBlockRV, lanes: int) -> SBlockRV:
    """The block that takes the sums out of the registers: the one that follows, or a copy before what cannot be moved
    to where they are: other sums, or stretches of columns (`lib.widen`, with groups).

    Raises:
        ScheduleError: More than one block follows.
    """
    consumers = list(schedule.get_consumers(block))
    if not consumers or schedule.get(consumers[0]).init is not None:
        return schedule.cache_write(block, 0, "local")
    consumer = consumers[0]
    length = structure.period(schedule.get(consumer)) if len(consumers) == 1 else 0
    if length:
        copy = schedule.cache_write(block, 0, "local")
        _results_apart(schedule, consumer, length, lanes)
        return copy
    if len(consumers) > 1 or schedule.get_consumers(consumer):
        raise ScheduleError("what follows the sums does not fit into one block")
    for other in schedule.get_producers(consumer):  # say, of a mask that is added
        if not schedule.get(other).same_as(schedule.get(block)):
            schedule.compute_inline(other)
    schedule.set_scope(block, 0, "local")
    return consumer
