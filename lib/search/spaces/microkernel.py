"""The register tile of a contraction as schedule steps, for direct contractions and for Winograd's products alike.

See `lib.search.spaces.contraction` for the loops that come of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from lib.machine.registers import narrowed
from lib.search.spaces import primitives
from lib.search.spaces.primitives import Permuted
from lib.search.spaces.roles import Roles
from lib.search.spaces.tiling import Tile
from lib.tir import analysis, dot, matrix, parallel, prefetch, remainder

_UNROLLED = (2, 4, 8)  # steps of the K loop


@dataclass(frozen=True, slots=True)
class Slabs:
    """Parts of a reduction, so that what a task reads again in one of them, data or weights, stays in a cache."""

    axis: int  # among those of the reduction
    counts: tuple[int, ...]  # to choose from


def tile_contraction(
    schedule: Schedule,
    block: SBlockRV,
    roles: Roles,
    tile: Tile,
    producers: Sequence[SBlockRV] = (),
    padded_in_task: bool = False,
    results: SBlockRV | None = None,
    rows_first: bool = False,
    slabs: Slabs | None = None,
) -> None:
    """Tile a contraction, and place the blocks before it that pad its data (`producers`).

    Args:
        results: The block that reads the accumulators, which have the scope `local` already; None: what follows.
        rows_first: A task has its rows of all contractions of a batch, not all rows of some of them.
        slabs: A task goes through the reduction in parts, each for all of its tiles. There are no groups then.
    """
    if tile.spread:
        roles = replace(roles, groups=1)
    whole, slab = block, []
    if slabs:
        block, results = _in_slabs(schedule, whole, roles, slabs), whole
    loops = schedule.get_loops(block)
    if slabs:
        slab.append(loops.pop(roles.reduction[slabs.axis]))
    results, cut = (results, None) if results else _results(schedule, block, roles, tile)
    *outer_rows, last_row = [loops[n] for n in roles.rows]
    *groups, columns = _of_groups(schedule, loops[roles.columns], roles)
    *window, k = [loops[n] for n in roles.reduction]
    split = _split(schedule, last_row, columns, k, tile)
    # Tasks share the lines of an image out; of a signal, which has one, the tiles of that line.
    has_lines = bool(outer_rows) and (cut is not None or primitives.extent_of(schedule, outer_rows[-1]) > 1)
    shared_out, rest = (outer_rows.pop(), [split.rows]) if has_lines else (split.rows, [])
    if tile.lines > 1:
        shared_out, split = _with_lines(schedule, shared_out, split, tile)
    factors = primitives.sampled_factors(schedule, shared_out)
    rows_0, rows_1 = schedule.split(shared_out, factors)
    # What cuts the columns of a group is done in the task, for all of them.
    of_columns = [1, None] if cut else primitives.sampled_factors(schedule, split.columns)
    columns_0, columns_1 = schedule.split(split.columns, of_columns)
    # Rows before columns: a thread then has the part of the image that it has in the kernels before and after.
    batch, of_rows = [loops[n] for n in roles.batch], [*outer_rows, rows_0]
    tasks = [*(of_rows + batch if rows_first else batch + of_rows), *groups, columns_0]
    around, of_tile = [*slab, columns_1, rows_1, *rest], split.within(window)  # the tile, within a task
    schedule.reorder(*tasks, *around, *of_tile)
    if not tile.matrix:  # where an instruction's tiles of rows begin is not asked (`lib.tir.matrix`)
        primitives.skip_padding(schedule, block, producers, window)
    task = schedule.fuse(*tasks)
    if not cut:
        schedule.parallel(task)
    _fill(schedule, block, results, split, around[-1], tile)
    for producer in producers:
        primitives.pad(schedule, producer, [task, *slab][-1] if padded_in_task else None)
    _initialize(schedule, schedule.decompose_reduction(block, of_tile[0]), tile)
    if cut:
        _cut_in_task(schedule, task, cut, roles, factors, tile)
    if slab:
        _finish_in_task(schedule, task, slab[0], whole, tile)


def _of_groups(schedule: Schedule, columns: LoopRV, roles: Roles) -> list[LoopRV]:
    """The loop over columns, after the one over their groups if there are several."""
    return [columns] if roles.groups == 1 else schedule.split(columns, [roles.groups, None])


def _in_slabs(schedule: Schedule, block: SBlockRV, roles: Roles, slabs: Slabs) -> SBlockRV:
    """The contraction of each part of its reduction, whose sums the block itself adds up."""
    loop = schedule.get_loops(block)[roles.reduction[slabs.axis]]
    slab, _ = schedule.split(loop, [primitives.sampled_choice(schedule, slabs.counts), None])
    part = schedule.rfactor(slab, 0)
    schedule.set_scope(part, 0, "local")
    return part


def _finish_in_task(schedule: Schedule, task: LoopRV, slab: LoopRV, whole: SBlockRV, tile: Tile) -> None:
    """Set the sums of all slabs to zero before the first, and have what reads them follow the last."""
    if schedule.get_consumers(whole):
        following = primitives.following(schedule, whole)
        schedule.reverse_compute_at(following, task, preserve_unit_loops=True)
        primitives.vectorize_last(schedule, following, tile.lanes)
    schedule.decompose_reduction(whole, slab)  # its loops stay as they are: how many there are depends on extents


def _results(schedule: Schedule, block: SBlockRV, roles: Roles, tile: Tile) -> tuple[SBlockRV, Permuted | None]:
    """The block that reads the accumulators; of a convolution in groups also what takes the first columns of each after
    that, if it can be done in the tasks that compute them."""
    found = primitives.permuted(schedule, block) if roles.groups > 1 and len(roles.rows) > 1 else None
    if found is None:
        return primitives.epilogue(schedule, block, tile.lanes), None
    if primitives.cuts_groups(schedule, found, roles.groups):
        return found.copy, found
    primitives.apart(schedule, found, tile.lanes)
    return found.copy, None


def _cut_in_task(
    schedule: Schedule, task: LoopRV, cut: Permuted, roles: Roles, factors: Sequence[ExprRV], tile: Tile
) -> None:
    """Have what takes the first columns of each group follow in the tasks that compute these."""
    loops = schedule.get_loops(cut.consumer)
    *outer, lines, row = [loops[n] for n in roles.rows]
    group, columns = schedule.split(loops[roles.columns], [None, cut.length])
    in_tile = []
    if tile.lines > 1:
        lines, *in_tile = schedule.split(lines, [None, tile.lines])
    lines_0, lines_1 = schedule.split(lines, factors)
    tasks = [*(loops[n] for n in roles.batch), *outer, lines_0, group]
    schedule.reorder(*tasks, lines_1, *in_tile, row, columns)
    primitives.vectorize_last(schedule, cut.consumer, narrowed(tile.lanes, cut.length))
    # TVM's `parallel` knows no predicates of blocks, as tiles at a border have them.
    schedule.annotate(schedule.merge(task, schedule.fuse(*tasks)), parallel.MARK, 1)


def tile_in_task(schedule: Schedule, block: SBlockRV, results: SBlockRV, tile: Tile, roles: Roles) -> None:
    """Tile a contraction that was moved into a task, and computes there what the task needs.

    Args:
        results: The block that reads the accumulators, in the same task.
        roles: Of the axes for the rows, the last is tiled.
    """
    loops = schedule.get_loops(block)[-len(schedule.get(block).iter_vars) :]
    (*outer, row), (*window, k) = roles.rows, roles.reduction
    *groups, columns = _of_groups(schedule, loops[roles.columns], roles)
    split = _split(schedule, loops[row], columns, loops[k], tile)
    of_tile = split.within([loops[n] for n in window])
    # Columns of weights stay in L1 for all rows.
    batch, lines = [loops[n] for n in roles.batch], [loops[n] for n in outer]
    schedule.reorder(*batch, *groups, split.columns, *lines, split.rows, *of_tile)
    _fill(schedule, block, results, split, split.rows, tile)
    _initialize(schedule, schedule.decompose_reduction(block, of_tile[0]), tile)


@dataclass(frozen=True, slots=True)
class _Split:
    """The loops of a contraction with a register tile."""

    rows: LoopRV  # over tiles
    columns: LoopRV  # over tiles
    k: LoopRV  # over unrolled steps
    step: LoopRV
    in_tile: list[LoopRV]  # lines if there are several, rows
    vector: LoopRV
    lane: LoopRV
    words: list[LoopRV]  # that are added together, if several
    products: list[LoopRV]  # that one instruction adds, if several
    has_remainders: bool
    of_matrices: bool

    def within(self, window: Sequence[LoopRV] = ()) -> list[LoopRV]:
        """All loops from those of the reduction inwards, in their order.

        Args:
            window: Loops of the reduction beside K.
        """
        if self.of_matrices:  # weights are packed in the order of loops: so it is one for any number of vectors
            return [self.vector, *window, self.k, self.step, *self.in_tile, self.lane, *self.products]
        return [self.k, *window, self.step, *self.in_tile, self.vector, *self.words, self.lane, *self.products]


def _split(schedule: Schedule, row: LoopRV, column: LoopRV, k: LoopRV, tile: Tile) -> _Split:
    n_rows, n_columns = (primitives.extent_of(schedule, loop) for loop in (row, column))
    rows, in_tile = schedule.split(row, [None, primitives.sampled_choice(schedule, tile.rows)])
    columns, vector, lane = schedule.split(column, [None, tile.vectors, tile.lanes])
    k_outer, k_inner, *products = _split_k(schedule, k, tile)
    words = [products.pop(0)] if tile.words > 1 else []
    has_remainders = bool(n_columns % (tile.vectors * tile.lanes)) or any(n_rows % r for r in tile.rows)
    of_matrices = tile.matrix is not None
    return _Split(
        rows, columns, k_outer, k_inner, [in_tile], vector, lane, words, products, has_remainders, of_matrices
    )


def _with_lines(schedule: Schedule, lines: LoopRV, split: _Split, tile: Tile) -> tuple[LoopRV, _Split]:
    """A tile of several lines, and the loop over such."""
    has_remainders = bool(primitives.extent_of(schedule, lines) % tile.lines)
    lines, in_tile = schedule.split(lines, [None, tile.lines])
    has_remainders |= split.has_remainders
    return lines, replace(split, in_tile=[in_tile, *split.in_tile], has_remainders=has_remainders)


def _fill(schedule: Schedule, block: SBlockRV, results: SBlockRV, split: _Split, around: LoopRV, tile: Tile) -> None:
    """Keep the accumulators of a tile in registers, with what reads them in the loop around it."""
    if split.has_remainders:
        schedule.annotate(around, remainder.MARK, 1)
    schedule.annotate(split.step, prefetch.MARK, 1)
    if tile.matrix:
        schedule.annotate(split.step, matrix.MARK, tile.matrix.name)
    for loop in (*([] if tile.matrix else [split.step]), *split.in_tile, split.vector, *split.products):
        schedule.unroll(loop)
    for loop in split.words:
        schedule.annotate(loop, dot.TOGETHER, 1)
    if tile.dot:
        schedule.annotate(split.lane, dot.MARK, tile.dot.name)
    else:
        schedule.vectorize(split.lane)
    n_columns = int(schedule.get(block).iter_vars[analysis.last_axis(schedule.get(block))].dom.extent)
    _compute_epilogue_at(schedule, results, around, n_columns, tile.lanes)


def _split_k(schedule: Schedule, k: LoopRV, tile: Tile) -> list[LoopRV]:
    """The K loop as blocks, steps (unrolled, or those of a product of matrices), words that are added together, if
    these are several, and the products that one instruction adds to a lane."""
    products = []
    if tile.dot:
        k, *products = schedule.split(k, [None, *([tile.words] if tile.words > 1 else []), tile.dot.depth])
    steps = tile.steps or _sampled_unrolling(schedule, primitives.extent_of(schedule, k))
    return [*schedule.split(k, [None, steps]), *products]


def _sampled_unrolling(schedule: Schedule, extent: int) -> object:
    steps = [n for n in _UNROLLED if extent % n == 0] or [extent if extent < _UNROLLED[-1] else 1]
    return primitives.sampled_choice(schedule, steps)


def _compute_epilogue_at(schedule: Schedule, results: SBlockRV, loop: LoopRV, n_columns: int, lanes: int) -> None:
    schedule.reverse_compute_at(results, loop, preserve_unit_loops=True)
    written = primitives.columns_of(schedule, results)
    # Where columns were added (`lib.graph.widen`), those that are written must be whole vectors.
    primitives.vectorize_last(schedule, results, lanes if written == n_columns else narrowed(lanes, written))


def _initialize(schedule: Schedule, initial: SBlockRV, tile: Tile) -> None:
    """Set the accumulators to zero in registers."""
    *outer, lane = schedule.get_loops(initial)[-4 if tile.lines > 1 else -3 :]
    schedule.vectorize(lane)
    if tile.matrix:
        schedule.annotate(outer[0], matrix.MARK, tile.matrix.name)
    for loop in reversed(outer):
        schedule.unroll(loop)
