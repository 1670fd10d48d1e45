"""Products of float32 as several of bf16, nearly or quite as exact, where an instruction multiplies bf16 much faster.

A float is nearly the sum of two of bf16, x = h + l: what it is rounded to, and the rounded rest. Of the four products
that a product of two floats then is, the one of both rests is left out:

    x w = h_x h_w + h_x l_w + l_x h_w, but for 2**-16 of it

It is the sum of three of bf16, h + m + l, but for what float32 rounds itself, and of nine products six are enough:

    x w = h_x h_w + h_x m_w + h_x l_w + m_x h_w + m_x m_w + l_x h_w, but for 2**-25 of it

Sums are in float32. The reduction goes by blocks of channels that the instruction takes at once, and in each by these
products, so that all parts of the data, and of the weights, are in L1 when they are read again. Weights are split when
a model is compiled, and take as many bytes as before, or half as many more; since not each part is read equally often,
no rule of MetaSchedule's finds their order, which is this:

    columns / 16, kernel window, blocks of channels, parts, pairs of channels, 16 columns, 2 channels

Data are split by the function that multiplies them, within their padding if there is any: like that
(`lib.search.spaces.contraction`), by each task as much as it reads, or at once. Numbers that bf16 cannot hold, from
3.39e38 on, are none afterwards, and what is below 1e-38 is zero.
Source: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype for Higher-Precision
Computations" (ARITH 2019).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np
from tvm import relax, te, tirx

from lib.graph import grouping, patterns, reweight
from lib.graph.fusion import Model
from lib.graph.reweight import Replacement, shape_of
from lib.graph.rewrite import CONTRACTIONS, dtype, groups_of, has_columns_last, is_call
from lib.machine.dots import Matrix
from lib.tir import rounding

FUNCTIONS = {2: "in_three", 3: "in_six"}  # by parts of a float; in the names of the functions, for people
_WIDE, _NARROW = "float32", "bfloat16"
_VECTORS = (16, 8, 4)  # channels that are split together (`lib.search.spaces.primitives.pad`)
_FEWEST_ROWS = 4  # of a tile
_LEAST = {2: 48, 3: 192}  # products of a number, for which it is split once, by parts
_SHALLOWEST = {2: 1, 3: 96}  # products in a sum, by parts: what is done with it takes as long as of one of floats
# Products in all, by parts. MobileNetV2 has kernels of 5 to 11 million, which take 27 to 49 us as six products, 30 to
# 65 as floats, but 42 to 71 and 31 to 64 in the model, where most others multiply floats.
_SMALLEST = {2: 0, 3: 15_000_000}


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Of channels: in how many groups, how many each, and of how many channels. The last of a group may have zeros."""

    parts: int  # of a float
    groups: int
    count: int
    length: int

    @property
    def channels(self) -> int:
        """Of a group, with zeros."""
        return self.count * self.length


def split(model: Model, matrix: Matrix, parts: int) -> Model:
    """The model with products and convolutions in float32, channels last, as three or six in bf16 each where an
    instruction takes those; the same model if it has none.

    Args:
        parts: Of a float: 2 or 3.
    """
    merged = reweight.replaced(model, [partial(_merged, matrix, parts)])
    return reweight.replaced(merged, [partial(_replacement, matrix, parts)])


def _merged(matrix: Matrix, parts: int, call: relax.Call) -> Replacement | None:
    """Groups of few columns as larger ones, where these are then taken."""
    offer = grouping.replacement(matrix, _WIDE, call)
    return offer if offer and _pays(call, matrix.LANES, matrix, parts) else None


def _replacement(matrix: Matrix, parts: int, call: relax.Call) -> Replacement | None:
    if not is_call(call, *CONTRACTIONS) or {dtype(call), *map(dtype, call.args)} != {_WIDE}:
        return None
    weight, out = shape_of(call.args[1]), shape_of(call)
    if not weight or not out or not shape_of(call.args[0]) or not has_columns_last(call, weight):
        return None
    *window, channels, columns = weight
    own = columns // groups_of(call)
    blocks = _blocks(channels, parts, groups_of(call), matrix)
    if blocks is None or own % matrix.LANES or not _pays(call, own, matrix, parts):
        return None
    depth = matrix.dot.depth
    return Replacement(
        FUNCTIONS[parts], value=partial(_weights_apart, blocks, matrix), dtype=_NARROW,
        emit=partial(_emit, blocks, matrix),
        shape=(columns // matrix.LANES, *window, blocks.count, parts, blocks.length // depth, matrix.LANES, depth),
    )  # fmt: skip


def _pays(call: relax.Call, columns: int, matrix: Matrix, parts: int) -> bool:
    """Whether there are rows enough for the instruction, and products enough of each number, in each sum, and in all.

    Args:
        columns: Of a group.
    """
    out, (*window, channels, _columns) = shape_of(call), shape_of(call.args[1])
    strides = [] if is_call(call, "relax.matmul") else [int(n) for n in call.attrs.strides]
    has_rows = len(out) > 1 and out[-2] >= _FEWEST_ROWS and math.prod(out[:-1]) >= matrix.ROWS
    of_number, of_sum = columns * math.prod(window) / math.prod(strides), channels * math.prod(window)
    are_many = of_number >= _LEAST[parts] and of_sum >= _SHALLOWEST[parts]
    return has_rows and are_many and of_sum * math.prod(out) >= _SMALLEST[parts]


def _blocks(channels: int, parts: int, groups: int, matrix: Matrix) -> _Blocks | None:
    """The fewest, and of those the shortest, whose vectors are of channels, or of zeros; None if vectors divide no
    channels.

    Args:
        channels: Of a group.
    """
    most = matrix.STEPS * matrix.dot.depth
    found = [
        _Blocks(parts, groups, -(-channels // length), length)
        for length in range(_VECTORS[-1], most + 1, _VECTORS[-1])
        if channels % next(n for n in _VECTORS if length % n == 0) == 0
    ]
    return min(found, key=lambda each: (each.count, each.length), default=None)


def _weights_apart(blocks: _Blocks, matrix: Matrix, weight: np.ndarray) -> np.ndarray:
    """Of (..., C, O), all parts in the order above."""
    *window, channels, columns = weight.shape
    more, depth = blocks.channels - channels, matrix.dot.depth
    parts = np.stack(_parts(reweight.deeper(more, weight), blocks.parts))
    apart = (blocks.count, blocks.length // depth, depth, columns // matrix.LANES, matrix.LANES)
    n = len(window)
    count, pair, within, column, lane = range(n + 1, n + 6)
    order = [column, *range(1, n + 1), count, 0, pair, lane, within]
    return np.ascontiguousarray(parts.reshape(blocks.parts, *window, *apart).transpose(order))


def _parts(rest: np.ndarray, count: int) -> list[np.ndarray]:
    found = []
    for _ in range(count):
        found.append(rest.astype(ml_dtypes.bfloat16))
        rest = rest - found[-1].astype(np.float32)
    return found


def _emit(
    blocks: _Blocks, matrix: Matrix, builder: relax.BlockBuilder, call: relax.Call, args: Sequence[relax.Expr]
) -> relax.Expr:
    operator, shape = call.op.name.rpartition(".")[2], shape_of(call)
    return builder.call_te(
        partial(_sums, operator, call.attrs, shape, blocks, matrix), *args,
        primfunc_name_hint=f"{operator}_{FUNCTIONS[blocks.parts]}",
        primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE),
    )  # fmt: skip


def _sums(
    operator: str, attrs: object, shape: Sequence[int], blocks: _Blocks, matrix: Matrix, data: te.Tensor,
    weight: te.Tensor,
) -> te.Tensor:  # fmt: skip
    """A product, or a convolution with channels last, of a shape."""
    is_product = operator == "matmul"
    strides, padding, dilation = (
        [] if is_product else [int(n) for n in getattr(attrs, name)] for name in ("strides", "padding", "dilation")
    )
    parts, depth, own = _data_apart(data, padding, blocks), matrix.dot.depth, shape[-1] // blocks.groups
    window = [te.reduce_axis((0, weight.shape[1 + n]), f"r{n}") for n in range(len(strides))]
    block, product, turn = (
        te.reduce_axis((0, extent), name)
        for extent, name in (
            (blocks.count, "block"),
            (math.comb(blocks.parts + 1, 2), "product"),
            (blocks.length, "turn"),
        )
    )
    part_of_data, part_of_weight = _parts_of(product, blocks.parts)

    def at(*index: tirx.Var) -> tirx.Expr:
        *place, column = index
        outer = place[: len(place) - len(window)]
        pixel = [
            x * step + tap * far
            for x, step, tap, far in zip(place[len(outer) :], strides, window, dilation, strict=True)
        ]
        of_group = block if blocks.groups == 1 else column // own * blocks.count + block
        of_data = parts(of_group, *outer, *pixel, part_of_data, turn)
        of_weight = weight(
            column // matrix.LANES, *window, block, part_of_weight, turn // depth, column % matrix.LANES, turn % depth
        )
        return te.sum(of_data.astype(_WIDE) * of_weight.astype(_WIDE), axis=[*window, block, product, turn])

    return te.compute([tirx.IntImm("int64", n) for n in shape], at, name=f"{operator}_{FUNCTIONS[blocks.parts]}")


def _parts_of(product: tirx.Var, parts: int) -> tuple[tirx.Expr, tirx.Expr]:
    """Which part of the data, and which of the weights, are in the n-th product: the first of the data with all of the
    weights, the second with all but the last, and so on."""
    of_data, of_weight, start = tirx.IntImm("int64", 0), product, 0
    for count in range(parts, 1, -1):
        start += count
        is_beyond = product // start  # 0 or 1: there are fewer than twice as many products
        of_data, of_weight = of_data + is_beyond, of_weight - is_beyond * count
    return of_data, of_weight


def _data_apart(data: te.Tensor, padding: Sequence[int], blocks: _Blocks) -> te.Tensor:
    """(..., C) as (blocks, ..., parts, channels of a block), with zeros before and after the axes of space.

    What a tile reads of a block lies together: rows that are a power of two apart have the same few places in L1.
    """
    *outer, channels = data.shape
    own = int(channels) // blocks.groups
    n = len(padding) // 2
    before, after = ([0] * (len(outer) - n) + [*each] for each in (padding[:n], padding[n:]))
    shape = [extent + a + b for extent, a, b in zip(outer, before, after, strict=True)]

    def value(*index: tirx.Var) -> tirx.Expr:
        block, *place, part, turn = index
        source = [at - first for at, first in zip(place, before, strict=True)]
        group, within = (0, block) if blocks.groups == 1 else (block // blocks.count, block % blocks.count)
        channel = within * blocks.length + turn  # of its group
        *others, found = rounding.in_parts(data(*source, group * own + channel), blocks.parts)
        for n, each in reversed(list(enumerate(others))):
            found = tirx.if_then_else(part <= n, each, found)
        inside = [each for at, extent, padded in zip(source, outer, shape, strict=True) if int(padded) > int(extent)
                  for each in (at >= 0, at < extent)]  # fmt: skip
        if blocks.channels > own:
            inside.append(channel < own)
        return tirx.if_then_else(tirx.all(*inside), found, tirx.const(0, _NARROW)) if inside else found

    return te.compute([blocks.groups * blocks.count, *shape, blocks.parts, blocks.length], value, name="split")
