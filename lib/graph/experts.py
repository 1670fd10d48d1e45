"""Rows times the weights of the expert that each was sent to: the products of a mixture of experts, for fixed shapes.

How many rows an expert gets depends on values, their sum does not. Rows come sorted by their expert, so a tile of a few
neighbours nearly always has one expert: each expert's rows are cut into tiles of `Tiles.rows`, of which the last may be
part empty, and the number of tiles is bounded however the rows are spread. Then one contraction computes all of them,
with weights that a table of tiles looks up; as in vLLM's `moe_align_block_size` for GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tvm import relax, te, tirx
from tvm.relax import op

from lib.graph import patterns
from lib.graph.reweight import shape_of

FUNCTION = "grouped_matmul"  # in the names of the functions, for people
_ROWS = (1, 2, 4)
_ENOUGH = 3  # rows of a tile, from which on multiplying takes longer than reading the weights


@dataclass(frozen=True, slots=True)
class Tiles:
    """How rows are cut."""

    rows: int  # of a tile
    count: int  # that suffices for any spread of the rows

    @classmethod
    def of(cls, rows: int, experts: int) -> "Tiles":
        """Those of which all together take least time: empty places of a tile are multiplied as well, but a tile of few
        rows reads its weights for little."""
        used = min(rows, experts)
        found = [cls(n, (rows - used) // n + used) for n in _ROWS]
        return min(found, key=lambda tiles: tiles.count * max(tiles.rows, _ENOUGH))


def emit(builder: relax.BlockBuilder, rows: relax.Expr, weight: relax.Expr, ends: relax.Expr, lanes: int) -> relax.Var:
    """The products.

    Args:
        rows: `S x K`, sorted by expert.
        weight: `E x K x N`.
        ends: `E`, whole numbers: where the rows of each expert end.
        lanes: Of a vector. Weights are put in blocks of so many columns as a register tile has, to be read in order.

    Returns:
        `S x N`; zeros for rows beyond the last end.
    """
    (n_rows, depth), (experts, _, columns) = shape_of(rows), shape_of(weight)
    tiles = Tiles.of(n_rows, experts)
    block = next((n for n in (2 * lanes, lanes) if columns % n == 0), columns)
    packed = builder.emit(op.reshape(weight, (experts, depth, columns // block, block)))
    packed = builder.emit(op.permute_dims(packed, (0, 2, 1, 3)))
    plan = builder.emit(builder.call_te(partial(_plan, tiles, n_rows), ends, primfunc_name_hint="tiles_of_experts"))
    expert, source, place = (builder.emit(relax.TupleGetItem(plan, n)) for n in range(3))
    in_tiles = builder.emit(op.take(rows, source, axis=0, mode="clip"))
    in_tiles = builder.emit(op.reshape(in_tiles, (tiles.count, tiles.rows, depth)))
    made = builder.emit(builder.call_te(
        products, in_tiles, packed, expert,
        primfunc_name_hint=FUNCTION, primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE),
    ))  # fmt: skip
    made = builder.emit(op.reshape(made, (tiles.count * tiles.rows, columns)))
    return builder.emit(builder.call_te(_back, made, place, primfunc_name_hint="from_tiles"))


def _plan(tiles: Tiles, n_rows: int, ends: te.Tensor) -> Sequence[te.Tensor]:
    """The expert of each tile; the row in each place of the tiles, any where there is none; the place of each row, -1
    where it has no expert."""
    experts, rows = ends.shape[0], _long(tiles.rows)
    last, zero, one = experts - 1, _long(0), _long(1)
    end = te.compute(ends.shape, lambda e: ends[e].astype("int64"), "end")
    begin = te.compute(ends.shape, lambda e: tirx.if_then_else(e > 0, end[tirx.max(e - 1, zero)], zero), "begin")
    needed = te.compute(ends.shape, lambda e: (end[e] - begin[e] + rows - 1) // rows, "needed")
    each, among, over = (te.reduce_axis((0, experts), name) for name in ("each", "among", "over"))

    def first_of(e: tirx.Var) -> tirx.Expr:
        return te.sum(tirx.if_then_else(each < e, needed[each], zero), axis=each)

    first = te.compute(ends.shape, first_of, "first")  # tile of each expert

    def expert_of(t: tirx.Var) -> tirx.Expr:
        is_over = tirx.all(among < last, first[among] + needed[among] <= t)
        return te.sum(tirx.if_then_else(is_over, one, zero), axis=among)

    expert = te.compute([_long(tiles.count)], expert_of, "expert")

    def source(n: tirx.Var) -> tirx.Expr:
        tile, of = n // rows, expert[n // rows]
        row = begin[of] + (tile - first[of]) * rows + n % rows
        return tirx.max(tirx.min(row, _long(n_rows - 1)), zero)

    owner = te.compute(
        [_long(n_rows)], lambda s: te.sum(tirx.if_then_else(end[over] <= s, one, zero), axis=over), "owner"
    )

    def place(s: tirx.Var) -> tirx.Expr:
        of = tirx.min(owner[s], last)
        return tirx.if_then_else(owner[s] > last, _long(-1), first[of] * rows + s - begin[of])

    return [
        expert,
        te.compute([_long(tiles.count) * rows], source, "source"),
        te.compute([_long(n_rows)], place, "place"),
    ]


def _long(n: int) -> tirx.IntImm:
    return tirx.IntImm("int64", n)


def products(rows: te.Tensor, weight: te.Tensor, expert: te.Tensor) -> te.Tensor:
    """Tiles of rows `P x T x K` by blocks of columns of weights `E x N/V x K x V`: `P x T x N/V x V`."""
    count, n, depth = rows.shape
    _, blocks, _, length = weight.shape
    k = te.reduce_axis((0, depth), "k")
    return te.compute(
        (count, n, blocks, length),
        lambda t, i, block, column: te.sum(rows[t, i, k] * weight[expert[t], block, k, column], axis=k),
        FUNCTION,
    )


def _back(tiles: te.Tensor, place: te.Tensor) -> te.Tensor:
    """Each row from its place, in the order of the rows."""
    return te.compute(
        (place.shape[0], tiles.shape[1]),
        lambda s, n: tirx.if_then_else(place[s] < 0, 0.0, tiles[tirx.max(place[s], _long(0)), n]),
        "from_tiles",
    )
