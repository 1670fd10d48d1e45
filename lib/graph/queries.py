"""Attention of one query, as a decoder has it that writes a token at a time: keys are read as they lie.

A kernel for many queries wants keys transposed, and keys and values in whole vectors: copies that cost as much as the
whole attention of one query does, which reads each key and each value once. So scores are dot products of rows here,
and in bf16 neither keys nor values are rounded and packed for them.
"""

import math

from tvm import relax, te
from tvm.relax import op

from lib.graph import packing, patterns
from lib.graph.fusion import Model, rewritten
from lib.graph.rewrite import Rewriter, dtype, rule
from lib.graph.rules.movement import swaps_matrices

_FUNCTION = "dot_products"
_WIDE = "float32"


def of_one(model: Model) -> Model:
    """The model with scores of single queries as dot products; the same model if there are none."""
    return rewritten(model, [dot_products])


@rule("relax.matmul")
def dot_products(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """q k^T, of activations, without the transpose."""
    shapes, moved = packing.of_activations(rewriter, call), rewriter.calls(call.args[1], "relax.permute_dims")
    if shapes is None or moved is None or not swaps_matrices(moved) or shapes[0][-2] > 1:
        return None
    if {dtype(call), dtype(call.args[0])} != {_WIDE}:
        return None
    *batch, _, depth = shapes[0]
    apart = [rewriter.emit(op.reshape(each, (math.prod(batch), -1, depth))) for each in (call.args[0], moved.args[0])]
    scores = rewriter.builder_.call_te(
        _dot_products, *apart, primfunc_name_hint=_FUNCTION, primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE)
    )
    return op.reshape(rewriter.emit(scores), (*batch, 1, shapes[1][-1]))


def _dot_products(queries: te.Tensor, keys: te.Tensor) -> te.Tensor:
    """(b, n, c) and (b, m, c) to (b, n, m)."""
    batch, rows, depth = queries.shape
    products = te.compute((batch, rows, keys.shape[1], depth), lambda b, n, m, c: queries[b, n, c] * keys[b, m, c])
    turn = te.reduce_axis((0, depth), "c")
    return te.compute(products.shape[:-1], lambda *at: te.sum(products(*at, turn), axis=turn), name=_FUNCTION)
