"""Padding with another value than zero as a part of the convolution that reads it.

The zeros around a quantised image are bytes of its zero point. Relax's convolutions pad with zero alone, so these come
with an operator `pad` of their own, which FuseOps does not put into the kernel that reads it: the image would be
written once more.
"""

from collections.abc import Sequence
from functools import partial

import tvm
from tvm import relax, te, tirx, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph import patterns
from lib.graph.rewrite import OF_BYTES, dtype, is_call, is_channels_last, mutated

_FUNCTION = "conv2d"


def into_convolutions(module: tvm.IRModule) -> tvm.IRModule:
    """Convolutions of bytes in NHWC with the constants that were put around their images."""
    functions = dict(module.functions_items())
    if not any(_reads_bytes(function) for function in functions.values()):
        return module
    return relax.transform.DeadCodeElimination()(mutated(_Padder(module), module))


def taken_in(
    builder: relax.BlockBuilder, data: relax.Expr, padding: Sequence[int]
) -> tuple[relax.Expr, Sequence[int], int]:
    """What a convolution, channels last, may read in place of its data: these without the constant that an operator put
    around their pixels, the padding to have then, before each axis of space and after each, and its value. Data that
    are padded otherwise, or by the convolution itself, stay as they are."""
    around = builder.lookup_binding(data) if isinstance(data, relax.Var) else None
    if around is None or any(padding) or not _is_around_pixels(around):
        return data, padding, 0
    widths = [int(n) for n in around.attrs.pad_width][2:-2]
    return around.args[0], [*widths[::2], *widths[1::2]], int(around.attrs.pad_value)


def _is_around_pixels(expr: relax.Expr) -> bool:
    """Whether an operator puts a constant around images: the zero point of bytes (`lib.graph.rules.quantization`)."""
    if not is_of_constant(expr):
        return False
    widths = [int(n) for n in expr.attrs.pad_width]
    return not any([*widths[:2], *widths[-2:]])


def is_of_constant(expr: relax.Expr) -> bool:
    """Whether an operator puts a constant around a tensor."""
    return is_call(expr, "relax.nn.pad") and str(expr.attrs.pad_mode) == "constant"


def _reads_bytes(function: object) -> bool:
    found: list[bool] = []
    if isinstance(function, relax.Function):
        relax.analysis.post_order_visit(function, lambda expr: found.append(_is_of_bytes(expr)))
    return any(found)


def _is_of_bytes(expr: relax.Expr) -> bool:
    return (
        is_call(expr, "relax.nn.conv2d") and dtype(expr.args[0]) in OF_BYTES
        and is_channels_last(expr)
    )  # fmt: skip


@mutator
class _Padder(PyExprMutator):
    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        pad = self.lookup_binding(call.args[0]) if call.args and isinstance(call.args[0], relax.Var) else None
        if pad is None or not _is_of_bytes(call) or not is_of_constant(pad) or any(int(n) for n in call.attrs.padding):
            return call
        convolution = partial(
            _padded, [int(n) for n in pad.attrs.pad_width], int(pad.attrs.pad_value),
            [int(n) for n in call.attrs.strides], [int(n) for n in call.attrs.dilation], int(call.attrs.groups),
        )  # fmt: skip
        return self.builder_.call_te(
            convolution, pad.args[0], call.args[1], primfunc_name_hint=_FUNCTION,
            primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE),
        )  # fmt: skip


def _padded(
    width: list[int], value: int, strides: list[int], dilation: list[int], groups: int,
    image: te.Tensor, weight: te.Tensor,
) -> te.Tensor:  # fmt: skip
    around = topi.nn.pad(image, width[::2], width[1::2], tirx.const(value, image.dtype), name="pad_temp")
    batch, height, length, _ = around.shape
    rows, columns, channels, out = weight.shape
    ry, rx, rc = (
        te.reduce_axis((0, extent), name) for name, extent in (("ry", rows), ("rx", columns), ("rc", channels))
    )
    (down, across), (far_y, far_x) = strides, dilation
    shape = (
        batch, (height - far_y * (rows - 1) - 1) // down + 1, (length - far_x * (columns - 1) - 1) // across + 1, out,
    )  # fmt: skip

    def channel(o: tirx.Var) -> tirx.Expr:
        return rc if groups == 1 else o // (out // groups) * channels + rc

    return te.compute(
        shape,
        lambda n, y, x, o: te.sum(
            around[n, y * down + ry * far_y, x * across + rx * far_x, channel(o)].astype("int32")
            * weight[ry, rx, rc, o].astype("int32"),
            axis=[ry, rx, rc],
        ),
        name="conv2d_nhwc",
    )
