"""Matrix products with an eighth fewer multiplications: one step of Strassen's algorithm.

Data, weights and results are cut into quarters. Seven products of sums of the data's quarters with sums of the weights'
are computed, where eight of quarters are in the definition; the quarters of the result are sums of those. The sums of
weights are made at compile time, so that a library has 7/4 as many. The sums of data and of products cost additions and
memory traffic: it pays where all three sides of a product are long, as in transformers, whose products run at the peak
of the cores otherwise. Of floats alone: sums of numbers in bf16 would be rounded once more.

Which elements make a quarter is free. Here it is every other line of the data (of an image's lines, or of what else its
rows have an even number of), the first or second half of the channels, and every other vector of the columns, so that
what a parallel task computes stands together in the results. Columns that do not make such quarters get some of zeros,
which are dropped as in `lib.graph.widen`.

Its error is a few times that of the definition, relative to the largest elements of the data and the weights rather
than to those of a row and a column: lines of a pair share their errors, and what is not finite in one is in both. See
Higham, "Accuracy and Stability of Numerical Algorithms", section 23.2.2.
Source: Strassen, "Gaussian Elimination is not Optimal" (Numerische Mathematik 13, 1969).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from tvm import relax, te, tirx, topi

from lib.graph import patterns, widen
from lib.graph.reweight import Choose, Replacement, shape_of
from lib.graph.rewrite import dtype, is_by_pixel, is_call
from lib.machine.registers import Registers

FUNCTION = "matmul_strassen"  # name of the functions that compute one, for people
# One row for each of the seven products: by how much the quarters 11, 12, 21 and 22 count in its factors, ...
DATA = ((1, 0, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 0), (-1, 0, 1, 0), (0, 1, 0, -1))
WEIGHT = ((1, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, -1), (-1, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1))
# ... and one for each quarter of the result: by how much the products count in it.
RESULT = ((1, 0, 0, 1, -1, 0, 1), (0, 0, 1, 0, 1, 0, 0), (0, 1, 0, 1, 0, 0, 0), (1, -1, 1, 0, 0, 1, 0))
_FLOAT = "float32"
_FROM_MEMORY, _THROUGH_CACHE = 10, 7  # cost of an element, in multiplications
_SUMS = 8  # of a tile, at least: two are added to each cycle, each takes four
_WORTH_IT = 0.02  # of the multiplications
_TILE_VECTORS = (2, 3)  # of which half the columns must be made


def replacement(machine: Registers) -> Choose:
    """What computes products and 1x1 convolutions with weights in Strassen's way, where that is faster."""
    return partial(_replacement, machine)


def _replacement(machine: Registers, call: relax.Call) -> Replacement | None:
    if not _is_product(call):
        return None
    data, weight = shape_of(call.args[0]), shape_of(call.args[1])
    depth, columns = weight[-2:]
    if not is_taken(data[:-1], depth, columns, machine):
        return None
    wide = quartered(columns, machine.lanes)
    return Replacement(
        kind=(FUNCTION, machine.lanes),
        value=partial(_summed, wide - columns, machine.lanes),
        shape=(len(WEIGHT), depth // 2, wide // 2),
        emit=partial(_emit, *paired(data[:-1], machine), machine.lanes),
    )


def is_taken(rows: Sequence[int], depth: int, columns: int, machine: Registers) -> bool:
    """Whether a product of data of some rows is computed so: its quarters are whole vectors, good register tiles divide
    both its rows and its columns, and it pays."""
    if machine.lanes < 2 or depth % (2 * machine.lanes):
        return False
    axis, pairs = paired(rows, machine)
    in_tiles = pairs if axis == len(rows) - 1 else rows[-1]
    wide = quartered(columns, machine.lanes)
    vectors = [n for n in _TILE_VECTORS if wide // (2 * machine.lanes) % n == 0]
    if not any(in_tiles % height == 0 for n in vectors for height in _heights(n, machine)):
        return False
    padded_rows = 2 * pairs * math.prod(rows) // rows[axis]
    return pays(math.prod(rows), depth, columns, padded_rows, wide)


def quartered(columns: int, lanes: int) -> int:
    """How many columns are computed: those, or the next number whose half is whole register tiles of two or of three
    vectors; tiles of one load a number for each product."""
    pairs = -(-columns // (2 * lanes))
    return next(n for n in (pairs, pairs + 1) if any(n % vectors == 0 for vectors in _TILE_VECTORS)) * 2 * lanes


def _is_product(call: relax.Call) -> bool:
    """Whether each row of some data, the last axis of a tensor, is multiplied by one matrix of weights, in floats."""
    if not is_call(call, "relax.matmul", "relax.nn.conv2d") or {dtype(call), *map(dtype, call.args)} != {_FLOAT}:
        return False
    data, weight, out = (shape_of(each) for each in (*call.args, call))
    if not data or not out:
        return False
    if is_call(call, "relax.matmul"):
        return len(weight) == 2 and len(out) > 1
    return is_by_pixel(call, data, weight, out)


def pays(rows: int, depth: int, columns: int, padded_rows: int = 0, padded_columns: int = 0) -> bool:
    """Whether a product of `rows x depth` with `depth x columns` is faster in Strassen's way.

    Counts in multiplications what an eighth of them saves, and what its memory traffic costs: that of three more
    weights to four, which come from memory in a large model, and that of the sums and the products, which are written
    once to a cache and read again. What it foretells is less than what was measured (benchmarks/notes/zen5.md,
    "Products in Strassen's way"): where cores have less of the memory to themselves, weights cost more.

    Args:
        padded_rows: With those that are computed for nothing; 0: there are none.
        padded_columns: The same of columns.
    """
    plain = rows * depth * columns
    columns = padded_columns or columns
    products = len(WEIGHT) / 8 * (padded_rows or rows) * depth * columns
    share = len(WEIGHT) / 4
    traffic = _THROUGH_CACHE * share * (rows * depth + rows * columns) + _FROM_MEMORY * (share - 1) * depth * columns
    return products + traffic < (1 - _WORTH_IT) * plain


def paired(rows: Sequence[int], machine: Registers) -> tuple[int, int]:
    """Along which axis of the data lines are paired, and how many pairs there are.

    The last one, which register tiles are along, if its pairs are whole tiles of a good height: so the axes before it
    keep all their lines for the cores (14 of an image, where 7 pairs of them leave one of two cores idle at the end).
    Else one that has an even number: if there is such, not the first, which may be samples that have nothing to do with
    one another, and rather not the last. If there is none, the last one is padded until rows of a good tile divide its
    pairs.
    """
    last = len(rows) - 1
    heights = _heights(2, machine)
    most, pairs, is_odd = heights[-1], -(-rows[last] // 2), rows[last] % 2

    def is_whole_tiles(n: int) -> bool:
        return any(n % height == 0 for height in heights)

    if is_odd or not is_whole_tiles(pairs):
        axis = next((n for n in [*range(last - 1, 0, -1), last, 0] if rows[n] % 2 == 0), last)
        if axis < last:
            return axis, rows[axis] // 2
    return last, next((n for n in range(pairs, 2 * pairs) if n <= most or is_whole_tiles(n)), pairs)


def _heights(vectors: int, machine: Registers) -> range:
    """Rows of register tiles of so many vectors that keep the cores busy: with sums enough for their latency, and not
    much fewer than there are registers for."""
    most = (machine.count - 1 - vectors) // vectors
    return range(max(most // 3 + 1, -(-_SUMS // vectors)), most + 1)


def summed(weight: np.ndarray, lanes: int) -> np.ndarray:
    """The seven sums of a weight's quarters: ... x K x N to 7 x K / 2 x N / 2.

    Args:
        lanes: Columns of a vector: every other one is of the right quarters.
    """
    depth, columns = weight.shape[-2:]
    vectors = weight.reshape(2, depth // 2, columns // (2 * lanes), 2, lanes)
    quarters = vectors.transpose(0, 3, 1, 2, 4).reshape(4, depth // 2, columns // 2)
    return np.stack([sum(sign * quarter for sign, quarter in zip(signs, quarters, strict=True) if sign)
                     for signs in WEIGHT])  # fmt: skip


def _summed(more: int, lanes: int, weight: np.ndarray) -> np.ndarray:
    """The same of a weight with `more` columns of zeros."""
    return summed(widen.padded(1, more, weight), lanes)


def product(data: te.Tensor, weight: te.Tensor, axis: int, pairs: int, lanes: int) -> te.Tensor:
    """The product of data, ... x K, with the sums of a weight's quarters, 7 x K / 2 x N / 2, as ... x N.

    Args:
        axis: Of the data, whose lines are paired.
        pairs: How many; where the axis has fewer lines than twice that, lines of zeros follow.
        lanes: As `summed` had it.
    """
    rows = [int(extent) for extent in data.shape[:-1]]
    n_products, half, columns = (int(extent) for extent in weight.shape)
    halved = [*rows[:axis], pairs, *rows[axis + 1 :]]
    beyond = [2 * pairs - rows[axis] if n == axis else 0 for n in range(len(rows))]
    padded = topi.nn.pad(data, [0] * (len(rows) + 1), [*beyond, 0], name="pad_temp") if any(beyond) else data
    apart = {"meta_schedule.inline_rule": "disable"}  # of what is read more often than it is computed

    def data_sum(r: tirx.Var, *at: tirx.Var) -> tirx.Expr:
        *row, k = at
        return _chosen(DATA, r, lambda q: padded(*_line(row, axis, q // 2), q % 2 * half + k))

    def result(*at: tirx.Var) -> tirx.Expr:
        *row, lower, vector, right, lane = at
        return _chosen(RESULT, lower * 2 + right, lambda r: products(r, *row, vector * lanes + lane))

    def joined(*at: tirx.Var) -> tirx.Expr:
        *row, column = at
        pair = [line // 2 if n == axis else line for n, line in enumerate(row)]
        return results(*pair, row[axis] % 2, column // (2 * lanes), column // lanes % 2, column % lanes)

    sums = te.compute((n_products, *halved, half), data_sum, name="data_sums", attrs=apart)
    k = te.reduce_axis((0, half), "k")
    products = te.compute(
        (n_products, *halved, columns),
        lambda r, *at: te.sum(sums(r, *at[:-1], k) * weight(r, k, at[-1]), axis=k),
        name="product",
    )
    results = te.compute((*halved, 2, columns // lanes, 2, lanes), result, name="results", attrs=apart)
    return te.compute((*rows, 2 * columns), joined, name=FUNCTION)


def _line(row: Sequence[tirx.Var], axis: int, second: int) -> list[tirx.Expr]:
    """Where the first or second line of a pair stands."""
    return [line * 2 + second if n == axis else line for n, line in enumerate(row)]


def _chosen(matrix: Sequence[Sequence[int]], which: tirx.Expr, term: Callable[[int], tirx.Expr]) -> tirx.Expr:
    """The sum of terms that a row of a matrix says; once the loops are unrolled, that of this row is left."""
    *others, last = [_sum(signs, term) for signs in matrix]
    value = last
    for n in reversed(range(len(others))):
        value = tirx.Select(tirx.EQ(which, n), others[n], value)
    return value


def _sum(signs: Sequence[int], term: Callable[[int], tirx.Expr]) -> tirx.Expr:
    """A sum of terms, each added, subtracted or left out, those that are added first."""
    first, *added = [term(n) for n, sign in enumerate(signs) if sign > 0]
    total = sum(added, first)
    for n, sign in enumerate(signs):
        total = total - term(n) if sign < 0 else total
    return total


def _emit(
    axis: int, pairs: int, lanes: int, builder: relax.BlockBuilder, call: relax.Call, args: Sequence[relax.Expr]
) -> relax.Expr:  # fmt: skip
    data, weight = args
    columns = shape_of(call)[-1]
    marks = patterns.marks(patterns.OUT_ELEMENTWISE)
    made = builder.call_te(
        product, data, weight, axis, pairs, lanes, primfunc_name_hint=FUNCTION, primfunc_attrs=marks
    )  # fmt: skip
    return made if shape_of(weight)[-1] * 2 == columns else widen.cut(builder, builder.emit(made), columns)
