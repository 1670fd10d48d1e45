"""A space for windows that slide over images on CPUs, each channel by itself: depthwise convolutions and poolings.

In NHWC, channels are contiguous and fill vectors. A register tile of neighbouring pixels by a few vectors is computed
at once, its window unrolled, so that what the windows of neighbours share is loaded once. There is little arithmetic
for each element that is loaded; what decides is where the padded image is computed: before all else, by each parallel
task for itself, or not at all, with the border checked at each access.

Of bytes, lines may have been brought side by side in words (`lib.graph.words`): these are made in each task, line by
line, and an instruction multiplies the four bytes of each.
"""

import math
from collections.abc import Sequence
from functools import partial

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from lib.machine.dots import INT8
from lib.machine.registers import Registers, narrowed, registers
from lib.search.spaces import primitives, tiling
from lib.search.spaces.roles import Roles, window_roles
from lib.search.spaces.space import feasible
from lib.tir import analysis, dot, remainder

MAX_PIXELS, MAX_VECTORS = 14, 4  # in a register tile
_FEWEST_LANES = 8  # of vectors that fill the channels; else they are long, and the last begins earlier or is shorter
MAX_UNROLLED = 27  # positions of a window
_BEFORE, _IN_TASK, _INLINE = "before", "in task", "inline"  # places to compute the padding


def fits(workload: tvm.IRModule, target: Target, words: bool = False) -> bool:
    """Whether the space has programs of a workload: one such window, with element-wise blocks around it, and several
    channels; of words, channels that fill vectors.

    Args:
        words: Windows over words alone, or over all else.
    """
    channels = _channels(workload, words)
    return channels > 0 and _lanes(channels, registers(target), words) > 1


def packs_weights(workload: tvm.IRModule, target: Target) -> bool:
    """Whether RewriteLayout can bring weights into the order of all programs: it knows no vectors that overlap, as the
    last ones of channels that fill none do."""
    channels = _channels(workload, words=False)
    return channels % _lanes(channels, registers(target), words=False) == 0


def _channels(workload: tvm.IRModule, words: bool) -> int:
    """Of what windows slide over; 0 if a workload is something else."""
    reduction = analysis.only_reduction(workload["main"])
    roles = window_roles(reduction) if reduction else None
    if reduction is None or roles is None or analysis.of_words(reduction) != words:
        return 0
    return int(reduction.iter_vars[roles.columns].dom.extent)


def _lanes(channels: int, machine: Registers, words: bool) -> int:
    """Lanes of vectors of channels: as many as fill them, or where these are few, of all but the last vector."""
    lanes = narrowed(machine.lanes, channels)
    if words or lanes >= min(_FEWEST_LANES, machine.lanes):
        return lanes
    return min(machine.lanes, 1 << channels.bit_length() - 1)


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """Of such a block, one for each place to compute the padding."""
    roles = window_roles(schedule.get(block))
    if roles is None or len(schedule.get_loops(block)) != len(schedule.get(block).iter_vars):
        return []
    paddings = (_BEFORE, _IN_TASK, _INLINE) if _producers(schedule, block)[1] else (_BEFORE,)
    transforms = [partial(_sketch, block=block, roles=roles, machine=machine, padding=padding) for padding in paddings]
    return feasible(schedule, transforms)


def _vectors(channels: int, lanes: int, pads_in_task: bool) -> list[int]:
    """How many vectors a tile may have: as many as divide those that hold the channels.

    Where channels fill no vectors, the last tile begins earlier, or in a task that pads, which has no channels but its
    own, is shorter (`lib.tir.remainder`).
    """
    in_vectors, whole = -(-channels // lanes), channels // lanes
    found = [n for n in tiling.divisors(in_vectors) if n <= min(MAX_VECTORS, whole)]
    return [n for n in found if not pads_in_task or tiling.has_vectors(channels % (n * lanes), lanes)]


def _producers(schedule: Schedule, block: SBlockRV) -> tuple[SBlockRV | None, Sequence[SBlockRV]]:
    """What makes the words that a block multiplies, if it does; and the blocks that pad its image."""
    found = schedule.get_producers(block)
    if not analysis.of_words(schedule.get(block)):
        return None, found
    [words] = found
    return words, schedule.get_producers(words)


def _sketch(schedule: Schedule, block: SBlockRV, roles: Roles, machine: Registers, padding: str) -> None:
    words, producers = _producers(schedule, block)
    if padding == _INLINE:
        for producer in producers:
            schedule.compute_inline(producer)
        producers = []
    loops = schedule.get_loops(block)
    channels = primitives.extent_of(schedule, loops[roles.columns])
    lanes = _lanes(channels, machine, bool(words))
    results = primitives.epilogue(schedule, block, lanes)
    vectors = _vectors(channels, lanes, padding == _IN_TASK)
    column, vector, lane = schedule.split(
        loops[roles.columns], [None, primitives.sampled_choice(schedule, vectors), lanes]
    )
    columns_0, columns_1 = primitives.sampled_split(schedule, column)
    *outer, line, last = [loops[n] for n in roles.rows]
    pixels = [n for n in tiling.divisors(primitives.extent_of(schedule, last)) if n <= MAX_PIXELS]
    last, pixel = schedule.split(last, [None, primitives.sampled_choice(schedule, pixels)])
    if primitives.extent_of(schedule, line) == 1:  # a signal: its elements are shared out, as lines of images are
        outer, line, within = [*outer, line], last, []
    else:
        within = [last]
    lines_0, lines_1 = primitives.sampled_split(schedule, line)
    window = [loops[n] for n in roles.reduction]
    products = [window.pop()] if words else []
    tasks = [*outer, lines_0, columns_0]
    schedule.reorder(*tasks, lines_1, *within, columns_1, *window, pixel, vector, lane, *products)
    unrolled = math.prod(primitives.extent_of(schedule, loop) for loop in window) <= MAX_UNROLLED
    if not unrolled and not words:
        primitives.skip_padding(schedule, block, producers, window)
    task = schedule.fuse(*tasks)
    schedule.parallel(task)
    if words:
        schedule.annotate(lane, dot.MARK, INT8.name)
    else:
        schedule.vectorize(lane)
    for loop in (*(window if unrolled else ()), pixel, vector, *products):
        schedule.unroll(loop)
    schedule.reverse_compute_at(results, columns_1, preserve_unit_loops=True)
    primitives.vectorize_last(schedule, results, lanes)
    if channels % lanes:
        mark = remainder.SHORTER if padding == _IN_TASK else remainder.EARLIER
        schedule.annotate(columns_1, remainder.MARK, mark)
    if words:
        schedule.compute_at(words, lines_1, preserve_unit_loops=True)
        primitives.vectorize_last(schedule, words, lanes)
    for producer in producers:
        primitives.pad(schedule, producer, task if padding == _IN_TASK else None)
    primitives.set_to_zero(schedule, schedule.decompose_reduction(block, window[0]), n_loops=3)
