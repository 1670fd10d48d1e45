"""A space for transpositions and channel shuffles on CPUs: tiles in which what is read and what is written share cache
lines.

What lies together in the result lies apart in what is read. Through whole rows of the one, each number of the other is
in another cache line, gone before its neighbour is wanted. In a tile all lines are used up. Which of the two sides is
taken in vectors, and how large a tile is, is left to the search.
"""

from functools import partial

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV, ScheduleError
from tvm.target import Target

from lib import structure
from lib.spaces import tiling
from lib.spaces.rule import tried
from lib.spaces.tiling import Registers

_SIDES = range(4, 18)  # of a tile, in numbers; each is moved by instructions of its own


def fits(workload: tvm.IRModule, _target: Target) -> bool:
    """Whether a workload, all in one block, moves a tensor so that other numbers lie together."""
    schedule = Schedule(workload, debug_mask="none")
    *before, last = [schedule.get_sblock(block.name_hint) for block in structure.leaf_blocks(workload["main"])]
    if any(schedule.get(block).init is not None for block in (*before, last)):
        return False
    try:
        for block in before:
            schedule.compute_inline(block)
    except ScheduleError:
        return False
    return structure.transposed(schedule.get(last)) is not None


def sketches(schedule: Schedule, block: SBlockRV, _machine: Registers) -> list[Schedule]:
    """Of such a block, one for each side that may be taken in vectors; all other blocks were inlined before."""
    read = structure.transposed(schedule.get(block))
    if read is None or schedule.get_producers(block) or schedule.get_consumers(block):
        return []
    return tried(schedule, [partial(_sketch, block=block, read=read, reads_vectors=side) for side in (False, True)])


def _sketch(schedule: Schedule, block: SBlockRV, read: int, *, reads_vectors: bool) -> None:
    loops, length = schedule.get_loops(block), structure.period(schedule.get(block))
    if read == len(loops):  # stretches of the last axis
        *loops, last = loops
        source, result = schedule.split(last, [None, length])
    else:
        source, result = loops.pop(read), loops.pop()
    source_0, source_1 = schedule.split(source, [None, _side(schedule, source)])
    result_0, result_1 = schedule.split(result, [None, _side(schedule, result)])
    unrolled, vector = (result_1, source_1) if reads_vectors else (source_1, result_1)
    schedule.reorder(*loops, source_0, result_0, unrolled, vector)
    schedule.parallel(schedule.fuse(*loops, source_0, result_0))
    schedule.unroll(unrolled)
    schedule.vectorize(vector)


def _side(schedule: Schedule, loop: LoopRV) -> ExprRV:
    sides = tiling.divisors(tiling.extent_of(schedule, loop))
    return tiling.choice(schedule, [n for n in sides if n in _SIDES] or [max(n for n in sides if n <= _SIDES[-1])])
