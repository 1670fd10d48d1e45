"""What a model chooses by stays in float32: products whose results are sorted, and whose order decides what is read.

The nearest neighbours of a point, the experts of a token, the queries of a detector: rounded to bf16, distances and
scores change places, other rows are gathered, and what comes out is not less exact but something else. Such products
are small beside what is computed of what they choose.
"""

from collections.abc import Mapping

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph.fusion import Model
from lib.graph.rewrite import CONTRACTIONS, arguments, is_call, mutated

_CHOICES = tuple(f"relax.{name}" for name in ("topk", "argsort", "sort", "argmax", "argmin"))


def kept(model: Model) -> Model:
    """The model with products and convolutions that a choice depends on as functions in TIR, which no other rule takes
    for products; the same model if there are none."""
    products = {var for var, value in _decisive(model.module["main"]).items() if is_call(value, *CONTRACTIONS)}
    if not products:
        return model
    return Model(mutated(_Keeper(model.module, products), model.module), model.weights)


def tensors(function: relax.Function) -> set[relax.Var]:
    """What choices depend on, up to products, with what these read."""
    found = _decisive(function)
    return set(found) | {
        arg for value in found.values() if _is_product(value) for arg in arguments(value) if isinstance(arg, relax.Var)
    }


def _decisive(function: relax.Function) -> Mapping[relax.Var, relax.Expr]:
    """The tensors that choices depend on, with what they are bound to, back to the products that they come from."""
    values = {binding.var: binding.value for block in function.body.blocks for binding in block.bindings}
    used = _used(values)
    found: dict[relax.Var, relax.Expr] = {}
    left = [value.args[0] for var, value in values.items() if is_call(value, *_CHOICES) and var in used]
    while left:
        var = left.pop()
        if not isinstance(var, relax.Var) or var in found or var not in values:
            continue
        found[var] = values[var]
        if not _is_product(values[var]):
            left += arguments(values[var])
    return found


def _used(values: Mapping[relax.Var, relax.Expr]) -> set[relax.Var]:
    """The tensors and tuples that something is computed of; not those that the caller alone gets."""
    found: set[relax.Var] = set()
    for var, value in reversed(list(values.items())):
        is_part = isinstance(value, (relax.TupleGetItem, relax.Tuple, relax.Var))
        if not is_part or var in found:
            found.update(arg for arg in arguments(value) if isinstance(arg, relax.Var))
    return found


def _is_product(value: relax.Expr) -> bool:
    """A product, a convolution, or whatever became a function in TIR."""
    return is_call(value, *CONTRACTIONS, "relax.call_tir")


@mutator
class _Keeper(PyExprMutator):
    def __init__(self, module: tvm.IRModule, products: set[relax.Var]) -> None:
        super().__init__(module)
        self._products = products

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._products:
            super().visit_var_binding_(binding)
            return
        call = self.visit_expr(binding.value)
        made = call.op.get_attr("FLegalize")(self.builder_, call)
        self.set_var_remap(binding.var, self.builder_.emit(made))
