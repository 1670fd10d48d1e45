"""Register tiles: which parts of an output fit the vector registers of a CPU, and how close to its peak they come."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lib.machine.dots import Dot, Matrix
from lib.machine.registers import Registers, narrowed

_WORTH_MEASURING = 0.85  # of the best tile's efficiency
_MOST_ROWS, _MOST_TILES = 4, 4  # numbers of rows to choose from, of a tile for matrices; and such tiles
_APART, _PLACES = 4096, 10  # bytes after which a line of L1 has the same places again; rows that find some there
_LOADS = {True: 2.0, False: 1.4}  # a cycle, by whether a multiplication spreads a number to all lanes itself
_CROWDED = 1.4  # cycles for each row of a tile whose rows do not: 12 to 19 of them were measured (Zen 4)
_WORTH_REMAINDERS = 1.5  # times the best efficiency without: weights are not packed then, and there are branches


@dataclass(frozen=True, slots=True)
class Tile:
    """A choice of register tiles that share everything but the number of rows."""

    lanes: int
    vectors: int
    rows: tuple[int, ...]  # to choose from
    dot: Dot | None = None  # the instruction that multiplies; None: one product to a lane
    matrix: Matrix | None = None  # one for the whole tile, which multiplies like `dot`
    steps: int = 0  # of the reduction that it takes at once
    lines: int = 1  # of rows, whole ones if there are several
    words: int = 1  # of as many products as `dot` adds, whose sums are added to one another first
    spread: bool = False  # a vector has the columns of several groups, and an element of the data for each of these


def tiles(rows: int, columns: int, machine: Registers, remainders: bool = False, row_bytes: int = 0) -> list[Tile]:
    """The register tiles for an output of `rows x columns`; empty if there are none.

    A tile of r rows and v vectors needs r * v registers for accumulators, v for weights and one for the data. Of those
    that fit, the ones stay whose estimated efficiency is worth a measurement. They divide the output, unless
    `remainders` are allowed and much more efficient: a vision transformer has 197 tokens, a prime number. Where only
    tiles of one vector divide it, as with 19 rows, those of more that leave rows stand beside them: a tile of one loads
    a number for each product, which is estimated as no loss, but was one (1.16 times as slow as 14 rows of two).

    Args:
        row_bytes: From one row of the data to the next: where that is a multiple of 4,096 bytes, as with 1,024 channels
            in float32, all rows have the same few places in L1. A tile of 17 rows takes three times as long then.
    """
    is_crowded = row_bytes > 0 and row_bytes % _APART == 0
    lanes = lanes_for(columns, machine)
    vectors = divisors(columns // lanes) if lanes else []
    choices = [(lanes, v, r) for v in vectors for r in divisors(rows)]
    whole = _worthwhile(choices, rows, columns, machine, is_crowded)
    choices = _with_remainders(rows, columns, machine) if remainders else []
    some = _worthwhile(choices, rows, columns, machine, is_crowded)
    best_whole, best = (max(found.values(), default=0.0) for found in (whole, some))
    if best > _WORTH_REMAINDERS * best_whole:
        return _grouped(some)
    more = [(width, v, r) for width, v, r in some if v > 1 and width == lanes and columns % (v * lanes) == 0]
    is_better = best_whole < _WORTH_MEASURING * max((some[tile] for tile in more), default=0.0)
    return _grouped(whole if any(v > 1 for _, v, _ in whole) and not is_better else [*whole, *more])


def narrow_tiles(rows: int, columns: int, machine: Registers) -> list[Tile]:
    """Those of one vector that is as long as a few columns which fill none, and need not divide the rows: LLVM computes
    its lanes in a whole register, and moves them in parts. Empty for other columns."""
    if columns == 1 or columns >= machine.lanes or lanes_for(columns, machine):
        return []
    choices = [(columns, 1, r) for r in range(1, min(rows, machine.count) + 1)]
    return _grouped(_worthwhile(choices, rows, columns, machine))


def best_efficiency(rows: int, columns: int, machine: Registers) -> float:
    """Estimated share of the peak FLOP/s that the best tile has, with remainders or without."""
    lanes = lanes_for(columns, machine)
    whole = [(lanes, v, r) for v in (divisors(columns // lanes) if lanes else []) for r in divisors(rows)]
    choices = [*whole, *_with_remainders(rows, columns, machine)]
    return max(_worthwhile(choices, rows, columns, machine).values(), default=0.0)


def _with_remainders(rows: int, columns: int, machine: Registers) -> list[tuple[int, int, int]]:
    """Tiles (lanes, vectors, rows) that need not divide the rows, nor the columns if whole vectors do not."""
    n, lanes = columns // machine.lanes, machine.lanes
    if columns % lanes:
        vectors = [v for v in range(1, min(n, machine.count) + 1) if has_vectors(columns % (v * lanes), lanes)]
    else:
        vectors = divisors(n)
    return [(lanes, v, r) for v in vectors for r in range(1, min(rows, machine.count) + 1)]


def has_vectors(remainder: int, lanes: int) -> bool:
    """Whether the columns that remain are whole vectors, or part of one: only then do the loops over vectors and over
    lanes each have one extent in the last tile."""
    return remainder % lanes == 0 or remainder < lanes


def _worthwhile(
    choices: Sequence[tuple[int, int, int]], rows: int, columns: int, machine: Registers, is_crowded: bool = False
) -> dict[tuple[int, int, int], float]:
    """Those of some tiles (lanes, vectors, rows) that fit the registers and come near the best one, with their
    efficiency."""
    fitting = {
        (lanes, v, r): _efficiency(rows, columns, (lanes, v, r), machine, is_crowded)
        for lanes, v, r in choices
        if r * v + v + 1 <= machine.count
    }
    return {tile: share for tile, share in fitting.items() if share >= _WORTH_MEASURING * max(fitting.values())}


def _grouped(tiles: Iterable[tuple[int, int, int]]) -> list[Tile]:
    rows: dict[tuple[int, int], list[int]] = {}
    for lanes, v, r in tiles:
        rows.setdefault((lanes, v), []).append(r)
    return [Tile(lanes, v, tuple(choices)) for (lanes, v), choices in rows.items()]


def _efficiency(rows: int, columns: int, tile: tuple[int, int, int], machine: Registers, is_crowded: bool) -> float:
    """Estimated share of the peak FLOP/s for an output in tiles (lanes, vectors, rows), remainders included.

    Args:
        is_crowded: See `cycles`.
    """
    lanes, vectors, r = tile
    width = lanes / machine.lanes
    row_tiles = [(rows // r, r), (1, rows % r)]  # how many, of how many rows
    columns_left = columns % (vectors * lanes)
    column_tiles = [(columns // (vectors * lanes), vectors), (1, -(-columns_left // lanes))]  # of how many vectors
    total = 0.0
    for n_rows, height in row_tiles:
        for n_columns, n_vectors in column_tiles:
            if height and n_vectors:
                total += n_rows * n_columns * cycles(height, n_vectors, width, is_crowded, _LOADS[machine.spreads])
    return rows * columns / machine.lanes / 2 / total


def cycles(rows: int, vectors: int, width: float, is_crowded: bool = False, loads: float = 2.0) -> float:
    """Cycles that a tile takes for one step of the reduction, on a core that issues two FMAs and two loads a cycle.

    The largest of: its FMAs; their latency of four cycles; its loads of data and weights; the weights from L2, at half
    a register a cycle; the data from L2, where more rows have the same places in L1 than there are.

    Args:
        width: Of the vectors, as a share of a register.
        is_crowded: All rows of the data have the same places in L1.
        loads: That are done in a cycle. With AVX2 a number is spread to all lanes by an instruction of its own, and
            1.4 loads a cycle were measured then, whatever tile (Zen 3).
    """
    from_l2 = _CROWDED * rows if is_crowded and rows > _PLACES else 0.0
    return max(rows * vectors / 2, 4, (rows + vectors) / loads, 2 * vectors * width, from_l2)


@dataclass(frozen=True, slots=True)
class Image:
    """The rows of an output: `lines`, each of `rows`; whether the data of all of them are equally far apart."""

    lines: int
    rows: int
    is_even: bool


def matrix_tiles(image: Image, columns: int, steps: int, matrix: Matrix) -> list[Tile]:
    """The tiles of an output for an instruction that multiplies matrices; empty if there are none.

    They divide the columns, but need not divide rows or lines.

    Args:
        steps: Of the reduction, each of as many products as `matrix.dot` adds; a tile takes as many at once as divide
            them.
    """
    if columns % matrix.LANES:
        return []
    at_once = matrix.at_once(steps)
    most = matrix.REGISTERS * matrix.ROWS
    tiles = [(1, r) for r in range(1, min(image.rows, most) + 1)]
    tiles += [(n, image.rows) for n in range(2, min(image.lines, most // image.rows) + 1)]
    efficiency = {
        (v, *tile): image.lines * image.rows * v / _matrix_cycles(image, tile, v, at_once, matrix)
        for v in divisors(columns // matrix.LANES)
        for tile in tiles
        if matrix.registers(_heights(image, *tile, matrix), v) <= matrix.REGISTERS
    }
    best = max(efficiency.values())
    found: dict[tuple[int, int], dict[int, int]] = {}
    for (v, lines, r), share in sorted(efficiency.items(), key=lambda each: -each[1]):
        choices = found.setdefault((v, lines), {})
        if share >= _WORTH_MEASURING * best and len(choices) < _MOST_ROWS:
            choices.setdefault(-(-image.rows // r), r)  # of so many tiles, those that are most alike
    return [
        Tile(matrix.LANES, v, tuple(sorted(rows.values())), matrix.dot, matrix, at_once, lines)
        for (v, lines), rows in found.items()
        if rows
    ][:_MOST_TILES]


def _heights(image: Image, lines: int, rows: int, matrix: Matrix) -> list[int]:
    """Of the registers of a tile."""
    is_one = image.is_even and rows == image.rows
    return matrix.heights(lines * rows) if is_one else matrix.heights(rows) * lines


def _matrix_cycles(image: Image, tile: tuple[int, int], vectors: int, steps: int, matrix: Matrix) -> float:
    """Cycles of all rows for one column of tiles and one product of each."""
    lines, rows = tile
    return sum(
        n * m * matrix.cycles(_heights(image, height, width, matrix), vectors, steps)
        for n, height in ((image.lines // lines, lines), (1, image.lines % lines)) if height
        for m, width in ((image.rows // rows, rows), (1, image.rows % rows)) if width
    )  # fmt: skip


def lanes_for(extent: int, machine: Registers) -> int:
    """Lanes of the widest vectors that fill an extent; 0 if only scalars do."""
    lanes = narrowed(machine.lanes, extent)
    return lanes if lanes > 1 else 0


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]
