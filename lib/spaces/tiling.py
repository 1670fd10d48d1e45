"""Register tiles: which parts of an output fit the vector registers of a CPU, and how fast that can be."""

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV
from tvm.target import Target, codegen

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
    lanes = lanes_for(columns, machine)
    if not lanes:
        return []
    fitting = [
        (r, v)
        for v in divisors(columns // lanes)
        for r in divisors(rows)
        if r * v + v + 1 <= machine.number
    ]  # fmt: skip
    enough = _GOOD_ENOUGH * max(_speed(r, v) for r, v in fitting)
    by_vectors: dict[int, list[int]] = {}
    for r, v in fitting:
        if _speed(r, v) >= enough:
            by_vectors.setdefault(v, []).append(r)
    return [Tile(lanes, vectors, tuple(rows)) for vectors, rows in by_vectors.items()]


def lanes_for(extent: int, machine: Registers) -> int:
    """The widest vectors that fill an extent; 0 if not even short ones do."""
    widths = (machine.lanes, machine.lanes // 2, machine.lanes // 4)
    return next((n for n in widths if n > 1 and extent % n == 0), 0)


def narrowed(lanes: int, extent: int) -> int:
    """Vectors of so many lanes, a half or a quarter of them, or single numbers: the widest that fill an extent."""
    return next(n for n in (lanes, lanes // 2, lanes // 4, 1) if n and extent % n == 0)


def columns_of(schedule: Schedule, block: SBlockRV) -> int:
    """The extent of the last axis of a block."""
    return int(schedule.get(block).iter_vars[-1].dom.extent)


def _speed(rows: int, vectors: int) -> float:
    """Share of the peak that a tile can reach, on a core with two multiply-adds and two loads a cycle.

    Each step of the reduction takes as long as the slowest of: its multiply-adds; their latency of four cycles; the
    loads of data and weights; the weights from the second cache, at half a vector a cycle.
    """
    work = rows * vectors / 2
    return work / max(work, 4, (rows + vectors) / 2, 2 * vectors)


def choice(schedule: Schedule, choices: Sequence[int]) -> ExprRV:
    """One of several numbers, all equally likely."""
    return schedule.sample_categorical(list(choices), [1.0 / len(choices)] * len(choices))


def halves(schedule: Schedule, loop: LoopRV) -> list[LoopRV]:
    """A loop as two; where to cut is sampled."""
    return list(schedule.split(loop, schedule.sample_perfect_tile(loop, n=2, max_innermost_factor=64)))


def extent_of(schedule: Schedule, loop: LoopRV) -> int:
    """How often a loop runs."""
    return int(schedule.get(loop).extent)


def vectorize_last(schedule: Schedule, block: SBlockRV, lanes: int) -> None:
    """The innermost loop of a block, in vectors of so many lanes."""
    _, lane = schedule.split(schedule.get_loops(block)[-1], [None, lanes])
    schedule.vectorize(lane)


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]
