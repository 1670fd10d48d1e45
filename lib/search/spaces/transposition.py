"""A space for transpositions and channel shuffles on CPUs: blocked, so that whole cache lines are read and written.

What is contiguous in the result is strided in the source. A loop over whole rows of the one takes one element of each
cache line of the other, which is evicted before the next is due. In a tile all elements of a line are used. Which of
the two sides is vectorised, and how large a tile is, is left to the search.
"""

from functools import partial

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV, ScheduleError
from tvm.target import Target

from lib.machine.registers import Registers
from lib.search.spaces import primitives, tiling
from lib.search.spaces.roles import period, side_by_side, transposed
from lib.search.spaces.space import feasible
from lib.tir import analysis

_SIDES = range(4, 18)  # of a tile, in elements; tiles are unrolled


def fits(workload: tvm.IRModule, _target: Target) -> bool:
    """Whether a workload, inlined into one block, makes another axis of a tensor the contiguous one."""
    schedule = Schedule(workload, debug_mask="none")
    *before, last = [schedule.get_sblock(block.name_hint) for block in analysis.leaf_blocks(workload["main"])]
    if any(schedule.get(block).init is not None for block in (*before, last)):
        return False
    try:
        for block in before:
            schedule.compute_inline(block)
    except ScheduleError:
        return False
    return transposed(schedule.get(last)) is not None


def sketches(schedule: Schedule, block: SBlockRV, _machine: Registers) -> list[Schedule]:
    """Of such a block, one with vectors along each side of the tile; all other blocks were inlined before."""
    axis = transposed(schedule.get(block))
    if axis is None or schedule.get_producers(block) or schedule.get_consumers(block):
        return []
    transforms = [partial(_sketch, block=block, source_axis=axis, loads_vectors=loads) for loads in (False, True)]
    return feasible(schedule, transforms)


def _sketch(schedule: Schedule, block: SBlockRV, source_axis: int, *, loads_vectors: bool) -> None:
    loops, length = list(schedule.get_loops(block)), period(schedule.get(block))
    together = [loops.pop()] if side_by_side(schedule.get(block)) > 1 else []
    if source_axis == len(loops):  # stretches of the last axis
        *loops, last = loops
        source, result = schedule.split(last, [None, length])
    else:
        source, result = loops.pop(source_axis), loops.pop()
    source_0, source_1 = schedule.split(source, [None, _side(schedule, source)])
    result_0, result_1 = schedule.split(result, [None, _side(schedule, result)])
    unrolled, vector = (result_1, source_1) if loads_vectors else (source_1, result_1)
    schedule.reorder(*loops, source_0, result_0, unrolled, vector, *together)
    schedule.parallel(schedule.fuse(*loops, source_0, result_0))
    schedule.unroll(unrolled)
    if together:  # they are moved as one
        schedule.unroll(vector)
        [vector] = together
    schedule.vectorize(vector)


def _side(schedule: Schedule, loop: LoopRV) -> ExprRV:
    sides = tiling.divisors(primitives.extent_of(schedule, loop))
    fitting = [n for n in sides if n in _SIDES] or [max(n for n in sides if n <= _SIDES[-1])]
    return primitives.sampled_choice(schedule, fitting)
