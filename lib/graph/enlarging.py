"""Sums of images that were made larger, as kernels of their own.

FuseOps takes a sum with a convolution's result as the epilogue of that, and with it every sum before, so that each of
the enlarged images would be written, and read again there. Where images of several sizes come together, as in the heads
of segmentation models, they are enlarged and summed in one kernel here, and an epilogue reads one image.
"""

import tvm
from tvm import relax, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph import patterns
from lib.graph.concatenation import called
from lib.graph.rewrite import is_call, mutated

_FUNCTION = "enlarged_sum"


def summed(module: tvm.IRModule) -> tvm.IRModule:
    """Sums of enlarged images as functions that FuseOps joins with what enlarges them; before LegalizeOps."""
    return mutated(_Adder(module), module)


@mutator
class _Adder(PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        if not is_call(call, "relax.add") or not all(map(self._is_enlarged, call.args)):
            return call
        attrs = patterns.marks(patterns.INJECTIVE)
        return self.builder_.call_te(topi.add, *call.args, primfunc_name_hint=_FUNCTION, primfunc_attrs=attrs)

    def _is_enlarged(self, expr: relax.Expr) -> bool:
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        if value is None or is_call(value, "relax.image.resize2d"):
            return value is not None
        found = called(value)
        return found is not None and patterns.marked(self.builder_.get()[found[0]]) == patterns.INJECTIVE
