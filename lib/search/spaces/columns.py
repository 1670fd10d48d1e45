"""A space for reductions over lines on CPUs: means over an image for each channel, as global pooling has them.

What is reduced is not contiguous, what is left is: vectors of channels are accumulated over all lines of the image.
Tasks share channels out. Where these are few, parts of the image are reduced side by side, and then together.

    parallel (parts, channels.0)                               parts: none, or some (rfactor)
        lines, vectors (unrolled), lanes (vectorised)
        the epilogue

Where vectors leave channels over, those are computed in a shorter vector, apart (`lib.tir.remainder`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import tirx
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV, ScheduleError
from tvm.target import Target

from lib.machine.registers import Registers, registers
from lib.search.spaces import primitives, tiling
from lib.search.spaces.space import feasible
from lib.tir import analysis, remainder

_MAX_VECTORS = 8  # accumulators: enough to hide the latency of an addition
_LEAST = 2  # vectors; of fewer, what is left over is a large part
_PARTS = (2, 4, 7, 8, 14, 16, 28, 32)  # of an image


def fits(workload: tvm.IRModule, target: Target) -> bool:
    """Whether a workload is one such reduction, with element-wise blocks around it, of channels that fill vectors."""
    reduction = analysis.only_reduction(workload["main"])
    return reduction is not None and _lanes(reduction, registers(target)) > 0


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """Of such a block, one over the whole image, and one over parts of it; blocks before it were inlined."""
    lanes = _lanes(schedule.get(block), machine)
    if not lanes or len(schedule.get_loops(block)) != len(schedule.get(block).iter_vars):
        return []
    return feasible(schedule, [partial(form, block=block, lanes=lanes) for form in (_whole, _in_parts)])


def _lanes(block: SBlock, machine: Registers) -> int:
    """Lanes of the vectors that the last axis is taken in; 0 if the block is another one."""
    store = analysis.stored(block)
    if block.init is None or len(analysis.walk(block.body, tirx.BufferStore)) > 2:
        return 0
    if not isinstance(store.value, (tirx.Add, tirx.Max, tirx.Min)) or analysis.factors(block) is not None:
        return 0
    reduced = {block.iter_vars[n].var for n in analysis.reduction_axes(block)}
    axes, column = [axis.var for axis in block.iter_vars], store.indices[-1]
    loads = [load for load in analysis.loaded(store) if reduced & analysis.variables(load.indices)]
    if not loads or column not in axes or not all(load.indices[-1].same_as(column) for load in loads):
        return 0
    channels = analysis.extents(block)[column]
    lanes = tiling.lanes_for(channels, machine)
    return machine.lanes if lanes <= machine.lanes // 4 and channels >= _LEAST * machine.lanes else lanes


@dataclass(frozen=True, slots=True)
class _Loops:
    """Around a reduction, by what they run over."""

    outer: Sequence[LoopRV]  # results, but for their channels
    channels: LoopRV
    lines: Sequence[LoopRV]  # what is reduced


def _whole(schedule: Schedule, block: SBlockRV, lanes: int) -> None:
    if schedule.get_producers(block):
        raise ScheduleError("something is computed before")
    found, loops = schedule.get(block), schedule.get_loops(block)
    last = analysis.last_axis(found)
    outer = [loops[n] for n in analysis.spatial_axes(found) if n != last]
    around = _Loops(outer, loops[last], [loops[n] for n in analysis.reduction_axes(found)])
    _accumulate(schedule, block, around, lanes, primitives.epilogue(schedule, block, lanes))


def _in_parts(schedule: Schedule, block: SBlockRV, lanes: int) -> None:
    found, loops = schedule.get(block), schedule.get_loops(block)
    spatial, last, first = analysis.spatial_axes(found), analysis.last_axis(found), analysis.reduction_axes(found)[0]
    numbers = [n for n in _PARTS if primitives.extent_of(schedule, loops[first]) % n == 0]
    leaves_some = primitives.extent_of(schedule, loops[last]) % lanes
    if not numbers or leaves_some or schedule.get_producers(block) or max(spatial) > first:
        raise ScheduleError("an image that is not cut")
    part, _ = schedule.split(loops[first], [primitives.sampled_choice(schedule, numbers), None])
    of_part = schedule.rfactor(part, 0)
    for reduction in (of_part, block):  # the axes of both are in other orders than their loops from here on
        loops = schedule.get_loops(reduction)
        outer, lines = [loops[n] for n in spatial if n != last], loops[first:]
        if reduction is of_part:
            outer, lines = [lines[0], *outer], lines[1:]
            results = schedule.cache_write(of_part, 0, "local")
        else:
            results = primitives.epilogue(schedule, block, lanes)
        _accumulate(schedule, reduction, _Loops(outer, loops[last], lines), lanes, results)


def _accumulate(schedule: Schedule, block: SBlockRV, loops: _Loops, lanes: int, results: SBlockRV) -> None:
    """Tile a reduction, whose accumulators have the scope `local`, with what reads them."""
    n_channels = primitives.extent_of(schedule, loops.channels)
    vectors = _vectors(n_channels, lanes)
    factors = [None, primitives.sampled_choice(schedule, vectors), lanes]
    channels, vector, lane = schedule.split(loops.channels, factors)
    schedule.reorder(*loops.outer, channels, *loops.lines, vector, lane)
    task = schedule.fuse(*loops.outer, channels)
    if n_channels % lanes:
        schedule.annotate(task, remainder.MARK, 1)
    schedule.parallel(task)
    schedule.vectorize(lane)
    schedule.unroll(vector)
    schedule.reverse_compute_at(results, task, preserve_unit_loops=True)
    primitives.vectorize_last(schedule, results, lanes)
    initial = schedule.decompose_reduction(block, loops.lines[0])
    primitives.set_to_zero(schedule, initial, n_loops=2)


def _vectors(channels: int, lanes: int) -> list[int]:
    """Numbers of vectors to choose from; where they leave channels over, in the last tile."""
    if channels % lanes == 0:
        return [n for n in tiling.divisors(channels // lanes) if n <= _MAX_VECTORS]
    most = min(_MAX_VECTORS, channels // lanes)
    return [n for n in range(1, most + 1) if tiling.has_vectors(channels % (n * lanes), lanes)]
