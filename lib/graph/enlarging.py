"""Images that are made larger: sums of them as kernels of their own, and maps of the caller's, lines at a time.

FuseOps takes a sum with a convolution's result as the epilogue of that, and with it every sum before, so that each of
the enlarged images would be written, and read again there. Where images of several sizes come together, as in the heads
of segmentation models, they are enlarged and summed in one kernel here, and an epilogue reads one image.

What a network returns, classes of all pixels or a depth, is made as large as the image at last, and has channels first.
Pixel by pixel that is four elements read, two of them from another line, for each that is written, at as many places as
there are channels. Here the lines that there were are made longer first, channels first; then each line of the result
is a sum of two of them, in whole vectors.
"""

from collections.abc import Callable
from functools import partial

import tvm
from tvm import relax, te, tirx, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph import patterns
from lib.graph.concatenation import called
from lib.graph.rewrite import is_call, mutated, static_shape, to_channels_first
from lib.graph.rules.resizing import IN_PLACE

_FUNCTION, _LONGER, _HIGHER = "enlarged_sum", "longer_lines", "more_lines"
_TIMES = 2  # as many lines, from which on those of before are few


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


def by_lines(module: tvm.IRModule) -> tvm.IRModule:
    """Images that are enlarged linearly and then have their channels first, in two steps; before LegalizeOps."""
    return relax.transform.DeadCodeElimination()(mutated(_Stretcher(module), module))


@mutator
class _Stretcher(PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        moves = is_call(call, "relax.permute_dims") and call.attrs.axes is not None
        if not moves or [int(axis) for axis in call.attrs.axes] != to_channels_first(4):
            return call
        resize = self.lookup_binding(call.args[0]) if isinstance(call.args[0], relax.Var) else None
        size = _stretched_to(resize) if resize is not None else None
        if resize is None or size is None:
            return call
        (lines, columns), mode = size, str(resize.attrs.coordinate_transformation_mode)
        longer = self.builder_.call_te(
            partial(_longer, columns, mode), resize.args[0], primfunc_name_hint=_LONGER,
            primfunc_attrs=patterns.marks(patterns.OPAQUE),
        )  # fmt: skip
        return self.builder_.call_te(
            partial(_higher, lines, mode),
            self.builder_.emit(longer),
            primfunc_name_hint=_HIGHER,
            primfunc_attrs=patterns.marks(patterns.INJECTIVE),
        )


def _stretched_to(resize: relax.Expr) -> tuple[int, int] | None:
    """The size that floats of an image in NHWC are interpolated to linearly, with several times as many lines; None if
    it is something else."""
    if not is_call(resize, "relax.image.resize2d") or str(resize.attrs.layout) != "NHWC":
        return None
    attrs, before, after = resize.attrs, static_shape(resize.args[0]), static_shape(resize)
    is_linear = str(attrs.method) == "linear" and str(attrs.coordinate_transformation_mode) in IN_PLACE
    if not is_linear or {str(resize.ty.dtype), str(resize.args[0].ty.dtype)} != {"float32"} or not before or not after:
        return None
    return (after[1], after[2]) if after[1] >= _TIMES * before[1] else None


def _longer(columns: int, mode: str, image: te.Tensor) -> te.Tensor:
    """Images (N, H, W, C) with lines of so many columns, and channels first."""
    n_images, lines, width, channels = image.shape

    def value(n: tirx.Var, c: tirx.Var, y: tirx.Var, x: tirx.Var) -> tirx.Expr:
        return _between(lambda at: image[n, y, at, c], x, width, columns, mode)

    return te.compute((n_images, channels, lines, columns), value, name=_LONGER)


def _higher(lines: int, mode: str, image: te.Tensor) -> te.Tensor:
    """Images (N, C, H, W) with so many lines."""
    n_images, channels, height, columns = image.shape

    def value(n: tirx.Var, c: tirx.Var, y: tirx.Var, x: tirx.Var) -> tirx.Expr:
        return _between(lambda at: image[n, c, at, x], y, height, lines, mode)

    return te.compute((n_images, channels, lines, columns), value, name=_HIGHER)


def _between(
    element: Callable[[tirx.Expr], tirx.Expr], place: tirx.Var, before: tirx.IntImm, after: int, mode: str
) -> tirx.Expr:
    """What is interpolated of the two elements along an axis that a new one lies between (`topi.image.resize`).

    Args:
        element: At a place along the axis, of which there were `before` and are `after`.
    """
    at = topi.image.resize.get_inx(place, before, tirx.IntImm("int64", after), mode)
    first = te.floor(at).astype("int64")
    one, other = (element(te.max(te.min(each, before - 1), 0)) for each in (first, first + 1))
    share = at - first.astype("float32")
    return one * (1.0 - share) + other * share
