"""Attention with as few copies as in the zoo's models: one product for query, key and value.

Shapes: b batch, n tokens, m tokens attended to, d width, h heads, s size of a head. Importers write three products of
(b, n, d) with weights (d, h s). One product with the weights side by side is faster than three, also than three that
write (b, h, n, s) at once (`benchmarks/projections.py`); its parts are copied once, when they are split into heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op, transform
from tvm.relax.analysis import udchain
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph.rewrite import Rewriter, Rule, constant, dtype, is_call, rule, static_shape, value_of
from lib.graph.rules.movement import has_few_rows
from lib.graph.rules.products import CONTEXT

_HEADS_FIRST = [0, 2, 1, 3]
_SMALLEST = 3  # layers that are worth a join


@rule("relax.permute_dims")
def context_by_tokens(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """The context of attention computed as (b, n, h, s), without a transpose."""
    product = rewriter.calls(call.args[0], "relax.matmul")
    if product is None or _order(call) != _HEADS_FIRST or not rewriter.read_once(call.args[0]):
        return None
    if not _same_heads(rewriter, *product.args):
        return None
    return op.einsum((product.args[0], product.args[1]), CONTEXT)


@rule("relax.matmul")
def tokens_apart(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """The output projection of attention: batch and tokens, which the importer joins, stay apart, unless tokens are so
    few that `movement.join_few_rows` would join them again."""
    joined = rewriter.calls(call.args[0], "relax.reshape")
    if joined is None or rewriter.calls(joined.args[0], "relax.einsum") is None or len(rewriter.shape(call) or ()) != 2:
        return None
    shape, after, result = rewriter.shape(joined.args[0]), rewriter.shape(call.args[0]), rewriter.shape(call)
    if shape is None or result is None or len(shape) != 4 or after != (shape[0] * shape[1], shape[2] * shape[3]):
        return None
    rows = (*shape[:2], shape[2] * shape[3])
    if has_few_rows(rows):
        return None
    apart = rewriter.emit(op.reshape(joined.args[0], rows))
    return op.reshape(rewriter.emit(op.matmul(apart, call.args[1], out_dtype=dtype(call))), result)


def _same_heads(rewriter: Rewriter, a: relax.Expr, b: relax.Expr) -> bool:
    """Whether both have four axes, the same two of them batches: no products with weights, none that broadcast."""
    shapes = rewriter.shape(a), rewriter.shape(b)
    if shapes[0] is None or shapes[1] is None or rewriter.value(a) is not None or rewriter.value(b) is not None:
        return False
    return len(shapes[0]) == len(shapes[1]) == 4 and shapes[0][:2] == shapes[1][:2]


def _order(call: relax.Call) -> list[int]:
    axes = call.attrs.axes
    return [] if axes is None else [int(axis) for axis in axes]


RULES: list[Rule] = [context_by_tokens, tokens_apart]


@dataclass(frozen=True, slots=True)
class _Layer:
    """`x @ weight + bias`, and the call whose value it is: of the sum, or of the product if there is no bias."""

    value: relax.Call
    weight: np.ndarray  # (in, out)
    bias: np.ndarray | None  # (out,)


def merge_projections(module: tvm.IRModule) -> tvm.IRModule:
    """Join three or more dense layers of one width that read one tensor; each then is a slice of the wide result.

    The slices cost nothing where heads are split next, since that copies in any case. Weights must be constants.
    """
    functions = {
        gvar: _Merger(function).visit_expr(function) if isinstance(function, relax.Function) else function
        for gvar, function in module.functions_items()
    }
    module = tvm.IRModule(functions, attrs=module.attrs)
    return transform.DeadCodeElimination()(transform.CanonicalizeBindings()(module))


def _groups(function: relax.Function) -> list[tuple[relax.Var, list[_Layer]]]:
    """Tensors that at least three dense layers of one width read, with those layers."""
    found = []
    for block in function.body.blocks:
        if not isinstance(block, relax.DataflowBlock):
            continue
        values = {binding.var: binding.value for binding in block.bindings}
        readers = udchain(block)
        for x, users in readers.items():
            layers = [layer for var in users if (layer := _layer(x, var, values, readers)) is not None]
            if len(layers) >= _SMALLEST and len({layer.weight.shape for layer in layers}) == 1:
                found.append((x, layers))
    return found


def _layer(x: relax.Var, var: relax.Var, values: Mapping, readers: Mapping) -> _Layer | None:
    """The dense layer whose product a variable is bound to."""
    product = values.get(var)
    if product is None or not is_call(product, "relax.matmul") or not product.args[0].same_as(x):
        return None
    weight = _constant(product.args[1])
    if weight is None or weight.ndim != 2:
        return None
    if dtype(product) != weight.dtype:
        return None  # of bytes: each has scales of its own
    users = list(readers.get(var, []))
    total = values.get(users[0]) if len(users) == 1 else None
    if total is not None and is_call(total, "relax.add") and total.args[0].same_as(var):
        bias = _constant(total.args[1])
        if bias is not None and bias.size == bias.shape[-1] == weight.shape[1]:
            return _Layer(total, weight, bias.reshape(-1))
    return _Layer(product, weight, None)


def _constant(expr: relax.Expr) -> np.ndarray | None:
    return value_of(expr) if isinstance(expr, tvm.ir.Constant) and expr.value.shape else None


@mutator
class _Merger(PyExprMutator):
    def __init__(self, function: relax.Function) -> None:
        super().__init__()
        self._parts = {layer.value: (x, n, layers) for x, layers in _groups(function) for n, layer in enumerate(layers)}
        self._merged: dict[relax.Var, relax.Var] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if call not in self._parts:
            return self.visit_expr_post_order(call)
        x, n, layers = self._parts[call]
        if x not in self._merged:
            self._merged[x] = self._emit_merged(self.visit_expr(x), layers)
        whole = self._merged[x]
        width = layers[n].weight.shape[1]
        last = len(static_shape(whole) or ()) - 1
        return op.strided_slice(whole, [last], [n * width], [(n + 1) * width], [1])

    def _emit_merged(self, x: relax.Expr, layers: list[_Layer]) -> relax.Var:
        weight = np.concatenate([layer.weight for layer in layers], axis=1)
        product = self.builder_.emit(op.matmul(x, constant(weight)))
        if all(layer.bias is None for layer in layers):
            return product
        none = np.zeros_like(weight[0, : layers[0].weight.shape[1]])  # as Whisper's keys have
        biases = [none if layer.bias is None else layer.bias for layer in layers]
        return self.builder_.emit(op.add(product, constant(np.concatenate(biases))))
