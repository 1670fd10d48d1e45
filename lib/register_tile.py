"""A schedule rule for contractions on CPUs: a tile of the output lives in vector registers while the sum is formed.

MetaSchedule tiles every loop alike (SSRSRS) and leaves it to chance that an inner tile fits the registers, that its
columns fill vectors, and that LLVM keeps it there. Here that is how the space is made: `rows x vectors` accumulators,
as many as the machine has registers for, are filled by a loop over the reduction which, for each step, loads the
vectors of one row of weights once and multiplies them with as many broadcast elements of the data. It is the inner
kernel of Goto's product (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", TOMS 2008), for
convolutions as well: their rows are neighbouring pixels. What is left to the search is how many rows and vectors,
how far the reduction is unrolled, and which part of the output one task of a thread computes and in which order.

    parallel (batch, rows.0, columns.0)
        columns.1, rows.1, other rows
            reduction.0, kernel window
                reduction.1 (unrolled), rows (unrolled), vectors (unrolled), lanes (vectorised)
            the epilogue of the tile

Weights are packed to be read in order by MetaSchedule's RewriteLayout, where they are marked as free to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import LoopRV, SBlockRV, ScheduleError
from tvm.target import Target, codegen

from lib import structure
from lib.structure import Roles

_UNROLLED = (2, 4, 8)  # steps of the reduction
_GOOD_ENOUGH = 0.85  # of the best tile's speed, by `_speed`


@dataclass(frozen=True, slots=True)
class Registers:
    """The vector registers of a CPU."""

    number: int
    lanes: int  # float32 numbers in each


def registers(target: Target) -> Registers:
    """What LLVM may use when it compiles for a target."""
    features = {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    if "avx512f" in features:
        return Registers(32, 16)
    if "avx" in features:
        return Registers(16, 8)
    return Registers(32 if "neon" in features else 16, 4)


@dataclass(frozen=True, slots=True)
class Tile:
    """A choice of register tiles that share everything but the number of rows."""

    lanes: int
    vectors: int
    rows: tuple[int, ...]  # to choose from, each a divisor of the extent


def tiles(rows: int, columns: int, machine: Registers) -> list[Tile]:
    """The register tiles that fit the extents of an output, without remainders; empty if there are none.

    A tile of r rows and v vectors needs r * v registers for the sums, v for weights and one for the data. Of those
    that fit, the ones stay that `_speed` finds worth a measurement.
    """
    lanes = next((n for n in (machine.lanes, machine.lanes // 2, machine.lanes // 4) if n > 1 and columns % n == 0), 0)
    if not lanes:
        return []
    fitting = [
        (r, v)
        for v in _divisors(columns // lanes)
        for r in _divisors(rows)
        if r * v + v + 1 <= machine.number
    ]  # fmt: skip
    enough = _GOOD_ENOUGH * max(_speed(r, v) for r, v in fitting)
    by_vectors: dict[int, list[int]] = {}
    for r, v in fitting:
        if _speed(r, v) >= enough:
            by_vectors.setdefault(v, []).append(r)
    return [Tile(lanes, vectors, tuple(rows)) for vectors, rows in by_vectors.items()]


def _speed(rows: int, vectors: int) -> float:
    """Share of the peak that a tile can reach, on a core with two multiply-adds and two loads a cycle.

    Each step of the reduction takes as long as the slowest of: its multiply-adds; their latency of four cycles; the
    loads of data and weights; the weights from the second cache, at half a vector a cycle.
    """
    work = rows * vectors / 2
    return work / max(work, 4, (rows + vectors) / 2, 2 * vectors)


def fits(workload: tvm.IRModule, target: Target) -> bool:
    """Whether the rule makes programs of a workload: one contraction, with element-wise blocks around it."""
    blocks = structure.leaf_blocks(workload["main"])
    reductions = [block for block in blocks if block.init is not None]
    found = structure.roles(reductions[0]) if len(reductions) == 1 else None
    if found is None:
        return False
    extents = [int(axis.dom.extent) for axis in reductions[0].iter_vars]
    return bool(tiles(extents[found.rows[-1]], extents[found.columns], registers(target)))


@derived_object
class RegisterTile(ms.schedule_rule.PyScheduleRule):
    """Gives a contraction of float32 a sketch for each number of vectors; leaves every other block alone."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Registers(0, 0)

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.machine = registers(context.target)

    def apply(self, schedule: Schedule, block: SBlockRV) -> list[Schedule]:
        """See `PyScheduleRule.apply`; the block was not touched before, but its neighbours were inlined."""
        roles = structure.roles(schedule.get(block))
        if roles is None or not _is_untouched(schedule, block):
            return [schedule]
        extents = [int(axis.dom.extent) for axis in schedule.get(block).iter_vars]
        found = []
        for tile in tiles(extents[roles.rows[-1]], extents[roles.columns], self.machine):
            for padded_in_task in (False, True) if schedule.get_producers(block) else (False,):
                sketch = schedule.copy()
                try:
                    _sketch(sketch, block, roles, tile, padded_in_task)
                except ScheduleError:  # a neighbour that does not move: this space has no place for it
                    continue
                found.append(sketch)
        return found or [schedule]

    def clone(self) -> "RegisterTile":
        """Another one: TVM copies rules for each thread."""
        return RegisterTile()


def _sketch(schedule: Schedule, block: SBlockRV, roles: Roles, tile: Tile, padded_in_task: bool) -> None:
    loops = schedule.get_loops(block)
    sums = _epilogue(schedule, block)
    rows = schedule.sample_categorical(tile.rows, _even(tile.rows))
    *outer_rows, last_row = [loops[n] for n in roles.rows]
    last_row, row = schedule.split(last_row, [None, rows])
    column, vector, lane = schedule.split(loops[roles.columns], [None, tile.vectors, tile.lanes])
    *window, last_sum = [loops[n] for n in roles.reduction]
    extent = int(schedule.get(last_sum).extent)
    steps = [n for n in _UNROLLED if extent % n == 0] or [extent if extent < 8 else 1]
    sum_outer, sum_inner = schedule.split(last_sum, [None, schedule.sample_categorical(steps, _even(steps))])
    tiled = outer_rows.pop() if outer_rows else last_row  # what is shared out to tasks: for images, their lines
    rest = [] if tiled is last_row else [last_row]
    rows_0, rows_1 = _tile(schedule, tiled)
    columns_0, columns_1 = _tile(schedule, column)
    tasks = [*(loops[n] for n in roles.batch), *outer_rows, rows_0, columns_0]
    places = [columns_1, rows_1, *rest]
    schedule.reorder(*tasks, *places, sum_outer, *window, sum_inner, row, vector, lane)
    task = schedule.fuse(*tasks)
    schedule.parallel(task)
    for loop in (sum_inner, row, vector):
        schedule.unroll(loop)
    schedule.vectorize(lane)
    schedule.reverse_compute_at(sums, places[-1], preserve_unit_loops=True)
    _vectorize_columns(schedule, sums, tile.lanes)
    for producer in schedule.get_producers(block):
        _pad(schedule, producer, task if padded_in_task else None)
    initial = schedule.decompose_reduction(block, sum_outer)
    *_, row, vector, lane = schedule.get_loops(initial)
    schedule.vectorize(lane)
    schedule.unroll(vector)
    schedule.unroll(row)


def _epilogue(schedule: Schedule, block: SBlockRV) -> SBlockRV:
    """The block that takes the sums out of the registers: what follows the contraction, or a copy."""
    consumers = schedule.get_consumers(block)
    if not consumers:
        return schedule.cache_write(block, 0, "local")
    if len(consumers) > 1:
        raise ScheduleError("several blocks read the sums")
    schedule.set_scope(block, 0, "local")
    return consumers[0]


def _tile(schedule: Schedule, loop: LoopRV) -> list[LoopRV]:
    return list(schedule.split(loop, schedule.sample_perfect_tile(loop, n=2, max_innermost_factor=64)))


def _vectorize_columns(schedule: Schedule, block: SBlockRV, lanes: int) -> None:
    _, lane = schedule.split(schedule.get_loops(block)[-1], [None, lanes])
    schedule.vectorize(lane)


def _pad(schedule: Schedule, block: SBlockRV, task: LoopRV | None) -> None:
    """The padded data: of the whole image before all else, or of what a task reads in each task."""
    if task is not None:
        schedule.compute_at(block, task)
    else:
        schedule.parallel(schedule.fuse(*schedule.get_loops(block)[:-2]))
    last = schedule.get_loops(block)[-1]
    extent = int(schedule.get(last).extent)
    lanes = next(n for n in (16, 8, 4, extent) if extent % n == 0)
    _, lane = schedule.split(last, [None, lanes])
    schedule.vectorize(lane)


def _is_untouched(schedule: Schedule, block: SBlockRV) -> bool:
    return len(schedule.get_loops(block)) == len(schedule.get(block).iter_vars)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _even(choices: Sequence[int]) -> list[float]:
    return [1.0 / len(choices)] * len(choices)
