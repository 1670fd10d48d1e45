"""Register tiles: which parts of an output fit the vector registers of a CPU, and how fast that can be."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV
from tvm.target import Target, codegen

_GOOD_ENOUGH = 0.85  # of the best tile's speed, by `_share`
_MUCH_FASTER = 1.5  # for weights that are not packed, and branches


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
    rows: tuple[int, ...]  # to choose from


def tiles(rows: int, columns: int, machine: Registers, remainders: bool = False) -> list[Tile]:
    """The register tiles that fit the extents of an output; empty if there are none.

    A tile of r rows and v vectors needs r * v registers for the sums, v for weights and one for the data. Of those
    that fit, the ones stay that `_share` finds worth a measurement. They divide the output, unless remainders are
    allowed and with them it would be much faster: an image classifier by transformers has 197 tokens, a prime number.
    """
    lanes = lanes_for(columns, machine)
    vectors = divisors(columns // lanes) if lanes else []
    whole = _worthwhile([(lanes, v, r) for v in vectors for r in divisors(rows)], rows, columns, machine)
    some = _worthwhile(_with_remainders(rows, columns, machine) if remainders else [], rows, columns, machine)
    best_whole, best = (max(found.values(), default=0.0) for found in (whole, some))
    return _grouped(some if best > _MUCH_FASTER * best_whole else whole)


def _with_remainders(rows: int, columns: int, machine: Registers) -> list[tuple[int, int, int]]:
    """Tiles (lanes, vectors, rows) that need not divide the rows, nor the columns if whole vectors do not."""
    n, lanes = columns // machine.lanes, machine.lanes
    if columns % lanes:
        vectors = [v for v in range(1, min(n, machine.number) + 1) if _has_vectors(columns % (v * lanes), lanes)]
    else:
        vectors = divisors(n)
    return [(lanes, v, r) for v in vectors for r in range(1, min(rows, machine.number) + 1)]


def _has_vectors(remainder: int, lanes: int) -> bool:
    """Whether columns that remain are whole vectors, or part of one: a loop over each of them has one extent."""
    return remainder % lanes == 0 or remainder < lanes


def _worthwhile(
    choices: Sequence[tuple[int, int, int]], rows: int, columns: int, machine: Registers
) -> dict[tuple[int, int, int], float]:
    """Those of some tiles (lanes, vectors, rows) that fit the registers and are nearly as fast as the best, by
    `_share`."""
    fitting = {
        (lanes, v, r): _share(rows, columns, (lanes, v, r), machine)
        for lanes, v, r in choices
        if r * v + v + 1 <= machine.number
    }
    return {tile: share for tile, share in fitting.items() if share >= _GOOD_ENOUGH * max(fitting.values())}


def _grouped(tiles: Iterable[tuple[int, int, int]]) -> list[Tile]:
    rows: dict[tuple[int, int], list[int]] = {}
    for lanes, v, r in tiles:
        rows.setdefault((lanes, v), []).append(r)
    return [Tile(lanes, v, tuple(choices)) for (lanes, v), choices in rows.items()]


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


def _share(rows: int, columns: int, tile: tuple[int, int, int], machine: Registers) -> float:
    """Share of the peak that tiles (lanes, vectors, rows) of an output can reach, with what remains at its borders."""
    lanes, vectors, r = tile
    part = lanes / machine.lanes
    lines = [(rows // r, r), (1, rows % r)]
    blocks = [(columns // (vectors * lanes), vectors), (1, -(-(columns % (vectors * lanes)) // lanes))]
    cycles = sum(n * m * _cycles(height, width, part) for n, height in lines for m, width in blocks if height and width)
    return rows * columns / machine.lanes / 2 / cycles


def _cycles(rows: int, vectors: int, part: float) -> float:
    """How long a tile takes for a step of the reduction, on a core with two multiply-adds and two loads a cycle, with
    vectors that are such a part of a register.

    As long as the slowest of: its multiply-adds; their latency of four cycles; the loads of data and weights; the
    weights from the second cache, at half a register a cycle.
    """
    return max(rows * vectors / 2, 4, (rows + vectors) / 2, 2 * vectors * part)


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
