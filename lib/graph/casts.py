"""Casts from narrow element types where they are read: a tensor is stored as narrow as it is computed."""

import tvm
from tvm import relax
from tvm.relax import op, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph.rewrite import dtype, is_call, mutated

_NARROW, _WIDE = ("bfloat16", "uint8", "int8"), "float32"


def by_readers(module: tvm.IRModule) -> tvm.IRModule:
    """Each reader of bytes, or of bf16, widens them for itself, which costs it nothing: who does it for others, be it
    the kernel that makes them, would have to write them wide. After the elimination of common expressions."""
    return transform.DeadCodeElimination()(mutated(_Widener(module), module))


@mutator
class _Widener(PyExprMutator):
    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        args = [self._widened(arg) for arg in call.args]
        if all(new is arg for new, arg in zip(args, call.args, strict=True)):
            return call
        return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)

    def _widened(self, arg: relax.Expr) -> relax.Expr:
        cast = self.lookup_binding(arg) if isinstance(arg, relax.Var) else None
        if cast is None or not is_call(cast, "relax.astype") or dtype(arg) != _WIDE:
            return arg
        if dtype(cast.args[0]) not in _NARROW:
            return arg
        return self.builder_.emit(op.astype(cast.args[0], _WIDE))
