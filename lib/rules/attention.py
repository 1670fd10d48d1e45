"""Attention without moving data: the products themselves read and write heads where they lie.

Shapes: b batch, n tokens, m tokens attended to, d width, h heads, s size of a head. Importers write a projection as
a product of (b, n, d) and (d, h s), a reshape to (b, n, h, s) and a transpose to (b, h, n, s), which copies. A
product whose result is (b, h, n, s) at once needs neither. The zoo's attention is written so from the start.
"""

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from lib.rewrite import Graph, Rule, constant, rule

_HEADS_FIRST, _SIZES_FIRST, _LAST_TWO = [0, 2, 1, 3], [0, 2, 3, 1], [0, 1, 3, 2]


@rule("relax.strided_slice")
def part_of_projection(graph: Graph, call: relax.Call) -> relax.Expr | None:
    """A slice of all projections as a projection of its own: (x @ w + b)[..., i:j] is x @ w[:, i:j] + b[i:j]."""
    shape, whole = graph.shape(call), graph.shape(call.args[0])
    found = _projection(graph, call.args[0])
    if found is None or shape is None or whole is None or shape[:-1] != whole[:-1]:
        return None
    axes, begin, end = (_numbers(argument) for argument in call.args[1:4])
    strides = _numbers(call.args[4]) if len(call.args) > 4 else [1]
    if axes is None or begin is None or end is None or [axis % len(whole) for axis in axes] != [len(whole) - 1]:
        return None
    if strides != [1] or begin[0] < 0 or end[0] < 0:
        return None
    x, weight, bias = found
    product = op.matmul(x, constant(weight[:, begin[0] : end[0]]))
    return product if bias is None else op.add(graph.emit(product), constant(bias[begin[0] : end[0]]))


@rule("relax.permute_dims")
def project_to_heads(graph: Graph, call: relax.Call) -> relax.Expr | None:
    """(b, n, d) @ (d, h s), split into heads and transposed, as one product with the result (b, h, n, s)."""
    order = _order(call)
    split = graph.calls(call.args[0], "relax.reshape")
    shape = graph.shape(call.args[0])
    if order not in (_HEADS_FIRST, _SIZES_FIRST) or split is None or shape is None:
        return None
    found = _projection(graph, split.args[0]) if graph.read_once(call.args[0]) else None
    before = graph.shape(split.args[0])
    if found is None or before is None or len(before) != 3 or before[:2] != shape[:2]:
        return None
    x, weight, bias = found
    _, _, heads, size = shape
    y = graph.emit(op.einsum((x, constant(weight.reshape(-1, heads, size))), "bnd,dhs->bhns"))
    if bias is not None:
        y = graph.emit(op.add(y, constant(bias.reshape(heads, 1, size))))
    return y if order == _HEADS_FIRST else op.permute_dims(y, _LAST_TWO)


@rule("relax.matmul")
def scores_by_rows(graph: Graph, call: relax.Call) -> relax.Expr | None:
    """Products of queries and transposed keys as sums over both their rows."""
    keys = graph.calls(call.args[1], "relax.permute_dims")
    if keys is None or _order(keys) != _LAST_TWO or not _same_heads(graph, *call.args):
        return None
    return op.einsum((call.args[0], keys.args[0]), "bhns,bhms->bhnm")


@rule("relax.permute_dims")
def context_by_tokens(graph: Graph, call: relax.Call) -> relax.Expr | None:
    """What attention gathered, as (b, n, h, s) at once."""
    product = graph.calls(call.args[0], "relax.matmul")
    if product is None or _order(call) != _HEADS_FIRST or not graph.read_once(call.args[0]):
        return None
    if not _same_heads(graph, *product.args):
        return None
    return op.einsum((product.args[0], product.args[1]), "bhnm,bhms->bnhs")


@rule("relax.matmul")
def project_from_heads(graph: Graph, call: relax.Call) -> relax.Expr | None:
    """(b, n, h s) @ (h s, d) over the heads as they are: no reshape comes before."""
    joined = graph.calls(call.args[0], "relax.reshape")
    weight = graph.value(call.args[1])
    context = None if joined is None else graph.calls(joined.args[0], "relax.einsum")
    if joined is None or context is None or weight is None or weight.ndim != 2:
        return None
    shape, after = graph.shape(joined.args[0]), graph.shape(call.args[0])
    if shape is None or after is None or len(shape) != 4 or after[-1] != shape[2] * shape[3]:
        return None
    by_head = constant(weight.reshape(shape[2], shape[3], -1))
    product = op.einsum((joined.args[0], by_head), "bnhs,hsd->bnd")
    if after[:-1] == shape[:2]:
        return product
    return op.reshape(graph.emit(product), (*after[:-1], weight.shape[1]))  # batch and tokens were joined, too


def _projection(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, np.ndarray, np.ndarray | None] | None:
    """x, weight and bias of a dense layer of constants over (b, n, d)."""
    bias = None
    total = graph.calls(expr, "relax.add")
    if total is not None:
        bias, expr = graph.value(total.args[1]), total.args[0]
    product = graph.calls(expr, "relax.matmul")
    if product is None or (total is not None and (bias is None or not graph.read_once(expr))):
        return None
    weight, shape = graph.value(product.args[1]), graph.shape(product.args[0])
    if weight is None or weight.ndim != 2 or shape is None or len(shape) != 3:
        return None
    if bias is not None and (bias.shape[-1:] != weight.shape[1:] or bias.size != weight.shape[1] or bias.ndim > 3):
        return None
    return product.args[0], weight, None if bias is None else bias.reshape(-1)


def _same_heads(graph: Graph, a: relax.Expr, b: relax.Expr) -> bool:
    """Whether both have four axes, the same two of them batches: no products with weights, none that broadcast."""
    shapes = graph.shape(a), graph.shape(b)
    if shapes[0] is None or shapes[1] is None or graph.value(a) is not None or graph.value(b) is not None:
        return False
    return len(shapes[0]) == len(shapes[1]) == 4 and shapes[0][:2] == shapes[1][:2]


def _order(call: relax.Call) -> list[int]:
    axes = call.attrs.axes
    return [] if axes is None else [int(axis) for axis in axes]


def _numbers(expr: relax.Expr) -> list[int] | None:
    """The integers of a tuple of scalars, as slices have them."""
    if not isinstance(expr, relax.Tuple):
        return None
    if not all(isinstance(field, tvm.tirx.IntImm) for field in expr.fields):
        return None
    return [int(field.value) for field in expr.fields]


RULES: list[Rule] = [part_of_projection, project_to_heads, scores_by_rows, context_by_tokens, project_from_heads]
