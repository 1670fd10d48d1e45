"""A space for attention in one program (`lib.tir.attention`) on CPUs: whole rows in tasks, or block after block.

    parallel (batch, heads, rows.0)
        the scores of rows.1, in register tiles; largest ones; weights; their sums
        the context of rows.1, in register tiles

So scores stay in the cache of a core. How many rows a task has is a choice between that and how often keys and values
are read. The other sketches are what three kernels would do: all scores, then all weights, then all context, each in
parallel loops of its own. Which is faster is measured, not assumed: where all scores fit the caches anyway, both are
near one another.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import tvm
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from lib.machine.dots import Dot
from lib.machine.registers import Registers, narrowed, registers
from lib.search.spaces import primitives, tiling
from lib.search.spaces.microkernel import tile_contraction, tile_in_task
from lib.search.spaces.roles import Roles, contraction_roles
from lib.search.spaces.space import feasible
from lib.search.spaces.tiling import Image, Tile
from lib.tir import analysis, parallel
from lib.tir.attention import BLOCKS, CONTEXT, LANE_MAXIMA, LANE_SUMS, LOGITS, MAXIMA, RESULT, SCORES, SUMS, WEIGHTS

_ROWS = range(8, 129)  # of a task, if they divide all; all rows of a head, if there are no such
_TOGETHER = (4, 5, 3, 2, 1)  # rows whose largest scores, and sums of weights, are found at a time
_MOST = 3  # numbers of rows, and tiles of a product, to choose from


def fits(workload: tvm.IRModule, target: Target) -> bool:
    """Whether a workload is such a program, and its heads have whole vectors."""
    blocks = {str(block.name_hint): block for block in analysis.leaf_blocks(workload["main"])}
    if not all(name in blocks for name in BLOCKS):
        return False
    machine = registers(target)
    return all(_tiles(blocks[name], _extents(blocks[name])[0], machine) for name in (SCORES, CONTEXT))


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """When it comes to the last block of all: for some numbers of rows and tiles of both products, those in tasks, and
    block after block."""
    blocks = {str(each.name_hint): each for each in analysis.leaf_blocks(schedule.mod["main"])}
    if str(schedule.get(block).name_hint) != list(blocks)[-1]:
        return []
    n_rows = _extents(blocks[SCORES])[0]
    in_tasks = [
        partial(_in_tasks, rows=rows, tiles=(scores, context))
        for rows in _rows_of_a_task(n_rows, partial(_efficiency, blocks, machine))
        for scores in _tiles(blocks[SCORES], rows, machine)
        for context in _tiles(blocks[CONTEXT], rows, machine)
    ]
    apart = [
        partial(_apart, tiles=(scores, context))
        for scores in _tiles(blocks[SCORES], n_rows, machine)
        for context in _tiles(blocks[CONTEXT], n_rows, machine)
    ]
    return feasible(schedule, [*in_tasks, *apart])


def _extents(block: SBlock) -> tuple[int, int]:
    """Rows and columns of a product."""
    roles = _roles(block)
    extents = [int(axis.dom.extent) for axis in block.iter_vars]
    return extents[roles.rows[0]], extents[roles.columns]


def _roles(block: SBlock) -> Roles:
    roles = contraction_roles(block)
    assert roles is not None, f"the block {block.name_hint} is a product"
    return roles


def _rows_of_a_task(n_rows: int, efficiency: Callable[[int], float]) -> list[int]:
    """Those whose register tiles are the best ones, of a number of rows."""
    fitting = [rows for rows in tiling.divisors(n_rows) if rows in _ROWS]
    return sorted(fitting, key=lambda rows: (-round(efficiency(rows), 2), -rows))[:_MOST] or [n_rows]


def _efficiency(blocks: dict[str, SBlock], machine: Registers, rows: int) -> float:
    """Estimated, of both products in a task of so many rows: the smaller one."""
    return min(tiling.best_efficiency(rows, _extents(blocks[name])[1], machine) for name in (SCORES, CONTEXT))


def _tiles(block: SBlock, rows: int, machine: Registers) -> list[Tile]:
    """The register tiles of a product with so many rows."""
    columns = _extents(block)[1]
    dot = _dot(block, machine)
    if matrix := machine.matrix(dot):
        turns = int(block.iter_vars[_roles(block).reduction[-1]].dom.extent)
        if found := tiling.matrix_tiles(Image(1, rows, is_even=False), columns, turns // matrix.dot.depth, matrix):
            return found[:_MOST]
    found = tiling.tiles(rows, columns, machine, remainders=True)
    return [replace(tile, dot=dot) for tile in found if columns % tile.lanes == 0][:_MOST]


def _dot(block: SBlock, machine: Registers) -> Dot | None:
    """The instruction whose order the second factor has."""
    operands = analysis.weight_and_data(block)
    assert operands is not None
    kind = str(operands[0].source.dtype)
    return next((dot for dot in machine.dots if dot.weights == kind), None)


def _in_tasks(schedule: Schedule, rows: int, tiles: tuple[Tile, Tile]) -> None:
    """All blocks in one loop over tasks, of so many rows."""
    scores, logits, context = (schedule.get_sblock(name) for name in (SCORES, LOGITS, CONTEXT))
    roles = [_roles(schedule.get(block)) for block in (scores, context)]
    results = _last(schedule)
    task = _tasks(schedule, results, roles[1].rows[0], rows)
    copy = schedule.cache_write(context, 0, "local")
    for block in (copy, context):
        schedule.compute_at(block, task, preserve_unit_loops=True)
    for name in (SUMS, LANE_SUMS, WEIGHTS, MAXIMA, LANE_MAXIMA, LOGITS, SCORES):
        schedule.compute_at(schedule.get_sblock(name), task, preserve_unit_loops=True)
    schedule.set_scope(scores, 0, "local")
    tile_in_task(schedule, context, copy, tiles[1], roles[1])
    tile_in_task(schedule, scores, logits, tiles[0], roles[0])
    _vectorize(schedule, results, tiles, together=_TOGETHER)


def _apart(schedule: Schedule, tiles: tuple[Tile, Tile]) -> None:
    """Scores, weights and context in loops of their own, one after the other."""
    scores, logits, context = (schedule.get_sblock(name) for name in (SCORES, LOGITS, CONTEXT))
    roles = [_roles(schedule.get(block)) for block in (scores, context)]
    results = _last(schedule)
    schedule.set_scope(scores, 0, "local")
    copy = schedule.cache_write(context, 0, "local")
    tile_contraction(schedule, scores, roles[0], tiles[0], results=logits)
    tile_contraction(schedule, context, roles[1], tiles[1], results=copy)
    schedule.parallel(schedule.fuse(*schedule.get_loops(results)[:-1]))
    blocks = [schedule.get_sblock(name) for name in (LANE_MAXIMA, MAXIMA, WEIGHTS, LANE_SUMS, SUMS)]
    _vectorize(schedule, results, tiles)
    # Row by row: `merge`, since consumers that reduce vectors cannot be moved to their producers.
    rows = [schedule.fuse(*schedule.get_loops(block)[:3]) for block in blocks]
    factors = primitives.sampled_factors(schedule, rows[-1])
    schedule.merge(*(schedule.split(row, factors)[1] for row in rows))
    schedule.annotate(schedule.get_loops(blocks[-1])[0], parallel.MARK, 1)


def _last(schedule: Schedule) -> SBlockRV:
    """The block that writes the results, with all that follows the division inlined into it."""
    block = schedule.get_sblock(RESULT)
    while following := schedule.get_consumers(block):
        schedule.compute_inline(block)
        [block] = following
    return block


def _tasks(schedule: Schedule, results: SBlockRV, axis: int, rows: int) -> LoopRV:
    """The parallel loop over tasks around the results of so many rows, which an axis is over."""
    loops = list(schedule.get_loops(results))
    task, row = schedule.split(loops.pop(axis), [None, rows])
    *outer, last = loops
    schedule.reorder(*outer, task, row, last)
    tasks = schedule.fuse(*outer, task)
    schedule.parallel(tasks)
    return tasks


def _vectorize(
    schedule: Schedule, results: SBlockRV, tiles: tuple[Tile, Tile], together: Sequence[int] = (1,)
) -> None:  # fmt: skip
    """What is not in a register tile: weights and results by columns, reductions by lane.

    Args:
        together: Of how many rows reductions are computed at a time: the first number that divides those of a task. The
            steps of one row wait for one another.
    """
    primitives.vectorize_last(schedule, schedule.get_sblock(WEIGHTS), tiles[0].lanes)
    size = primitives.columns_of(schedule, results)
    primitives.vectorize_last(schedule, results, narrowed(tiles[1].lanes, size))
    for name in (LANE_MAXIMA, LANE_SUMS):
        block = schedule.get_sblock(name)
        row, lane, step = schedule.get_loops(block)[-3:]
        n_rows = primitives.extent_of(schedule, row)
        if (few := next(n for n in together if n_rows % n == 0)) > 1:
            _, row = schedule.split(row, [None, few])
            schedule.reorder(step, row, lane)
            schedule.unroll(row)
        else:
            schedule.reorder(step, lane)
        schedule.vectorize(lane)
        initial = schedule.decompose_reduction(block, step)
        schedule.vectorize(schedule.get_loops(initial)[-1])
