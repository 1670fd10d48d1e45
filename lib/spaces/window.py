"""A space for windows that slide over images on CPUs, each channel by itself: depthwise convolutions and poolings.

Channels lie together in memory and fill vectors. A tile of neighbouring pixels by a few vectors is computed at once,
its window unrolled, so that what the windows of neighbours share is loaded once. There is little arithmetic for each
number that is read; what decides is where the padded image is made: before all else, by each task for itself, or not
at all, when the borders are looked for at each access.
"""

import math

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import SBlockRV, ScheduleError
from tvm.target import Target

from lib import structure
from lib.spaces import contraction, tiling
from lib.spaces.tiling import Registers
from lib.structure import Roles

_MAX_PIXELS, _MAX_VECTORS = 14, 4  # in a tile
_MAX_UNROLLED = 25  # positions of a window
_PADDINGS = ("before", "in task", "inline")


def fits(workload: tvm.IRModule, target: Target) -> bool:
    """Whether the space has programs of a workload: one such window, with element-wise blocks around it."""
    reductions = [block for block in structure.leaf_blocks(workload["main"]) if block.init is not None]
    found = structure.window_roles(reductions[0]) if len(reductions) == 1 else None
    if found is None:
        return False
    channels = int(reductions[0].iter_vars[found.columns].dom.extent)
    return tiling.lanes_for(channels, tiling.registers(target)) > 0


@derived_object
class SlidingWindow(ms.schedule_rule.PyScheduleRule):
    """Gives such a block a sketch for each place of the padding; leaves every other block alone."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Registers(0, 0)

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.machine = tiling.registers(context.target)

    def apply(self, schedule: Schedule, block: SBlockRV) -> list[Schedule]:
        """See `PyScheduleRule.apply`."""
        roles = structure.window_roles(schedule.get(block))
        if roles is None or len(schedule.get_loops(block)) != len(schedule.get(block).iter_vars):
            return [schedule]
        found = []
        for padding in _PADDINGS if schedule.get_producers(block) else _PADDINGS[:1]:
            sketch = schedule.copy()
            try:
                _sketch(sketch, block, roles, self.machine, padding)
            except ScheduleError:  # a neighbour that does not move: this space has no place for it
                continue
            found.append(sketch)
        return found or [schedule]

    def clone(self) -> "SlidingWindow":
        """Another one: TVM copies rules for each thread."""
        return SlidingWindow()


def _sketch(schedule: Schedule, block: SBlockRV, roles: Roles, machine: Registers, padding: str) -> None:
    producers = schedule.get_producers(block)
    if padding == "inline":
        for producer in producers:
            schedule.compute_inline(producer)
        producers = []
    loops = schedule.get_loops(block)
    result = contraction.epilogue(schedule, block)
    channels = tiling.extent_of(schedule, loops[roles.columns])
    lanes = tiling.lanes_for(channels, machine)
    vectors = [n for n in tiling.divisors(channels // lanes) if n <= _MAX_VECTORS]
    column, vector, lane = schedule.split(loops[roles.columns], [None, tiling.choice(schedule, vectors), lanes])
    columns_0, columns_1 = tiling.halves(schedule, column)
    *outer, line, last = [loops[n] for n in roles.rows]
    pixels = [n for n in tiling.divisors(tiling.extent_of(schedule, last)) if n <= _MAX_PIXELS]
    last, pixel = schedule.split(last, [None, tiling.choice(schedule, pixels)])
    lines_0, lines_1 = tiling.halves(schedule, line)
    window = [loops[n] for n in roles.reduction]
    tasks = [*outer, lines_0, columns_0]
    schedule.reorder(*tasks, lines_1, last, columns_1, *window, pixel, vector, lane)
    task = schedule.fuse(*tasks)
    schedule.parallel(task)
    schedule.vectorize(lane)
    unrolled = math.prod(tiling.extent_of(schedule, loop) for loop in window) <= _MAX_UNROLLED
    for loop in (*(window if unrolled else ()), pixel, vector):
        schedule.unroll(loop)
    schedule.reverse_compute_at(result, columns_1, preserve_unit_loops=True)
    tiling.vectorize_last(schedule, result, lanes)
    for producer in producers:
        contraction.pad(schedule, producer, task if padding == "in task" else None)
    initial = schedule.decompose_reduction(block, window[0])
    *_, pixel, vector, lane = schedule.get_loops(initial)
    schedule.vectorize(lane)
    schedule.unroll(vector)
    schedule.unroll(pixel)
