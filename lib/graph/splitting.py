"""Products of float32 as three of bf16: nearly as exact, where an instruction multiplies bf16 ten times as fast.

A float is nearly the sum of two of bf16, x = h + l: what it is rounded to, and the rounded rest. Of the four products
that a product of two floats then is, the one of both rests is left out:

    x w = h_x h_w + h_x l_w + l_x h_w, but for 2**-16 of it

So a contraction with C input channels is one in bf16 with 3 C of them, of data [h_x, h_x, l_x] and weights
[h_w, l_w, h_w], whose sums are in float32. Weights are split when a model is compiled. Data are split by the function
that multiplies them, within its padding if it has any: like that (`lib.search.spaces.contraction`), by each task as much
as it reads, or at once. Numbers that bf16 cannot hold, from 3.39e38 on, are none afterwards.
Source: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype for Higher-Precision
Computations" (ARITH 2019).
"""

import math
from collections.abc import Sequence
from functools import partial

import ml_dtypes
import numpy as np
from tvm import relax, te, tirx, topi

from lib.graph import patterns, reweight
from lib.graph.fusion import Model
from lib.graph.reweight import Replacement, shape_of
from lib.graph.rewrite import CONTRACTIONS, dtype, groups_of, has_columns_last, is_call
from lib.machine.dots import Matrix

FUNCTION = "in_three"  # in the names of the functions, for people
_WIDE, _NARROW = "float32", "bfloat16"
_PARTS = 3
_TOGETHER = 4  # channels: data are split in vectors, the shorter the slower
_FEWEST_ROWS = 4  # of a tile
_LEAST = 48  # products of a number, for which it is split once


def in_three(model: Model, matrix: Matrix) -> Model:
    """The model with products and convolutions in float32, channels last, as three in bf16 each where an instruction
    takes those; the same model if it has none."""
    return reweight.replaced(model, [partial(_replacement, matrix)])


def _replacement(matrix: Matrix, call: relax.Call) -> Replacement | None:
    if not is_call(call, *CONTRACTIONS) or {dtype(call), *map(dtype, call.args)} != {_WIDE}:
        return None
    weight, out = shape_of(call.args[1]), shape_of(call)
    if not weight or not out or not shape_of(call.args[0]) or not has_columns_last(call, weight):
        return None
    *window, channels, columns = weight
    is_whole = groups_of(call) == 1 and channels % _TOGETHER == 0 and columns % matrix.LANES == 0
    has_rows = len(out) > 1 and out[-2] >= _FEWEST_ROWS and math.prod(out[:-1]) >= matrix.ROWS
    if not is_whole or not has_rows or _uses(call, window, columns) < _LEAST:
        return None
    shape = (*window, _PARTS * channels, columns)
    return Replacement(FUNCTION, value=_weights_in_three, shape=shape, emit=_emit, dtype=_NARROW)


def _uses(call: relax.Call, window: Sequence[int], columns: int) -> float:
    """How many products a number of the data is in."""
    strides = [] if is_call(call, "relax.matmul") else [int(n) for n in call.attrs.strides]
    return columns * math.prod(window) / math.prod(strides)


def _weights_in_three(weight: np.ndarray) -> np.ndarray:
    """(..., C, O) as (..., 3 * C, O)."""
    high = weight.astype(ml_dtypes.bfloat16)
    low = (weight - high.astype(np.float32)).astype(ml_dtypes.bfloat16)
    return np.concatenate([high, low, high], axis=-2)


def _emit(builder: relax.BlockBuilder, call: relax.Call, args: Sequence[relax.Expr]) -> relax.Expr:
    is_product = is_call(call, "relax.matmul")
    compute = _product if is_product else partial(_convolution, call.attrs)
    name = f"{call.op.name.rpartition('.')[2]}_{FUNCTION}"
    return builder.call_te(
        compute, *args, primfunc_name_hint=name, primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE)
    )


def _product(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    parts = _data_in_three(data, [])
    turn = te.reduce_axis((0, weight.shape[0]), "k")

    def at(*index: tirx.Var) -> tirx.Expr:
        *row, column = index
        return te.sum(parts(*row, turn).astype(_WIDE) * weight(turn, column).astype(_WIDE), axis=turn)

    return te.compute([*data.shape[:-1], weight.shape[1]], at, name="matmul")


def _convolution(attrs: object, data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    strides, padding, dilation = ([int(n) for n in getattr(attrs, name)] for name in ("strides", "padding", "dilation"))
    parts, none = _data_in_three(data, padding), [0] * len(padding)
    layouts = str(attrs.data_layout), str(attrs.kernel_layout)
    return topi.nn.conv(parts, weight, strides, none, dilation, 1, *layouts, _WIDE)


def _data_in_three(data: te.Tensor, padding: Sequence[int]) -> te.Tensor:
    """(..., C) as (..., 3 * C), with zeros before and after the axes of space."""
    *outer, channels = data.shape
    n = len(padding) // 2
    before, after = [0] * (len(outer) - n) + [*padding[:n]], [0] * (len(outer) - n) + [*padding[n:]]
    shape = [extent + a + b for extent, a, b in zip(outer, before, after, strict=True)]

    def value(*index: tirx.Var) -> tirx.Expr:
        *place, turn = index
        source = [at - first for at, first in zip(place, before, strict=True)]
        whole = data(*source, turn % channels)
        high = whole.astype(_NARROW)
        low = (whole - high.astype(_WIDE)).astype(_NARROW)
        part = tirx.if_then_else(turn // channels < _PARTS - 1, high, low)
        inside = [tirx.all(at >= 0, at < extent) for at, extent, a, b in zip(source, outer, before, after, strict=True)
                  if a or b]  # fmt: skip
        return tirx.if_then_else(tirx.all(*inside), part, tirx.const(0, _NARROW)) if inside else part

    return te.compute([*shape, _PARTS * channels], value, name="split")
