"""Pixels out of channels: what computes the channels has them in the order in which they become pixels.

A pixel shuffle (sub-pixel convolution: Shi et al., "Real-time single image and video super-resolution using an
efficient sub-pixel convolutional neural network", arXiv 1609.05158) has the r * r pixels of each channel one after the
other, so that in NHWC neighbours come from channels r * r apart, and single elements are moved. Here the columns of the
convolution's weights change places instead, and whole vectors of channels are moved.
"""

import math
from collections.abc import Sequence

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import (
    CONTRACTIONS,
    Rewriter,
    Rule,
    alike,
    constant,
    dtype,
    groups_of,
    has_columns_last,
    is_call,
    rule,
)

_UNARY = ("relax.nn.relu", "relax.nn.gelu", "relax.nn.silu", "relax.nn.leakyrelu", "relax.sigmoid", "relax.tanh",
          "relax.clip", "relax.astype")  # fmt: skip
_BINARY = ("relax.add", "relax.multiply")


@rule("relax.permute_dims")
def columns_as_they_are_moved(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Channels that are split, and whose parts are then moved, in the order that these have after that."""
    split = rewriter.calls(call.args[0], "relax.reshape")
    if split is None or not rewriter.read_once(call.args[0]) or call.attrs.axes is None:
        return None
    shape, apart = rewriter.shape(split.args[0]), rewriter.shape(split)
    outer = None if shape is None or apart is None else _split_at(shape, apart)
    if shape is None or apart is None or outer is None:
        return None
    axes = [int(axis) for axis in call.attrs.axes]
    order = [axis for axis in axes if axis >= outer]
    if order == sorted(order) or axes[-1] != order[-1]:
        return None
    columns = np.arange(shape[-1]).reshape(apart[outer:]).transpose([axis - outer for axis in order]).reshape(-1)
    moved = _with_columns(rewriter, split.args[0], columns)
    if moved is None:
        return None
    again = rewriter.emit(op.reshape(rewriter.emit(moved), (*apart[:outer], *(apart[axis] for axis in order))))
    return op.permute_dims(again, [axis if axis < outer else outer + order.index(axis) for axis in axes])


def _split_at(shape: Sequence[int], apart: Sequence[int]) -> int | None:
    """How many axes of a shape that another was brought into come before those of the other's last axis; None if that
    begins within one of them."""
    pixels = math.prod(shape[:-1])
    return next((n for n in range(len(apart)) if math.prod(apart[:n]) == pixels), None)


def _with_columns(rewriter: Rewriter, expr: relax.Expr, columns: np.ndarray) -> relax.Expr | None:
    """What a product or a convolution computes, and element-wise operators of that, with channels (the last axis) in
    another order; None if it is anything else, or something else reads it."""
    call = rewriter.definition(expr)
    if not rewriter.read_once(expr) or not isinstance(call, relax.Call):
        return None
    if is_call(call, *CONTRACTIONS):
        weight = rewriter.value(call.args[1])
        if weight is None or groups_of(call) > 1 or not has_columns_last(call, weight.shape):
            return None
        return alike(call, call.args[0], constant(weight[..., columns]), dtype(call))
    if is_call(call, *_UNARY):
        inner = _with_columns(rewriter, call.args[0], columns)
        others = call.args[1:]
    elif is_call(call, *_BINARY) and (value := rewriter.value(call.args[1])) is not None:
        if value.size > 1 and value.shape[-1] != len(columns):
            return None
        inner = _with_columns(rewriter, call.args[0], columns)
        others = [constant(value[..., columns]) if value.size > 1 else call.args[1]]
    else:
        return None
    return None if inner is None else relax.Call(call.op, [rewriter.emit(inner), *others], call.attrs, call.ty_args)


RULES: list[Rule] = [columns_as_they_are_moved]
