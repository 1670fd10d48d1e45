"""A space for element-wise chains on CPUs: what computes each element of a tensor by itself, or moves it.

MetaSchedule gives each block that it does not inline a loop nest of its own, with results that pass through memory.
Here a chain is one block, which reads what the chain reads, and writes its result in vectors. What is left to the
search is how wide these are, since it takes four registers of floats to fill one with bytes; whether a vector stays
within a row; and how many vectors a task takes.

    parallel (elements.0), elements.1, lanes                    flat: rows do not matter
    parallel (rows.0), rows.1, vectors, lanes                   by row: indices of rows are computed once a row
    parallel (rows.0), rows.1, groups, (channels; zeros)        channels that get more of them (`lib.tir.gaps`)

Where vectors leave elements of a row over, those are computed in a shorter vector, apart (`lib.tir.remainder`).
"""

import math
from collections.abc import Callable
from functools import partial

import tvm
from tvm import tirx
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.schedule import SBlockRV, ScheduleError
from tvm.target import Target

from lib.machine.registers import Registers
from lib.search.spaces import primitives
from lib.search.spaces.space import feasible
from lib.tir import analysis, gaps, parallel, remainder

_WIDTHS = (1, 2, 4)  # registers of float32 that a vector fills: a register of bytes is made from four of them
_MUCH_SMALLER = 4  # times: what is that, and takes more than arithmetic, is computed once, before


def fits(workload: tvm.IRModule, _target: Target) -> bool:
    """Whether a workload is such a chain, with a result that is contiguous along its last axis."""
    blocks = analysis.leaf_blocks(workload["main"])
    if not blocks or not all(map(_is_elementwise, blocks)):
        return False
    try:
        return _chained(Schedule(workload, debug_mask="none")) is not None
    except ScheduleError:
        return False


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers) -> list[Schedule]:
    """Of all blocks, when it comes to the last one, before any was inlined."""
    blocks = analysis.leaf_blocks(schedule.mod["main"])
    if str(schedule.get(block).name_hint) != str(blocks[-1].name_hint) or not all(map(_is_elementwise, blocks)):
        return []
    forms: list[Callable[[Schedule], None]] = [partial(form, machine=machine) for form in (_flat, _by_row)]
    if gaps.DEEPER in blocks[-1].annotations:
        forms = [_by_group, *(forms if len(blocks) > 1 else [])]
    return feasible(schedule, forms)


def _is_elementwise(block: SBlock) -> bool:
    stores = analysis.walk(block.body, tirx.BufferStore)
    return block.init is None and len(stores) == 1 and not analysis.walk(block.body, tirx.For)


def _chained(schedule: Schedule) -> SBlockRV | None:
    """The last block, with all others inlined that are not worth to be computed before; None if results are several.

    Raises:
        ScheduleError: One cannot be inlined.
    """
    *before, last = [schedule.get_sblock(block.name_hint) for block in analysis.leaf_blocks(schedule.mod["main"])]
    size = _size(schedule.get(last))
    for block in before:
        found = schedule.get(block)
        if not schedule.get_consumers(block):
            return None
        if _MUCH_SMALLER * _size(found) > size or not _is_expensive(found):
            schedule.compute_inline(block)
    found = schedule.get(last)
    axes = [axis.var for axis in found.iter_vars]
    return last if axes and analysis.column_written(found).same_as(axes[-1]) else None


def _size(block: SBlock) -> int:
    return math.prod(analysis.extents(block).values())


def _is_expensive(block: SBlock) -> bool:
    """Whether it divides, or calls functions, as exponentials."""
    value = analysis.stored(block).value
    calls = [str(getattr(call.op, "name", "")) for call in analysis.walk(value, tvm.ir.Call)]
    return bool(analysis.walk(value, tirx.Div)) or any(not name.endswith("if_then_else") for name in calls)


def _widths(machine: Registers) -> list[int]:
    """Lanes of vectors."""
    return [width * machine.lanes for width in _WIDTHS]


def _flat(schedule: Schedule, machine: Registers) -> None:
    last = _scheduled_before(schedule, machine)
    size, columns = _size(schedule.get(last)), primitives.extent_of(schedule, schedule.get_loops(last)[-1])
    widths = [lanes for lanes in _widths(machine) if size % lanes == 0]
    if not _is_whole(schedule.get(last)):
        widths = [math.gcd(columns, machine.lanes)]  # what is written of a row would be scattered
    elif columns >= machine.lanes and not _knows_no_rows(schedule.get(last)):
        widths = [lanes for lanes in widths if columns % lanes == 0]  # else what is read of a row is gathered
    if not widths and columns < machine.lanes:  # a few boxes, or a single number: in vectors as short as it takes
        widths = [math.gcd(size, machine.lanes)]
    if not widths:
        raise ScheduleError("no vectors fill the tensor")
    elements = schedule.fuse(*schedule.get_loops(last))
    vectors, lane = schedule.split(elements, [None, primitives.sampled_choice(schedule, widths)])
    vectors_0, _ = primitives.sampled_split(schedule, vectors)
    schedule.parallel(vectors_0)
    schedule.vectorize(lane)


def _knows_no_rows(block: SBlock) -> bool:
    """Whether all that a block reads is as long as what it writes, in the same order, or a single element."""
    axes = [axis.var for axis in block.iter_vars]

    def is_flat(load: tvm.ir.TensorLoad) -> bool:
        extents = [int(extent) for extent in load.source.ty.shape]
        same = len(load.indices) == len(axes) and all(a.same_as(b) for a, b in zip(load.indices, axes, strict=True))
        return math.prod(extents) == 1 or (same and extents == list(analysis.extents(block).values()))

    return all(map(is_flat, analysis.walk(analysis.stored(block).value, tvm.ir.TensorLoad)))


def _is_whole(block: SBlock) -> bool:
    """Whether a block writes a whole tensor, not a part of a concatenation."""
    return math.prod(int(extent) for extent in analysis.stored(block).buffer.shape) == _size(block)


def _by_row(schedule: Schedule, machine: Registers) -> None:
    last = _scheduled_before(schedule, machine)
    *rows, column = schedule.get_loops(last)
    columns = primitives.extent_of(schedule, column)
    widths = [lanes for lanes in _widths(machine) if lanes <= columns]
    if not widths or not rows:
        raise ScheduleError("no vector fits into a row")
    whole = [lanes for lanes in widths if columns % lanes == 0]
    rows_0, _ = primitives.sampled_split(schedule, schedule.fuse(*rows))
    vectors, lane = schedule.split(column, [None, primitives.sampled_choice(schedule, whole or widths)])
    schedule.vectorize(lane)
    if whole:
        schedule.parallel(rows_0)
    else:
        schedule.annotate(vectors, remainder.MARK, 1)
        schedule.annotate(rows_0, parallel.MARK, 1)


def _by_group(schedule: Schedule) -> None:
    last = _chained(schedule)
    if last is None or schedule.get_producers(last):
        raise ScheduleError("more than one block")
    own, wide = map(int, schedule.get(last).annotations[gaps.DEEPER])
    *rows, columns = schedule.get_loops(last)
    group, channels = schedule.split(columns, [None, wide])
    rows_0, _ = primitives.sampled_split(schedule, schedule.fuse(*rows))
    schedule.parallel(rows_0)
    schedule.unroll(group)
    schedule.annotate(channels, gaps.MARK, own)
    schedule.vectorize(channels)


def _scheduled_before(schedule: Schedule, machine: Registers) -> SBlockRV:
    """The chain as one block, with what is computed before it in vectors, where some fill it."""
    last = _chained(schedule)
    if last is None:
        raise ScheduleError("several results")
    for block in schedule.get_producers(last):
        *_, extent = analysis.extents(schedule.get(block)).values()
        primitives.vectorize_last(schedule, block, math.gcd(extent, machine.lanes))
    return last
