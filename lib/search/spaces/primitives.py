"""Schedule steps that several spaces take: sampled splits, vectors, padding, and the epilogue of accumulators."""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV, ScheduleError

from lib.machine.registers import narrowed
from lib.search.spaces.roles import period
from lib.tir import analysis, outside, remainder

_LONGEST = 64  # of the inner loop of a sampled split
_SIGNAL = 3  # axes: (N, W, C)


def sampled_choice(schedule: Schedule, choices: Sequence[int]) -> ExprRV:
    """One of several values, all equally likely."""
    return schedule.sample_categorical(list(choices), [1.0 / len(choices)] * len(choices))


def sampled_split(schedule: Schedule, loop: LoopRV) -> list[LoopRV]:
    """A loop as two, by factors that are sampled."""
    return list(schedule.split(loop, sampled_factors(schedule, loop)))


def sampled_factors(schedule: Schedule, loop: LoopRV) -> list[ExprRV]:
    """Two factors of a loop, of which the inner one is short."""
    return list(schedule.sample_perfect_tile(loop, n=2, max_innermost_factor=_LONGEST))


def extent_of(schedule: Schedule, loop: LoopRV) -> int:
    """Iterations of a loop."""
    return int(schedule.get(loop).extent)


def columns_of(schedule: Schedule, block: SBlockRV) -> int:
    """The extent of the last axis of a block."""
    return int(schedule.get(block).iter_vars[-1].dom.extent)


def vectorize_last(schedule: Schedule, block: SBlockRV, lanes: int) -> None:
    """Split the innermost loop of a block into vectors of so many lanes."""
    _, lane = schedule.split(schedule.get_loops(block)[-1], [None, lanes])
    schedule.vectorize(lane)


def pad(schedule: Schedule, block: SBlockRV, task: LoopRV | None) -> None:
    """Compute the padded data in each parallel task, as much of it as the task reads, or, if that is None, of the whole
    image in a parallel loop of its own."""
    if task is not None:
        # A trace is replayed with other tiles: how many loops there are must not depend on them.
        schedule.compute_at(block, task, preserve_unit_loops=True)
    else:
        loops = schedule.get_loops(block)
        schedule.parallel(schedule.fuse(*loops[: -1 if len(loops) == _SIGNAL else -2]))
    extent = extent_of(schedule, schedule.get_loops(block)[-1])
    lanes = next((n for n in (16, 8, 4) if extent % n == 0), min(extent, 16))
    vectors, lane = schedule.split(schedule.get_loops(block)[-1], [None, lanes])
    schedule.vectorize(lane)
    if extent % lanes:
        schedule.annotate(vectors, remainder.MARK, remainder.SHORTER if task is not None else remainder.EARLIER)


def skip_padding(schedule: Schedule, block: SBlockRV, pads: Sequence[SBlockRV], window: Sequence[LoopRV]) -> None:
    """Mark loops of a reduction where many iterations read nothing but padding (`lib.tir.outside`).

    Args:
        pads: The blocks that pad what `block` reads.
        window: The loops over its first axes of a reduction.
    """
    for axis, loop in zip(analysis.reduction_axes(schedule.get(block)), window, strict=False):
        found = [outside.mark(schedule.get(pad), schedule.get(block), axis) for pad in pads]
        if mark := next(filter(None, found), None):
            schedule.annotate(loop, outside.MARK, mark)


def epilogue(schedule: Schedule, block: SBlockRV, lanes: int) -> SBlockRV:
    """The block that reads the accumulators of a reduction, which get the scope `local`: the element-wise block that
    follows, or a copy where that cannot be moved into the tile, since it reduces in turn, permutes columns
    (`lib.graph.widen`, with groups), or adds elements around the results, as padding does: in a tile there are none.

    Raises:
        ScheduleError: More than one block follows.
    """
    consumers = list(schedule.get_consumers(block))
    if not consumers or schedule.get(consumers[0]).init is not None:
        return schedule.cache_write(block, 0, "local")
    if found := permuted(schedule, block):
        apart(schedule, found, lanes)
        return found.copy
    if len(consumers) == 1 and _adds(schedule, block):
        copy = schedule.cache_write(block, 0, "local")
        last = _with_what_follows(schedule, consumers[0])
        apart(schedule, Permuted(copy, last, columns_of(schedule, last)), lanes)
        return copy
    consumer = following(schedule, block)
    schedule.set_scope(block, 0, "local")
    return consumer


def set_to_zero(schedule: Schedule, initial: SBlockRV, n_loops: int) -> None:
    """Set accumulators to zero in registers: the innermost loop is one of lanes, those before it are unrolled."""
    *unrolled, lane = schedule.get_loops(initial)[-n_loops:]
    schedule.vectorize(lane)
    for loop in reversed(unrolled):
        schedule.unroll(loop)


def all_blocks(schedule: Schedule) -> list[SBlockRV]:
    """Those of a program, in its order."""
    return list(schedule.get_child_blocks(schedule.get_sblock("root")))


def after(schedule: Schedule, block: SBlockRV) -> list[SBlockRV]:
    """The blocks that follow one another after a block."""
    found = [block]
    while consumers := schedule.get_consumers(found[-1]):
        found += consumers
    return found[1:]


def _adds(schedule: Schedule, block: SBlockRV) -> bool:
    """Whether one of the blocks after a block writes elements beyond those it reads, as padding does."""
    for found in map(schedule.get, after(schedule, block)):
        extents = analysis.extents(found)
        for load in analysis.loaded(analysis.stored(found)):
            for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
                if any(index.same_as(axis) and size > int(extent) for axis, size in extents.items()):
                    return True
    return False


def following(schedule: Schedule, block: SBlockRV) -> SBlockRV:
    """The one element-wise block that reads a reduction's results, with all that follows it, and what else it reads,
    inlined.

    Raises:
        ScheduleError: More than one block follows, or it writes more elements than there are results: moved into their
            loops, it would leave the others as memory was.
    """
    if _adds(schedule, block):
        raise ScheduleError("what follows the reduction writes elements beyond its results")
    first, *others = schedule.get_consumers(block)
    consumer = _with_what_follows(schedule, first)
    if others:
        raise ScheduleError("what follows the reduction does not fit into one block")
    for other in schedule.get_producers(consumer):  # say, of a mask that is added
        if not schedule.get(other).same_as(schedule.get(block)):
            schedule.compute_inline(other)
    return consumer


@dataclass(frozen=True, slots=True)
class Permuted:
    """A reduction's results, and the block that reads them in stretches."""

    copy: SBlockRV  # of the accumulators, which have the scope `local`
    consumer: SBlockRV  # with all that follows it inlined
    length: int  # of a stretch


def permuted(schedule: Schedule, block: SBlockRV) -> Permuted | None:
    """What follows a reduction, if that is one block which reads its results in stretches; None if it is another."""
    consumers = schedule.get_consumers(block)
    if len(consumers) != 1 or schedule.get(consumers[0]).init is not None:
        return None
    length = period(schedule.get(consumers[0]))
    if not length:
        return None
    copy = schedule.cache_write(block, 0, "local")
    return Permuted(copy, _with_what_follows(schedule, consumers[0]), length)


def cuts_groups(schedule: Schedule, found: Permuted, groups: int) -> bool:
    """Whether a block takes the first columns of each of some groups, and all rows as they are (`lib.graph.widen`)."""
    block, sums = schedule.get(found.consumer), analysis.stored(schedule.get(found.copy)).buffer
    loads = [load for load in analysis.loaded(analysis.stored(block)) if load.source.same_as(sums)]
    *rows, column = [axis.var for axis in block.iter_vars]
    wide, n = int(sums.shape[-1]) // groups, found.length
    if len(loads) != 1 or len(loads[0].indices) != len(rows) + 1 or columns_of(schedule, found.consumer) != groups * n:
        return False
    *of_rows, last = loads[0].indices
    ends = [(group * n + end, group * wide + end) for group in range(groups) for end in (0, n - 1)]
    return all(a.same_as(b) for a, b in zip(of_rows, rows, strict=True)) and all(
        analysis.at(last, column, n) == place for n, place in ends
    )


def _with_what_follows(schedule: Schedule, block: SBlockRV) -> SBlockRV:
    """The last of the blocks that follow one another, the others inlined into it: MetaSchedule's AutoInline leaves
    those that read single elements, as what remains of `lib.graph.packing`'s products does.

    Raises:
        ScheduleError: Two blocks read the same one.
    """
    while following := schedule.get_consumers(block):
        if len(following) > 1:
            raise ScheduleError("what follows the reduction does not fit into one block")
        schedule.compute_inline(block)
        [block] = following
    return block


def apart(schedule: Schedule, found: Permuted, lanes: int) -> None:
    """Have what reads results, in stretches or whole rows, be a parallel loop nest of its own."""
    *outer, last = schedule.get_loops(found.consumer)
    stretch, _ = schedule.split(last, [None, found.length])
    schedule.parallel(schedule.fuse(*outer, stretch))
    vectorize_last(schedule, found.consumer, narrowed(lanes, found.length))
