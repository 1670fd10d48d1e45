"""Dense layers that read the same tensor, as one: the query, key and value projections of an attention."""

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op, transform
from tvm.relax.analysis import udchain
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.rewrite import constant, is_call, static_shape, value_of

_SMALLEST = 3  # layers that are worth a join


@dataclass(frozen=True, slots=True)
class _Layer:
    """`x @ weight + bias`, and the call whose value it is: of the sum, or of the product if there is no bias."""

    value: relax.Call
    weight: np.ndarray  # (in, out)
    bias: np.ndarray | None  # (out,)


def merge_projections(module: tvm.IRModule) -> tvm.IRModule:
    """Join dense layers of equal widths that read one tensor; each then is a slice of the wide result.

    A wide product uses the cores better and reads its input once; the slices cost nothing where the heads are
    split next, since that copies in any case. Weights must be constants.
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
            widths = {(layer.weight.shape, layer.bias is None) for layer in layers}
            if len(layers) >= _SMALLEST and len(widths) == 1:
                found.append((x, layers))
    return found


def _layer(x: relax.Var, var: relax.Var, values: dict, readers: dict) -> _Layer | None:
    """The dense layer whose product a variable is bound to."""
    product = values.get(var)
    if not is_call(product, "relax.matmul") or not product.args[0].same_as(x):
        return None
    weight = product.args[1]
    if not isinstance(weight, tvm.ir.Constant) or len(static_shape(weight) or ()) != 2:
        return None
    users = list(readers.get(var, []))
    total = values.get(users[0]) if len(users) == 1 else None
    if is_call(total, "relax.add") and total.args[0].same_as(var) and isinstance(total.args[1], tvm.ir.Constant):
        bias = value_of(total.args[1])
        if bias.size == value_of(weight).shape[1]:
            return _Layer(total, value_of(weight), bias.reshape(-1))
    return _Layer(product, value_of(weight), None)


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
        last = len(static_shape(whole)) - 1
        return op.strided_slice(whole, [last], [n * width], [(n + 1) * width], [1])

    def _emit_merged(self, x: relax.Expr, layers: list[_Layer]) -> relax.Var:
        weight = np.concatenate([layer.weight for layer in layers], axis=1)
        product = self.builder_.emit(op.matmul(x, constant(weight)))
        if layers[0].bias is None:
            return product
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return self.builder_.emit(op.add(product, constant(np.concatenate(biases))))
