"""Convolutions of some channels of an image, read where they are.

FuseOps makes no slice the beginning of a convolution: where channels are shared out to several convolutions, as in
networks with kernels of several sizes, all of them would be copied once. Here the slice is a part of the convolution,
and so an offset in what it reads. Convolutions that differ in it alone are one workload (`lib.tir.workload`).
"""

from functools import partial

import tvm
from tvm import relax, te, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph import patterns
from lib.graph.rewrite import is_call, is_channels_last, mutated, static_shape
from lib.tir.workload import PART

_CONVOLUTION, _SLICE = "relax.nn.conv2d", "relax.strided_slice"


def read_in_place(module: tvm.IRModule) -> tvm.IRModule:
    """Convolutions in NHWC of slices of channels as functions of the whole image; before LegalizeOps."""
    return relax.transform.DeadCodeElimination()(mutated(_Reader(module), module))


@mutator
class _Reader(PyExprMutator):
    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        if not is_call(call, _CONVOLUTION) or not is_channels_last(call):
            return call
        part = self.lookup_binding(call.args[0]) if isinstance(call.args[0], relax.Var) else None
        first = _first_channel(part)
        shape = static_shape(call.args[0])
        if part is None or first is None or shape is None:
            return call
        convolution = partial(_of_part, call.attrs, first, shape[-1])
        return self.builder_.call_te(
            convolution, part.args[0], call.args[1], primfunc_name_hint="conv2d",
            primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE),
        )  # fmt: skip


def _first_channel(expr: relax.Expr | None) -> int | None:
    """The first of the channels that a slice takes of an image (N, H, W, C); None of all but neighbouring channels."""
    if expr is None or not is_call(expr, _SLICE):
        return None
    axes, begins, _, *strides = (_numbers(arg) for arg in expr.args[1:])
    if axes not in ([3], [-1]) or any(step != [1] for step in strides):
        return None
    whole, own = static_shape(expr.args[0]), static_shape(expr)
    if whole is None or own is None or len(begins) != 1:
        return None
    first = begins[0] + (whole[3] if begins[0] < 0 else 0)
    return first if 0 <= first <= whole[3] - own[3] else None


def _numbers(expr: relax.Expr) -> list[int]:
    """Of a tuple of numbers that are known; empty of others."""
    fields = expr.fields if isinstance(expr, relax.Tuple) else []
    return [int(each) for each in fields if isinstance(each, tvm.tirx.IntImm)]


def _of_part(attrs: tvm.ir.Attrs, first: int, channels: int, image: te.Tensor, weight: te.Tensor) -> te.Tensor:
    shape = (*image.shape[:-1], channels)
    part = te.compute(shape, lambda n, y, x, c: image[n, y, x, c + first], name=PART)
    windows = [[int(n) for n in each] for each in (attrs.strides, attrs.padding, attrs.dilation)]
    layouts = str(attrs.data_layout), str(attrs.kernel_layout)
    return topi.nn.conv(part, weight, *windows, int(attrs.groups), *layouts, attrs.out_dtype or None)
