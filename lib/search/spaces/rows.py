"""A space for reductions over rows on CPUs: softmax, norms over the last axis, and what else reduces it.

MetaSchedule gives each block a loop nest of its own, over all rows, with results that pass through memory; and a
reduction that it does not happen to split stays a chain of scalar additions, since a compiler may not reorder sums of
floats. Here a parallel task takes some rows, one after the other, each through all of its blocks while it is in L1, and
a row is reduced to one partial result for each lane of a vector first.

    parallel (rows.0)
        rows.1
            each block: columns in vectors; reductions by lane (rfactor), then over the lanes

Where vectors leave columns over, those are computed in a shorter vector, apart (`lib.tir.remainder`).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import tvm
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from lib.machine.registers import Registers, registers
from lib.search.spaces import primitives, tiling
from lib.search.spaces.roles import row_extents
from lib.search.spaces.space import feasible
from lib.tir import analysis, parallel, remainder
from lib.tir.operators import operator

_Vectorize = Callable[[Schedule, SBlockRV, int], None]
_READ_ONCE, _CHEAP = "read once", "cheap"  # blocks that are inlined: those with one reader, or cheap ones, too
_OPERATORS = ("add", "sub", "mul", "max", "min", "select", "copy", "broadcast", "slice", "reshape")  # cheap ones
_FEW = 4  # partial results that are reduced one after the other
_SHORTEST = 2  # vectors in a row; shorter ones are not reduced by lane


def fits(workload: tvm.IRModule, target: Target) -> bool:
    """Whether the space has programs of a workload: all its blocks run over the same rows."""
    return _lanes(analysis.leaf_blocks(workload["main"]), registers(target)) > 0


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """Of all blocks, when it comes to the last one, before any was inlined."""
    blocks = analysis.leaf_blocks(schedule.mod["main"])
    lanes = _lanes(blocks, machine)
    if not lanes or str(schedule.get(block).name_hint) != str(blocks[-1].name_hint):
        return []
    transforms = [partial(_sketch, blocks=blocks, lanes=lanes, inlined=inlined) for inlined in (_READ_ONCE, _CHEAP)]
    return feasible(schedule, transforms)


def _lanes(blocks: list[SBlock], machine: Registers) -> int:
    """Lanes of the vectors that a row is taken in; 0 if the blocks do not all run over the same rows."""
    found = [row_extents(block) for block in blocks if block.init is not None]
    if None in found or len({_longer(extents) for extents in found if extents}) != 1:
        return 0
    *rows, columns = next(extents for extents in found if extents)
    if not rows:
        return 0
    for block in blocks:
        if _longer(analysis.extents(block).values()) not in (_longer(rows), _longer([*rows, columns])):
            return 0
    lanes, widest = tiling.lanes_for(columns, machine), machine.lanes
    if widest <= columns < _SHORTEST * widest and widest > _FEW:
        widest //= 2
    if not widest // 4 < lanes <= widest and columns >= _SHORTEST * widest:
        return widest  # and a remainder, if it does not divide them
    return lanes if columns >= _SHORTEST * lanes else 0


def _longer(extents: Iterable[int]) -> tuple[int, ...]:
    """Without those of 1, as reductions leave them that keep the rank."""
    return tuple(extent for extent in extents if extent > 1)


def _rows_of(block: SBlock, n_rows: int) -> int:
    """How many axes of a block are rows: the first ones, with `n_rows` longer than 1 among them."""
    extents = list(analysis.extents(block).values())
    return next((n for n in range(len(extents)) if len(_longer(extents[: n + 1])) > n_rows), len(extents))


def _sketch(schedule: Schedule, blocks: list[SBlock], lanes: int, inlined: str) -> None:
    reduction = next(block for block in blocks if block.init is not None)
    n_rows = len(_longer(analysis.extents(reduction).values())) - 1
    kept: list[SBlockRV] = []
    for block in [schedule.get_sblock(block.name_hint) for block in reversed(blocks)]:
        if _may_be_inlined(schedule, block, n_rows, inlined):
            schedule.compute_inline(block)
        else:
            kept.insert(0, block)
    if any(_leaves_some(schedule.get(block), lanes) for block in kept):
        _merge_rows(schedule, kept, n_rows, lanes)
        return
    parts = [part for block in kept for part in _parts(schedule, block, n_rows, lanes)]
    *before, (last, _) = parts
    n_loops = _rows_of(schedule.get(kept[-1]), n_rows)
    rows_0, rows_1 = primitives.sampled_split(schedule, schedule.fuse(*schedule.get_loops(last)[:n_loops]))
    schedule.parallel(rows_0)
    for block, _ in reversed(before):
        schedule.compute_at(block, rows_1, preserve_unit_loops=True)
    for block, vectorize in parts:
        vectorize(schedule, block, lanes)


def _merge_rows(schedule: Schedule, blocks: Sequence[SBlockRV], n_rows: int, lanes: int) -> None:
    """Have blocks whose vectors leave columns over in one loop over rows.

    `compute_at` would drop the predicates of reductions, without an error (TVM 0.27), and once another block changes,
    TVM no longer takes those with predicates for reductions: so each is taken to its end first, and moved after.
    """
    reductions = [block for block in blocks if schedule.get(block).init is not None]
    n_loops = {block: _rows_of(schedule.get(block), n_rows) for block in blocks}
    parts = {block: _reduced_apart(schedule, block, n_loops[block], lanes) for block in reductions}
    for block in blocks:
        if block not in parts and len(schedule.get(block).iter_vars) > n_loops[block]:
            _vectorize_columns(schedule, block, lanes)
    in_order = [(part, n_loops[block]) for block in blocks for part in parts.get(block, [block])]
    fused = [schedule.fuse(*schedule.get_loops(part)[:n]) for part, n in in_order]
    factors = primitives.sampled_factors(schedule, fused[-1])
    schedule.merge(*(schedule.split(loop, factors)[1] for loop in fused))
    schedule.annotate(schedule.get_loops(in_order[-1][0])[0], parallel.MARK, 1)


def _reduced_apart(schedule: Schedule, block: SBlockRV, n_rows: int, lanes: int) -> list[SBlockRV]:
    """The parts of a reduction, by lane and over the lanes, in loops of their own."""
    parts = []
    for width in _widths(lanes):
        _, lane = schedule.split(schedule.get_loops(block)[-1], [None, width])
        part = schedule.rfactor(lane, n_rows)
        step, lane = schedule.get_loops(part)[-2:]
        _vectorize_lane(schedule, part, step, lane)
        schedule.annotate(step, remainder.MARK, 1)
        parts.append(part)
    lane = schedule.get_loops(block)[-1]
    schedule.unroll(lane)
    schedule.decompose_reduction(block, lane)
    return [*parts, block]


def _vectorize_columns(schedule: Schedule, block: SBlockRV, lanes: int) -> None:
    vectors, lane = schedule.split(schedule.get_loops(block)[-1], [None, lanes])
    schedule.vectorize(lane)
    schedule.annotate(vectors, remainder.MARK, 1)


def _leaves_some(block: SBlock, lanes: int) -> bool:
    """Whether a block reduces columns of which vectors leave some over."""
    return block.init is not None and int(block.iter_vars[-1].dom.extent) % lanes != 0


def _may_be_inlined(schedule: Schedule, block: SBlockRV, n_rows: int, inlined: str) -> bool:
    """Whether a block over columns need not be stored: one block reads it, or it is as cheap to compute it again."""
    found, n_readers = schedule.get(block), len(schedule.get_consumers(block))
    if found.init is not None or len(found.iter_vars) == _rows_of(found, n_rows) or not n_readers:
        return False
    return n_readers == 1 or (inlined == _CHEAP and operator(found) in _OPERATORS)


def _parts(schedule: Schedule, block: SBlockRV, n_rows: int, lanes: int) -> list[tuple[SBlockRV, _Vectorize]]:
    """A block with how it is vectorised; of a reduction its parts, by lane and over the lanes."""
    found = schedule.get(block)
    n_rows = _rows_of(found, n_rows)
    if found.init is None:
        return [(block, primitives.vectorize_last if len(found.iter_vars) > n_rows else _as_it_is)]
    parts: list[tuple[SBlockRV, _Vectorize]] = []
    for width in _widths(lanes):
        _, lane = schedule.split(schedule.get_loops(block)[-1], [None, width])
        parts.append((schedule.rfactor(lane, n_rows), _reduce_by_lane))
    return [*parts, (block, _reduce_few)]


def _widths(lanes: int) -> list[int]:
    """Partial results of a reduction, step by step: all lanes in one step would be a chain of as many operations.

    Never more than the step before: `rfactor` would drop the predicate, and read what nobody wrote (TVM 0.27).
    """
    return list(dict.fromkeys((lanes, min(lanes, _FEW))))


def _as_it_is(_schedule: Schedule, _block: SBlockRV, _lanes: int) -> None:
    """One element a row: nothing to vectorise."""


def _reduce_by_lane(schedule: Schedule, block: SBlockRV, _lanes: int) -> None:
    found = schedule.get(block)
    loops = schedule.get_loops(block)[-len(found.iter_vars) :]  # one an axis, since the block was moved
    step, lane = loops[analysis.reduction_axes(found)[0]], loops[analysis.last_axis(found)]
    schedule.reorder(step, lane)
    _vectorize_lane(schedule, block, step, lane)


def _vectorize_lane(schedule: Schedule, block: SBlockRV, step: LoopRV, lane: LoopRV) -> None:
    schedule.vectorize(lane)
    initial = schedule.decompose_reduction(block, step)
    schedule.vectorize(schedule.get_loops(initial)[-1])


def _reduce_few(schedule: Schedule, block: SBlockRV, lanes: int) -> None:
    few = _widths(lanes)[-1]
    [lane] = [loop for loop in schedule.get_loops(block)[2:] if primitives.extent_of(schedule, loop) == few]
    schedule.unroll(lane)
    schedule.decompose_reduction(block, lane)
