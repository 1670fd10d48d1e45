"""A space for sums over rows on CPUs: softmax, norms over the last axis, and what else reduces it.

MetaSchedule schedules each pass over a row apart, over all rows, through memory; and a sum that it does not happen to
split stays a chain of scalar additions, since floating-point sums may not be reordered by the compiler. Here a task
takes some rows, one after the other, each through all of its passes while it is in the nearest cache, and a row is
summed in as many partial sums as a vector has lanes.

    parallel (rows.0)
        rows.1
            each pass: columns in vectors; of a sum the lanes' sums, then their sum
"""

from collections.abc import Callable
from functools import partial

import tvm
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from lib import structure
from lib.spaces import tiling
from lib.spaces.rule import tried
from lib.spaces.tiling import Registers

_Vectorize = Callable[[Schedule, SBlockRV, int], None]
_READ_ONCE, _CHEAP = "read once", "cheap"  # passes that are not stored, but computed where they are read
_OPERATORS = ("add", "sub", "mul", "max", "min", "select", "copy", "broadcast", "slice", "reshape")  # cheap ones
_FEW = 4  # partial sums that are added one after the other
_SHORTEST = 2  # vectors in a row; shorter ones are no sum of vectors


def fits(workload: tvm.IRModule, target: Target) -> bool:
    """Whether the space has programs of a workload: all its blocks run over the same rows."""
    return _lanes(structure.leaf_blocks(workload["main"]), tiling.registers(target)) > 0


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """Of all blocks, when it comes to the last one, before any was inlined."""
    blocks = structure.leaf_blocks(schedule.mod["main"])
    lanes = _lanes(blocks, machine)
    if not lanes or str(schedule.get(block).name_hint) != str(blocks[-1].name_hint):
        return []
    ways = [partial(_sketch, blocks=blocks, lanes=lanes, inlined=inlined) for inlined in (_READ_ONCE, _CHEAP)]
    return tried(schedule, ways)


def _lanes(blocks: list[SBlock], machine: Registers) -> int:
    """How many numbers of a row are taken at once; 0 if the blocks are no passes over rows."""
    sums = [structure.row_extents(block) for block in blocks if block.init is not None]
    if not sums or None in sums or len(set(sums)) != 1 or sums[0] is None:
        return 0
    *rows, columns = sums[0]
    if not rows:
        return 0
    for block in blocks:
        extents = [int(axis.dom.extent) for axis in block.iter_vars]
        if extents not in (rows, [*rows, columns]):
            return 0
    lanes = tiling.lanes_for(columns, machine)
    return lanes if columns >= _SHORTEST * lanes else 0


def _sketch(schedule: Schedule, blocks: list[SBlock], lanes: int, inlined: str) -> None:
    n_rows = next(len(block.iter_vars) - 1 for block in blocks if block.init is not None)
    passes: list[SBlockRV] = []
    for block in [schedule.get_sblock(block.name_hint) for block in reversed(blocks)]:
        if _may_be_inlined(schedule, block, n_rows, inlined):
            schedule.compute_inline(block)
        else:
            passes.insert(0, block)
    parts = [part for block in passes for part in _parts(schedule, block, n_rows, lanes)]
    *before, (last, _) = parts
    rows_0, rows_1 = tiling.halves(schedule, schedule.fuse(*schedule.get_loops(last)[:n_rows]))
    schedule.parallel(rows_0)
    for block, _ in reversed(before):
        schedule.compute_at(block, rows_1, preserve_unit_loops=True)
    for block, vectorize in parts:
        vectorize(schedule, block, lanes)


def _may_be_inlined(schedule: Schedule, block: SBlockRV, n_rows: int, inlined: str) -> bool:
    """Whether a pass over columns need not be stored: it is read once, or as well computed again."""
    found, n_readers = schedule.get(block), len(schedule.get_consumers(block))
    if found.init is not None or len(found.iter_vars) == n_rows or not n_readers:
        return False
    return n_readers == 1 or (inlined == _CHEAP and structure.operator(found) in _OPERATORS)


def _parts(schedule: Schedule, block: SBlockRV, n_rows: int, lanes: int) -> list[tuple[SBlockRV, _Vectorize]]:
    """A pass with how it is vectorised; of a sum two, of each lane and of all lanes."""
    found = schedule.get(block)
    if found.init is None:
        return [(block, tiling.vectorize_last if len(found.iter_vars) > n_rows else _as_it_is)]
    parts: list[tuple[SBlockRV, _Vectorize]] = []
    for width in dict.fromkeys((lanes, _FEW)):  # one lane after the other would be a chain of so many additions
        _, lane = schedule.split(schedule.get_loops(block)[-1], [None, width])
        parts.append((schedule.rfactor(lane, n_rows), _sum_lanes))
    return [*parts, (block, _sum_of_few)]


def _as_it_is(_schedule: Schedule, _block: SBlockRV, _lanes: int) -> None:
    """One number a row."""


def _sum_lanes(schedule: Schedule, block: SBlockRV, _lanes: int) -> None:
    found = schedule.get(block)
    loops = schedule.get_loops(block)[-len(found.iter_vars) :]  # one an axis, since the block was moved
    step, lane = loops[structure.summed_axes(found)[0]], loops[structure.last_axis(found)]
    schedule.reorder(step, lane)
    schedule.vectorize(lane)
    initial = schedule.decompose_reduction(block, step)
    schedule.vectorize(schedule.get_loops(initial)[-1])


def _sum_of_few(schedule: Schedule, block: SBlockRV, _lanes: int) -> None:
    [lane] = [loop for loop in schedule.get_loops(block)[2:] if tiling.extent_of(schedule, loop) == _FEW]
    schedule.unroll(lane)
    schedule.decompose_reduction(block, lane)
