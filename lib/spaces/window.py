"""A space for windows that slide over images on CPUs, each channel by itself: depthwise convolutions and poolings.

Channels lie together in memory and fill vectors. A tile of neighbouring pixels by a few vectors is computed at once,
its window unrolled, so that what the windows of neighbours share is loaded once. There is little arithmetic for each
number that is read; what decides is where the padded image is made: before all else, by each task for itself, or not
at all, when the borders are looked for at each access.
"""

import math
from functools import partial

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from lib import structure
from lib.spaces import contraction, tiling
from lib.spaces.rule import tried
from lib.spaces.tiling import Registers
from lib.structure import Roles

_MAX_PIXELS, _MAX_VECTORS = 14, 4  # in a tile
_MAX_UNROLLED = 25  # positions of a window
_PADDINGS = ("before", "in task", "inline")


def fits(workload: tvm.IRModule, target: Target) -> bool:
    """Whether the space has programs of a workload: one such window, with element-wise blocks around it."""
    reduction = structure.only_reduction(workload["main"])
    found = structure.window_roles(reduction) if reduction else None
    if reduction is None or found is None:
        return False
    channels = int(reduction.iter_vars[found.columns].dom.extent)
    return tiling.lanes_for(channels, tiling.registers(target)) > 0


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """Of such a block, one for each place of the padding."""
    roles = structure.window_roles(schedule.get(block))
    if roles is None or len(schedule.get_loops(block)) != len(schedule.get(block).iter_vars):
        return []
    paddings = _PADDINGS if schedule.get_producers(block) else _PADDINGS[:1]
    ways = [partial(_sketch, block=block, roles=roles, machine=machine, padding=padding) for padding in paddings]
    return tried(schedule, ways)


def _sketch(schedule: Schedule, block: SBlockRV, roles: Roles, machine: Registers, padding: str) -> None:
    producers = schedule.get_producers(block)
    if padding == "inline":
        for producer in producers:
            schedule.compute_inline(producer)
        producers = []
    loops = schedule.get_loops(block)
    channels = tiling.extent_of(schedule, loops[roles.columns])
    lanes = tiling.lanes_for(channels, machine)
    result = contraction.epilogue(schedule, block, lanes)
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
