"""A few vectors times the rows of matrices that the model computes or chooses: read as they lie.

A decoder that writes a token at a time attends to its keys with one query. A kernel for many queries wants keys
transposed, and keys and values in whole vectors: copies that cost as much as the whole attention of one query does,
which reads each key and each value once. So scores are dot products of rows here, and in bf16 neither keys nor values
are rounded and packed for them. Where several heads of queries read one head of keys (Ainslie et al. 2023), exporters
write these keys and values once for each of them; here such queries are rows of one product.

A mixture of experts looks up the weights of a token's experts, and multiplies each matrix by one column. The lookup
copies megabytes which are read once; here they are read where they are.
"""

import math
from functools import partial

from tvm import relax, te, tirx
from tvm.relax import op

from lib.graph import packing, patterns, reweight
from lib.graph.fusion import Model, rewritten
from lib.graph.rewrite import Rewriter, Rule, dtype, rule, static_shape
from lib.graph.rules.movement import swaps_matrices

_FUNCTION = "dot_products"
_WIDE, _NARROW = "float32", "bfloat16"
_FEW = 8  # vectors: of more, a product in registers is worth a copy of the matrix
_MANY = (
    16  # rows of a matrix for each of several vectors: of fewer, as in windows of a few tokens, attention is one kernel
)


def read_as_they_lie(model: Model, *, is_narrow: bool) -> Model:
    """The model with scores of few queries, and matrices times columns, as dot products, and with keys that heads have
    in common not repeated for each; the same model if there is nothing of that.

    Args:
        is_narrow: Whether weights that are chosen are kept in bf16, as all others that are multiplied.
    """
    products = {"few_rows": _few_rows, "column": _column}
    rules = [Rule(name, ("relax.matmul",), partial(apply, is_narrow)) for name, apply in products.items()]
    return reweight.made_once(rewritten(model, [heads_together, *rules]))


@rule("relax.matmul", "relax.einsum")
def heads_together(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Of single queries the scores, or the sums of values, with one head of keys or values for several of queries."""
    shapes, shape = packing.of_activations(rewriter, call), rewriter.shape(call)
    if shapes is None or shape is None or shapes[0][-2] > 1:
        return None
    queries, heads = packing.factors(rewriter, call)
    moved = rewriter.calls(heads, "relax.permute_dims")
    is_turned = moved is not None and swaps_matrices(moved)
    shared = _shared(rewriter, moved.args[0] if moved is not None and is_turned else heads)
    if shared is None:
        return None
    *batch, _, _ = static_shape(shared) or ()
    n = len(batch)
    factor = op.permute_dims(shared, [*range(n), n + 1, n]) if is_turned else shared
    rows = rewriter.emit(op.reshape(queries, (*batch, -1, shapes[0][-1])))
    product = op.matmul(rows, rewriter.emit(factor), out_dtype=dtype(call))
    return op.reshape(rewriter.emit(product), shape)  # with a single query, in whichever order an einsum has its axes


def _shared(rewriter: Rewriter, heads: relax.Expr) -> relax.Expr | None:
    """Of (..., heads, m, c) what they are repeated from, (..., shared heads, m, c); None if they are not."""
    joined = rewriter.calls(heads, "relax.reshape")
    spread = rewriter.calls(joined.args[0], "relax.broadcast_to") if joined is not None else None
    if spread is None:
        return None
    source, wide = static_shape(spread.args[0]), static_shape(spread)
    if source is None or wide is None or len(wide) < 4:
        return None
    *outer, kept, each, rows, columns = wide
    if source != (*outer, kept, 1, rows, columns) or static_shape(heads) != (*outer, kept * each, rows, columns):
        return None
    return rewriter.emit(op.reshape(spread.args[0], (*outer, kept, rows, columns)))


def _few_rows(is_narrow: bool, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """q k^T, of activations, without the transpose."""
    shapes, moved = packing.of_activations(rewriter, call), rewriter.calls(call.args[1], "relax.permute_dims")
    if shapes is None or moved is None or not swaps_matrices(moved):
        return None
    queries, keys = shapes[0][-2], shapes[1][-1]
    if queries > _FEW or (queries > 1 and keys < _MANY * queries):
        return None
    return _dots(is_narrow, rewriter, call, call.args[0], moved.args[0])


def _column(is_narrow: bool, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Matrices that are chosen, times a column each."""
    matrices, columns = (static_shape(each) or () for each in call.args)
    if len(matrices) < 3 or columns[-1:] != (1,) or _chosen(rewriter, call.args[0]) is None:
        return None
    vectors = rewriter.emit(op.reshape(call.args[1], (*columns[:-2], 1, columns[-2])))
    each = rewriter.emit(op.broadcast_to(vectors, (*matrices[:-2], 1, columns[-2])))
    dots = _dots(is_narrow, rewriter, call, each, call.args[0])
    return None if dots is None else op.reshape(rewriter.emit(dots), (*matrices[:-1], 1))


def _chosen(rewriter: Rewriter, matrices: relax.Expr) -> tuple[relax.Expr, relax.Expr] | None:
    """What matrices are looked up in, (n, m, c), and which of them; None if they are not."""
    found = rewriter.calls(matrices, "relax.take")
    if found is None or found.attrs.axis is None or int(found.attrs.axis) != 0 or not rewriter.read_once(matrices):
        return None
    return (found.args[0], found.args[1]) if len(static_shape(found.args[0]) or ()) == 3 else None


def _dots(
    is_narrow: bool, rewriter: Rewriter, call: relax.Call, vectors: relax.Expr, matrices: relax.Expr
) -> relax.Expr | None:
    """(..., n, c) and (..., m, c) to (..., n, m), in place of a product; None unless all is float32."""
    if {dtype(call), dtype(vectors), dtype(matrices)} != {_WIDE}:
        return None
    *batch, rows, depth = static_shape(vectors) or ()
    n, columns, chosen = math.prod(batch), (static_shape(matrices) or ())[-2], _chosen(rewriter, matrices)
    given = [rewriter.emit(op.reshape(vectors, (n * rows, depth)))]
    if chosen is None:
        given.append(rewriter.emit(op.reshape(matrices, (n, columns, depth))))
    else:
        of, which = chosen
        given.append(rewriter.emit(op.astype(of, _NARROW)) if is_narrow else of)
        given.append(rewriter.emit(op.reshape(which, (n,))))
    dots = rewriter.builder_.call_te(
        partial(_dot_products, n), *given, primfunc_name_hint=_FUNCTION,
        primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE),
    )  # fmt: skip
    if rows == 1:
        return op.reshape(rewriter.emit(dots), (*batch, rows, columns))
    apart = rewriter.emit(op.reshape(rewriter.emit(dots), (*batch, columns, rows)))
    return op.permute_dims(apart, [*range(len(batch)), len(batch) + 1, len(batch)])


def _dot_products(n: int, vectors: te.Tensor, matrices: te.Tensor, which: te.Tensor | None = None) -> te.Tensor:
    """Of n matrices (n, m, c), and as many vectors for each of them (n * v, c): (n * m, v), so that each row of a
    matrix is read once, for all its vectors; or of matrices (k, m, c), of which each of the n is one.

    Two axes of results: TVM 0.27 loses how indices of three hang together, when their loops are one and split again.
    """
    every, depth = (int(extent) for extent in vectors.shape)
    n_matrices, rows, _ = (int(extent) for extent in matrices.shape)
    each = every // n

    def matrix(row: tirx.Var) -> tirx.Expr:
        if which is None:
            return row // rows
        first, last = (tirx.const(place, which.dtype) for place in (0, n_matrices - 1))
        return tirx.Max(tirx.Min(which[row // rows], last), first)

    products = te.compute(
        (n * rows, each, depth),
        lambda r, v, c: vectors[r // rows * each + v, c] * matrices[matrix(r), r % rows, c].astype(vectors.dtype),
    )
    turn = te.reduce_axis((0, depth), "c")
    return te.compute((n * rows, each), lambda r, v: te.sum(products(r, v, turn), axis=turn), name=_FUNCTION)
