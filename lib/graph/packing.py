"""Products of two activations in narrow elements, as attention has them: the second factor is packed when made.

An instruction of `lib.machine.dots` takes several neighbours along the reduction for each lane. Weights are brought
into that order when a library is compiled. Keys and values are known at run time alone, but they are copied in any
case, when they are split into heads; that copy writes (..., k / depth, columns, depth) instead of (..., k, columns),
with columns of zeros up to whole vectors. The epilogue drops what those give, and adds the products that do not fill an
instruction: data of an odd length are read as they are.
"""

from collections.abc import Sequence
from functools import partial

from tvm import relax, te, tirx
from tvm.relax import op

from lib.graph import patterns, widen
from lib.graph.fusion import Model, rewritten
from lib.graph.rewrite import Rewriter, Rule, dtype, static_shape
from lib.graph.rules.products import CONTEXT
from lib.machine.dots import Dot
from lib.machine.registers import narrowed

FUNCTION = "packed_product"  # name of the functions, for people
_FEWEST_ROWS = 8  # for which columns are copied to get more of them, which parts of vectors would fill


def pack(model: Model, dot: Dot, lanes: int, given: tuple[str, str] | None = None) -> Model:
    """The model with its products of two activations, of one batch each, as an instruction takes them; the same model
    if it has none.

    Args:
        lanes: Of the machine's vectors.
        given: The element types of the factors as they are, if they are to be cast; else they have those of the
            instruction.
    """
    types = given or (dot.data, dot.weights)
    rules = [Rule(FUNCTION, ("relax.matmul", "relax.einsum"), partial(_packed, dot, lanes, types))]
    return rewritten(model, rules)


def of_activations(rewriter: Rewriter, call: relax.Call) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of a product's factors if they have the same batch, and neither is a parameter; else None."""
    found = factors(rewriter, call)
    if len(found) != 2 or any(isinstance(rewriter.definition(each), relax.Var) for each in found):
        return None
    if any(rewriter.value(each) is not None for each in found):
        return None
    data, weight = (static_shape(each) or () for each in found)
    return (data, weight) if len(data) >= 3 and len(data) == len(weight) and data[:-2] == weight[:-2] else None


def with_whole_vectors(model: Model, lanes: int) -> Model:
    """The model with its products of two activations to columns that fill no whole vectors, as those of a few tokens or
    of heads of 10 or 24 elements, to whole vectors of them, where that is faster; see `lib.graph.widen`."""
    return rewritten(model, [Rule("whole_vectors", ("relax.matmul", "relax.einsum"), partial(_whole_vectors, lanes))])


def _whole_vectors(lanes: int, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    shapes, found = of_activations(rewriter, call), factors(rewriter, call)
    if shapes is None or dtype(call) not in widen.SUMS or tuple(map(dtype, found)) != (dtype(call),) * 2:
        return None
    (*_, rows, _), (*_, columns) = shapes
    more = widen.computed(columns, lanes) - columns
    if columns == 1 or not more or (columns > lanes and rows < _FEWEST_ROWS):
        return None
    wide = rewriter.emit(op.nn.pad(found[1], [0, 0] * (len(shapes[1]) - 1) + [0, more], "constant", 0.0))
    by_rows = call.op.name == "relax.einsum"
    product = op.einsum([found[0], wide], CONTEXT) if by_rows else op.matmul(found[0], wide, out_dtype=dtype(call))
    return widen.cut(rewriter.builder_, rewriter.emit(product), columns)


def factors(rewriter: Rewriter, call: relax.Call) -> Sequence[relax.Expr]:
    """Those of a product; empty for an einsum that is not the one of attention."""
    if call.op.name == "relax.matmul":
        return list(call.args)
    return (rewriter.fields(call.args[0]) or []) if str(call.attrs.subscripts) == CONTEXT else []


def _packed(dot: Dot, lanes: int, given: tuple[str, str], rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    shapes, found = of_activations(rewriter, call), factors(rewriter, call)
    if shapes is None or tuple(map(dtype, found)) != given or dtype(call) != dot.sums:
        return None
    depth, columns = shapes[0][-1], shapes[1][-1]
    if depth < dot.depth or narrowed(lanes, columns) == 1:
        return None  # of such columns, results could not be written in vectors
    is_rounded = given != (dot.data, dot.weights)
    if is_rounded and shapes[0][-2] == 1:
        return None  # it takes longer to pack the other factor than to multiply with it
    data, weight = found
    if is_rounded:
        data, weight = (
            rewriter.emit(op.astype(each, kind)) for each, kind in ((data, dot.data), (weight, dot.weights))
        )
    whole = depth - depth % dot.depth
    rows = rewriter.emit(op.strided_slice(weight, [-2], [0], [whole])) if whole < depth else weight
    if more := -columns % lanes:
        rows = rewriter.emit(op.nn.pad(rows, [0, 0] * (len(shapes[1]) - 1) + [0, more], "constant", 0.0))
    arguments = [data, interleaved(rewriter, rows, dot.depth)]
    if whole < depth:
        arguments.append(rewriter.emit(op.strided_slice(weight, [-2], [whole], [depth])))
    product = rewriter.builder_.call_te(
        partial(_product, dot, call.op.name == "relax.einsum"), *arguments,
        primfunc_name_hint=FUNCTION, primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE),
    )  # fmt: skip
    if whole < depth or not columns % lanes:
        return product
    return widen.cut(rewriter.builder_, rewriter.emit(product), columns)


def interleaved(rewriter: Rewriter, weight: relax.Expr, depth: int) -> relax.Expr:
    """A tensor (..., k, columns) as (..., k / depth, columns, depth)."""
    *batch, k, columns = static_shape(weight) or ()
    apart = rewriter.emit(op.reshape(weight, (*batch, k // depth, depth, columns)))
    n = len(batch)
    return rewriter.emit(op.permute_dims(apart, [*range(n), n, n + 2, n + 1]))


def _product(dot: Dot, by_rows: bool, data: te.Tensor, packed: te.Tensor, rest: te.Tensor | None = None) -> te.Tensor:
    """Data (..., n, k) times packed columns, and times the rows of (..., k, columns) that are left over, if any; as
    (b, n, h, columns) of (b, h, n, k) if `by_rows`."""
    *batch, rows, _ = data.shape
    pairs, columns = packed.shape[-3], packed.shape[-2]
    turn = te.reduce_axis((0, pairs * dot.depth), "k")

    def shape(last: tirx.Expr) -> list[tirx.Expr]:
        return [batch[0], rows, *batch[1:], last] if by_rows else [*batch, rows, last]

    def row_of(outer: Sequence[tirx.Expr]) -> Sequence[tirx.Expr]:
        """The index of a row of the data; all but the last are those of a batch."""
        return [outer[0], *outer[2:], outer[1]] if by_rows else outer

    def times(left: tirx.Expr, right: tirx.Expr) -> tirx.Expr:
        return left.astype(dot.sums) * right.astype(dot.sums)

    def at(*index: tirx.Var) -> tirx.Expr:
        row = row_of(index[:-1])
        weight = packed(*row[:-1], turn // dot.depth, index[-1], turn % dot.depth)
        return te.sum(times(data(*row, turn), weight), axis=turn)

    sums = te.compute(shape(columns), at, name=FUNCTION)
    if rest is None:
        return sums

    def with_rest(*index: tirx.Var) -> tirx.Expr:
        row, total = row_of(index[:-1]), sums(*index)
        for n in range(int(rest.shape[-2])):
            total += times(data(*row, pairs * dot.depth + n), rest(*row[:-1], n, index[-1]))
        return total

    return te.compute(shape(rest.shape[-1]), with_rest, name=f"{FUNCTION}_rest")
