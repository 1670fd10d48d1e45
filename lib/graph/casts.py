"""Casts from narrow element types where they are read: a tensor is stored as narrow as it is computed."""

import math

import tvm
from tvm import relax
from tvm.relax import op, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph.rewrite import OF_BYTES, dtype, is_call, mutated, static_shape

_NARROW, _WIDE = ("bfloat16", *OF_BYTES), "float32"
_OF_UNITS = ("relax.subtract", "relax.multiply")  # of bytes: their zero point, and their scale


def by_readers(module: tvm.IRModule) -> tvm.IRModule:
    """Each reader of bytes, or of bf16, widens them for itself, and counts them from their zero point in units of their
    scale, which costs it nothing: who does it for others, be it the kernel that makes them, would have to write them
    wide. After the elimination of common expressions."""
    return transform.DeadCodeElimination()(mutated(_Widener(module), module))


@mutator
class _Widener(PyExprMutator):
    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        found = [self._widened(arg) for arg in call.args]
        args = [arg if new is None else new for arg, new in zip(call.args, found, strict=True)]
        if all(new is arg for new, arg in zip(args, call.args, strict=True)):
            return call
        return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)

    def _widened(self, arg: relax.Expr) -> relax.Expr | None:
        """The same once more, of what is narrow; None of all else."""
        call = self.lookup_binding(arg) if isinstance(arg, relax.Var) else None
        if not isinstance(call, relax.Call) or dtype(arg) != _WIDE:
            return None
        if is_call(call, "relax.astype"):
            return self.builder_.emit(op.astype(call.args[0], _WIDE)) if dtype(call.args[0]) in _NARROW else None
        number = static_shape(call.args[1]) if is_call(call, *_OF_UNITS) else None
        if number is None or math.prod(number) != 1:
            return None
        wide = self._widened(call.args[0])
        return None if wide is None else self.builder_.emit(relax.Call(call.op, [wide, call.args[1]], call.attrs))
