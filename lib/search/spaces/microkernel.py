"""The register tile of a contraction as schedule steps, for direct contractions and for Winograd's products alike.

See `lib.search.spaces.contraction` for the loops that come of it.
"""

from collections.abc import Sequence

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from lib.machine.registers import narrowed
from lib.search.spaces import primitives
from lib.search.spaces.roles import Roles
from lib.search.spaces.tiling import Tile
from lib.tir import prefetch, remainder

_UNROLLED = (2, 4, 8)  # steps of the K loop


def tile_contraction(
    schedule: Schedule,
    block: SBlockRV,
    roles: Roles,
    tile: Tile,
    producers: Sequence[SBlockRV] = (),
    padded_in_task: bool = False,
) -> None:
    """Tile a contraction, and place the blocks before it that pad its data (`producers`)."""
    loops = schedule.get_loops(block)
    n_rows, n_columns = (primitives.extent_of(schedule, loops[n]) for n in (roles.rows[-1], roles.columns))
    results = primitives.epilogue(schedule, block, tile.lanes)
    *outer_rows, last_row = [loops[n] for n in roles.rows]
    last_row, row = schedule.split(last_row, [None, primitives.sampled_choice(schedule, tile.rows)])
    columns, groups = loops[roles.columns], []
    if roles.groups > 1:
        group, columns = schedule.split(columns, [roles.groups, None])
        groups.append(group)
    column, vector, lane = schedule.split(columns, [None, tile.vectors, tile.lanes])
    *window, k = [loops[n] for n in roles.reduction]
    k_outer, k_inner = schedule.split(k, [None, _sampled_unrolling(schedule, k)])
    shared_out = outer_rows.pop() if outer_rows else last_row  # of images, the lines
    rest = [] if shared_out is last_row else [last_row]
    rows_0, rows_1 = primitives.sampled_split(schedule, shared_out)
    columns_0, columns_1 = primitives.sampled_split(schedule, column)
    tasks = [*(loops[n] for n in roles.batch), *groups, *outer_rows, rows_0, columns_0]
    around = [columns_1, rows_1, *rest]  # the tile, within a task
    schedule.reorder(*tasks, *around, k_outer, *window, k_inner, row, vector, lane)
    task = schedule.fuse(*tasks)
    schedule.parallel(task)
    if n_columns % (tile.vectors * tile.lanes) or any(n_rows % r for r in tile.rows):
        schedule.annotate(around[-1], remainder.MARK, 1)
    schedule.annotate(k_inner, prefetch.MARK, 1)
    for loop in (k_inner, row, vector):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    _compute_epilogue_at(schedule, results, around[-1], n_columns, tile.lanes)
    for producer in producers:
        primitives.pad(schedule, producer, task if padded_in_task else None)
    _initialize(schedule, schedule.decompose_reduction(block, k_outer))


def _sampled_unrolling(schedule: Schedule, k: LoopRV) -> object:
    extent = primitives.extent_of(schedule, k)
    steps = [n for n in _UNROLLED if extent % n == 0] or [extent if extent < _UNROLLED[-1] else 1]
    return primitives.sampled_choice(schedule, steps)


def _compute_epilogue_at(schedule: Schedule, results: SBlockRV, loop: LoopRV, n_columns: int, lanes: int) -> None:
    schedule.reverse_compute_at(results, loop, preserve_unit_loops=True)
    written = primitives.columns_of(schedule, results)
    # Where columns were added (`lib.graph.widen`), those that are written must be whole vectors.
    primitives.vectorize_last(schedule, results, lanes if written == n_columns else narrowed(lanes, written))


def _initialize(schedule: Schedule, initial: SBlockRV) -> None:
    """Set the accumulators to zero in registers."""
    *_, row, vector, lane = schedule.get_loops(initial)
    schedule.vectorize(lane)
    schedule.unroll(vector)
    schedule.unroll(row)
