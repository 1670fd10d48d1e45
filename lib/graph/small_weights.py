"""How small a model's weights are (`lib.tir.small_weights`): noted while their values are known, marked in TIR."""

from collections.abc import Mapping

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph.rewrite import is_call, mutated
from lib.tir import small_weights

_NOTE = "small_weights"  # attribute of `main`: of parameters, by name, how many words are added together


def noted(module: tvm.IRModule, words: Mapping[str, int]) -> tvm.IRModule:
    """A module whose `main` says which of its parameters are small weights, and how small."""
    function = module["main"].with_attr(_NOTE, dict(words))
    functions = {gvar: function if gvar.name_hint == "main" else f for gvar, f in module.functions_items()}
    return tvm.IRModule(functions, attrs=module.attrs)


def marked(module: tvm.IRModule) -> tvm.IRModule:
    """A module in which what reads such weights is marked; after operators were lowered to TIR."""
    words = {str(name): int(n) for name, n in dict((module["main"].attrs or {}).get(_NOTE, {})).items()}
    return mutated(_Marker(module, words), module) if words else module


@mutator
class _Marker(PyExprMutator):
    def __init__(self, module: tvm.IRModule, words: Mapping[str, int]) -> None:
        super().__init__(module)
        self._module, self._words = module, words

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        words = self._words_of(call) if is_call(call, "relax.call_tir") else 0
        if not words:
            return call
        gvar, *others = call.args
        marked = self.builder_.add_func(small_weights.marked(self._module[gvar], words), gvar.name_hint)
        return relax.Call(call.op, [marked, *others], call.attrs, call.ty_args)

    def _words_of(self, call: relax.Call) -> int:
        """Of the small weights that a call reads; 0 if there are none."""
        names = (str(each.name) for each in call.args[1].fields if isinstance(each, relax.Var))
        return next((self._words[name] for name in names if name in self._words), 0)
