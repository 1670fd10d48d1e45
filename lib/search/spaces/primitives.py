"""Schedule steps that several spaces take: sampled splits, vectors, padding, and the epilogue of accumulators."""

from collections.abc import Sequence

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV, ScheduleError

from lib.machine.registers import narrowed
from lib.search.spaces.roles import period

_LONGEST = 64  # of the inner loop of a sampled split


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
        schedule.parallel(schedule.fuse(*schedule.get_loops(block)[:-2]))
    extent = extent_of(schedule, schedule.get_loops(block)[-1])
    vectorize_last(schedule, block, next(n for n in (16, 8, 4, extent) if extent % n == 0))


def epilogue(schedule: Schedule, block: SBlockRV, lanes: int) -> SBlockRV:
    """The block that reads the accumulators of a reduction, which get the scope `local`: the element-wise block that
    follows, or a copy where that cannot be moved into the tile, since it reduces in turn, or permutes columns
    (`lib.graph.widen`, with groups).

    Raises:
        ScheduleError: More than one block follows.
    """
    consumers = list(schedule.get_consumers(block))
    if not consumers or schedule.get(consumers[0]).init is not None:
        return schedule.cache_write(block, 0, "local")
    consumer = consumers[0]
    length = period(schedule.get(consumer)) if len(consumers) == 1 else 0
    if length:
        copy = schedule.cache_write(block, 0, "local")
        _schedule_apart(schedule, consumer, length, lanes)
        return copy
    consumer = _with_what_follows(schedule, consumer)
    if len(consumers) > 1:
        raise ScheduleError("what follows the reduction does not fit into one block")
    for other in schedule.get_producers(consumer):  # say, of a mask that is added
        if not schedule.get(other).same_as(schedule.get(block)):
            schedule.compute_inline(other)
    schedule.set_scope(block, 0, "local")
    return consumer


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


def _schedule_apart(schedule: Schedule, block: SBlockRV, length: int, lanes: int) -> None:
    """A consumer that reads results in stretches of a length, with all that follows it inlined, as a parallel loop nest
    of its own."""
    block = _with_what_follows(schedule, block)
    *outer, last = schedule.get_loops(block)
    stretch, last = schedule.split(last, [None, length])
    _, lane = schedule.split(last, [None, narrowed(lanes, length)])
    schedule.parallel(schedule.fuse(*outer, stretch))
    schedule.vectorize(lane)
