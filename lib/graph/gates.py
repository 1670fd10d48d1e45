"""Gates on images, as squeeze and excitation or instance norms have them, as kernels of their own.

FuseOps takes the product of an image with a gate for each channel as the epilogue of the small convolution that makes
the gate. The loops of that have one pixel and its channels to share out, so that each thread would take some channels
of all pixels: cache lines that lie apart, most of which another thread wrote, and which the next kernel's threads have
to fetch from each other again. As a kernel of its own the product is shared out by lines, as what is before and after.
"""

import math

import tvm
from tvm import relax, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph import patterns
from lib.graph.concatenation import called
from lib.graph.rewrite import CONTRACTIONS, is_call, mutated, static_shape

_FUNCTION = "gate"
_SUMS = ("relax.sum", "relax.mean")
_SPREAD = tuple(f"relax.{name}" for name in ("add", "multiply", "divide", "sqrt", "rsqrt", "reshape", "broadcast_to"))
_MUCH_SMALLER = 8  # times: the gate of a few pixels may as well be an epilogue


def apart(module: tvm.IRModule) -> tvm.IRModule:
    """Products with a gate as functions that FuseOps gives epilogues, but does not make one; before LegalizeOps."""
    return mutated(_Separator(module), module)


@mutator
class _Separator(PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self._module = module

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        size = _size(call)
        if not is_call(call, "relax.multiply") or not any(
            _MUCH_SMALLER * _size(arg) <= size and (self._is_contracted(arg) or self._is_summed(arg, call))
            for arg in call.args
        ):
            return call
        attrs = patterns.marks(patterns.OUT_ELEMENTWISE)
        return self.builder_.call_te(topi.multiply, *call.args, primfunc_name_hint=_FUNCTION, primfunc_attrs=attrs)

    def _is_summed(self, expr: relax.Expr, image: relax.Expr) -> bool:
        """Whether a tensor has a number for each channel of an image, and comes of a sum over lines."""
        factor, whole = _extents(expr), _extents(image)
        is_channel = factor and whole and factor[-1] == whole[-1] > 1
        return bool(is_channel) and self._comes_of_sums(expr)

    def _comes_of_sums(self, expr: relax.Expr) -> bool:
        """Whether a tensor is computed from sums, element by element or spread out."""
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        if isinstance(value, relax.Var):
            return self._comes_of_sums(value)
        if not isinstance(value, relax.Call):
            return False
        is_spread = is_call(value, *_SPREAD) and any(self._comes_of_sums(arg) for arg in value.args)
        return is_spread or is_call(value, *_SUMS)

    def _is_contracted(self, expr: relax.Expr) -> bool:
        """Whether a tensor is a contraction's, through what keeps its number of elements: what FuseOps takes for its
        epilogue."""
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        if value is None or is_call(value, *CONTRACTIONS):
            return value is not None
        if isinstance(value, relax.Var):
            return self._is_contracted(value)
        found = called(value)
        if found is not None:
            pattern = patterns.marked(self.builder_.get()[found[0]])
            is_epilogue = pattern == patterns.ELEMENTWISE  # drops channels that `lib.graph.widen` added
            return pattern == patterns.OUT_ELEMENTWISE or (is_epilogue and self._is_contracted(found[1][0]))
        arguments = value.args if isinstance(value, relax.Call) else ()
        return any(_size(arg) == _size(expr) and self._is_contracted(arg) for arg in arguments)


def _size(expr: relax.Expr) -> int:
    """The number of elements of a tensor; 0 if that is not known."""
    shape = _extents(expr)
    return math.prod(shape) if shape is not None else 0


def _extents(expr: relax.Expr) -> tuple[int, ...] | None:
    """Of a tensor; None if they are not known, or it is none."""
    return static_shape(expr) if isinstance(expr.ty, relax.TensorType) else None
