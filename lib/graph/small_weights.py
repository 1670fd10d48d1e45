"""Which weights of a model are small (`lib.tir.small_weights`): noted while their values are known, marked in TIR."""

from collections.abc import Collection

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph.rewrite import is_call, mutated
from lib.tir import small_weights

_NOTE = "small_weights"  # attribute of `main`: names of parameters


def noted(module: tvm.IRModule, names: Collection[str]) -> tvm.IRModule:
    """A module whose `main` says which of its parameters are small weights."""
    function = module["main"].with_attr(_NOTE, sorted(names))
    functions = {gvar: function if gvar.name_hint == "main" else f for gvar, f in module.functions_items()}
    return tvm.IRModule(functions, attrs=module.attrs)


def marked(module: tvm.IRModule) -> tvm.IRModule:
    """A module in which what reads such weights is marked; after operators were lowered to TIR."""
    names = {str(name) for name in (module["main"].attrs or {}).get(_NOTE, [])}
    return mutated(_Marker(module, names), module) if names else module


@mutator
class _Marker(PyExprMutator):
    def __init__(self, module: tvm.IRModule, names: Collection[str]) -> None:
        super().__init__(module)
        self._module, self._names = module, names

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        if not is_call(call, "relax.call_tir") or not any(map(self._is_small, call.args[1].fields)):
            return call
        gvar, *others = call.args
        marked = self.builder_.add_func(small_weights.marked(self._module[gvar]), gvar.name_hint)
        return relax.Call(call.op, [marked, *others], call.attrs, call.ty_args)

    def _is_small(self, argument: relax.Expr) -> bool:
        return isinstance(argument, relax.Var) and str(argument.name) in self._names
