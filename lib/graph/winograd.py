"""Square convolutions with fewer multiplications: Winograd's minimal filtering, F(m x m, r x r).

A tile of m x m outputs is computed from n x n inputs d, n = m + r - 1, and the kernel g of r x r taps as
A^T [(G g G^T) * (B^T d B)] A; summed over the input channels, the product in the middle is one matrix product for each
of the n^2 positions. For 3x3 taps it takes 4 (m = 2: 2.25) times fewer multiplications than the convolution, for 5x5
6.25 (2.8), for 7x7, with m = 2, 3.1; the transforms of data and results cost additions and memory traffic, those of the
kernels are done once, at compile time.

In bf16 the products read transformed data and kernels in bf16, and all else is float32. That makes 1.4 to 1.8 times the
error of the convolution in bf16 with m = 2, where a transform adds four elements; with m = 4, whose entries reach 8,
too much, so there is none, nor of larger kernels.
Of volumes, convolutions of 3x3x3 or of any other depth, tiles are those of each frame, and the products sum over the
frames that a result sees, too: the data of a frame is transformed once.
Of convolutions in groups, the products are those of each group. Their transforms are shared out among fewer products.
Those with holes between their taps are convolutions of smaller images (`lib.graph.dilated`), in float32.
Of bytes, for CPUs that multiply pairs of 16 bits (`lib.graph.pairs`), all of it is exact: with the denominators of the
transforms left to the end, transformed bytes and kernels are integers of 16 bits (at most 12,750 and 6,272 with m = 4),
products sum in 32 bits, if the weights are such that they fit, and results in double precision, which holds these.
Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016), sections 3 and 4.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import ml_dtypes
import numpy as np
from tvm import relax, te, tirx, topi
from tvm.relax import op

from lib.graph import dilated, patterns, widen
from lib.graph.filters import Transforms, entry, integral, minimal, rounded, wide
from lib.graph.padding import taken_in
from lib.graph.reweight import Choose, Replacement, shape_of
from lib.graph.rewrite import dtype, groups_of, is_call, is_channels_last
from lib.tir.operators import WINOGRAD_LINES

FUNCTION = "conv2d_winograd"  # name of the functions that compute one, for people
_LANES = 8  # channels that fill a vector
_WIDE, _NARROW, _PAIRS = "float32", "bfloat16", "int16"  # element types that products read
_OF_BYTES = "bytes"  # those of bytes that could be in floats
_FROM_MEMORY, _THROUGH_CACHE, _THROUGH_MEMORY, _IN_BLOCKS = 10, 14, 45, 8  # cost of an element, in multiplications
_CACHE = 1 << 23  # elements in float32 that stay in the last cache
_SMALLEST = 8  # lines and pixels of images apart: a direct convolution skips what holes reach beyond smaller ones
_VECTOR = 16  # channels: of bf16, fewer than two such vectors of results are slow in blocks
_FROM_MEMORY_OF = {"avx512x2": 16, "amx": 16}  # of classes of targets that multiply twice as many a cycle
_BYTES = 255  # the largest of data
_FEW = 32  # channels of bytes: with no more, images of few lines of tiles took 1.07 to 4.6 times as long (Zen 4, AVX2)
_EVER = 2.0**-40  # by which results in double precision are too large: none is below its integer


@dataclass(frozen=True, slots=True)
class _Kind:
    """How convolutions whose products read elements of a type are computed, and in which other types."""

    of_data: str  # transforms of data
    sums: str  # of products; also what the convolution gives
    of_results: str
    tiles: Mapping[int, tuple[int, ...]]  # m, by taps of a side
    share: float = 1.0  # of the time and memory that products of floats take
    direct: float = 1.0  # the same of the convolution as it is


_KINDS = {
    _WIDE: _Kind("float32", "float32", "float32", {3: (2, 4), 5: (2, 4), 7: (2,)}),
    _NARROW: _Kind("float32", "float32", "float32", {3: (2,)}, share=0.5, direct=0.5),
    _PAIRS: _Kind("int16", "int32", "float64", {3: (2, 4)}),
    _OF_BYTES: _Kind("float32", "int32", "float32", {3: (2, 4), 5: (2, 4), 7: (2,)}, direct=0.6),
}


def replacement(instructions: str = "", lanes: int = 1, *, is_narrow: bool = False) -> Choose:
    """What computes convolutions in Winograd's way, where that is faster.

    Args:
        instructions: The class of the target (`CpuTarget.instructions`).
        lanes: Of the vectors that output channels are padded to where that is faster (`lib.graph.widen`); 1: of none.
        is_narrow: With products in bf16.
    """
    return partial(_replacement, instructions, lanes, _NARROW if is_narrow else _WIDE)


def replacement_in_pairs(instructions: str, weights: Mapping[str, np.ndarray], lanes: int = 1) -> Choose:
    """The same of convolutions of bytes, for CPUs that multiply pairs of 16 bits.

    Args:
        weights: Of the model by name: what they sum up to decides how large tiles may be.
    """

    @cache  # a call is asked for more than once
    def fits(name: str, tile: int) -> bool:
        return _fits_sums(weights[name], tile)

    def in_pairs(call: relax.Call) -> Replacement | None:
        if not is_call(call, "relax.nn.conv2d") or (dtype(call.args[0]), dtype(call.args[1])) != ("uint8", "int8"):
            return None
        name = str(call.args[1].name) if isinstance(call.args[1], relax.Var) else ""
        return _replacement(instructions, lanes, _PAIRS, call, partial(fits, name)) if name in weights else None

    return in_pairs


def is_for_floats(instructions: str, lanes: int, call: relax.Call) -> bool:
    """Whether a convolution of bytes, with weights as small as an instruction takes that does five to eight products in
    the time of three to four of floats (`lib.tir.small_weights`), is faster in floats: in Winograd's way."""
    return _tile(call, _OF_BYTES, instructions, lanes) > 0


def _replacement(
    instructions: str, lanes: int, kind: str, call: relax.Call, fits: Callable[[int], bool] = lambda _tile: True
) -> Replacement | None:
    tile = _tile(call, kind, instructions, lanes)
    while tile and not fits(tile):
        tile = _tile(call, kind, instructions, lanes, tile - 1)
    if not tile:
        return None
    *depth, taps, _, inputs, outputs = shape_of(call.args[1])
    size, groups = minimal(tile, taps).window, groups_of(call)
    more = widen.computed(outputs, lanes) - outputs if groups == 1 else 0
    return Replacement(
        kind=(FUNCTION, tile, kind, groups, more),
        value=lambda kernel: transformed(widen.padded(1, more, kernel), tile, kind),
        shape=(size, size, *depth, inputs, outputs + more),
        emit=partial(_emit, tile, kind, outputs),
        dtype=kind,
    )


def best_tile(
    image: tuple[int, int], channels: tuple[int, int], frames: tuple[int, int] = (1, 1), depth: int = 1,
    kind: str = _WIDE, instructions: str = "", taps: int = 3, groups: int = 1, most: int = 4, moved: int = 0,
) -> int:  # fmt: skip
    """m of the transform for a convolution to outputs of height and width, from and to channels; 0 for none.

    Counts the cost of each algorithm in multiplications of floats: its own, of which bf16 takes half the time, and its
    memory traffic, for CPUs of today, which do about ten multiplications while an element comes from memory, where the
    kernels of a large model are, and about seven while one is written to L2 or L3 between the transforms and the
    products, and as many while it is read again; of large images, which are computed in blocks, four: 6.3 to 9.9 in all
    would explain eight convolutions of 16 to 64 channels on two cores of a Zen 5, and 22 a ninth. Of volumes, all
    images together may have more between the steps than the last cache holds: of 48x48x48 with 16 or 32 channels, and
    of 12 frames of 56x56 with 64, 28 to 59 would explain what was measured there. Of CPUs that multiply two vectors of
    512 bits a cycle the first is more: in a ResNet-50 on two cores of a Zen 5, products of 256 channels of 14x14 pixels
    take 250 to 360 us with m = 4, whose kernels come from memory no faster, and 220 to 260 with m = 2. In groups,
    blocks of large images are no cheaper (56x56 pixels, 32 groups of 8 channels, a Zen 3); in bf16 these were not
    measured.

    Args:
        frames: How many images are read, and how many are written.
        depth: Images that each result sees.
        instructions: The class of the target.
        taps: Of a side of the kernel.
        groups: Of the channels.
        most: The largest m that there may be.
        moved: Elements that are written and read once more, before all or after all.
    """
    height, width = image
    kernel, area = depth * channels[0] * channels[1] // groups, height * width
    share, direct = _KINDS[kind].share, _KINDS[kind].direct
    from_memory = _FROM_MEMORY_OF.get(instructions, _FROM_MEMORY)
    costs = {0: direct * taps**2 * kernel * float(frames[1] * area + from_memory)}
    for tile in (m for m in _KINDS[kind].tiles.get(taps, ()) if m <= most):
        positions = minimal(tile, taps).window ** 2
        elements = -(-height // tile) * -(-width // tile) * positions  # of a transformed image, a channel
        has_lines = height >= WINOGRAD_LINES * tile
        if kind == _PAIRS and not has_lines and min(channels) <= _FEW:
            continue
        in_blocks = has_lines and depth == groups == 1 and _fill_blocks(channels, kind)
        between = elements * (frames[0] * share * channels[0] + frames[1] * channels[1])
        through = _IN_BLOCKS if in_blocks else _THROUGH_CACHE if between <= _CACHE else _THROUGH_MEMORY
        products = share * (kernel * frames[1] * elements + from_memory * positions * kernel)
        costs[tile] = products + through * between + (_THROUGH_CACHE if moved <= _CACHE else _THROUGH_MEMORY) * moved
    return min(costs, key=lambda tile: costs[tile])


def _fill_blocks(channels: tuple[int, int], kind: str) -> bool:
    """Whether convolutions between so many channels are fast in blocks: of 24 in bf16, and to 16, they were slower than
    direct ones (0.65 to 0.91)."""
    return kind in (_WIDE, _OF_BYTES) or (not any(n % _VECTOR for n in channels) and channels[1] >= 2 * _VECTOR)


def transformed(kernel: np.ndarray, tile: int, kind: str = _WIDE) -> np.ndarray:
    """G g G^T for each pair of channels: HWIO to n x n x I x O, or DHWIO to n x n x D x I x O, summed in double
    precision."""
    matrix = _transforms(tile, kernel.shape[-3], kind)[0].kernel
    found = np.einsum("ai,bj,...ijco->ab...co", matrix, matrix, kernel.astype(np.float64), optimize=True)
    return found.astype(np.float32).astype({_NARROW: ml_dtypes.bfloat16}.get(kind, kind))


def _transforms(tile: int, taps: int, kind: str) -> tuple[Transforms, int]:
    """The matrices, and how many times as large they make results along each axis."""
    return integral(tile, taps) if kind == _PAIRS else (minimal(tile, taps), 1)


def convolution(
    data: te.Tensor, kernel: te.Tensor, tile: int, padding: Sequence[int], groups: int = 1, value: int = 0
) -> te.Tensor:  # fmt: skip
    """A convolution of images (N, H, W, C) or volumes (N, D, H, W, C) with a transformed kernel, to float32, or of
    bytes to int32.

    Args:
        data: Of the element type of the kernel, float32 or bf16; bytes, if that is int16.
        kernel: Of as many input channels as a group has, if there are several.
        padding: Of the images, in lines and columns: top, left, bottom, right; of volumes: front, top, left, back,
            bottom, right.
        value: What images are padded with.
    """
    batch, *depth, height, width, _ = (int(extent) for extent in data.shape)
    kind = str(kernel.dtype)
    transforms, factor = _transforms(tile, int(kernel.shape[0]) - tile + 1, kind)
    half, edge = len(padding) // 2, transforms.taps - 1
    (*front, top, left), (*back, bottom, right) = padding[:half], padding[half:]
    out_height, out_width = height + top + bottom - edge, width + left + right - edge
    frames = [extent + first + last for extent, first, last in zip(depth, front, back, strict=True)]
    tiles = _Tiles(tile, -(-out_height // tile), -(-out_width // tile), batch, *frames)
    beyond = tiles.down * tile - out_height, tiles.across * tile - out_width
    before, after = [0, *front, top, left, 0], [0, *back, bottom + beyond[0], right + beyond[1], 0]
    padded = topi.nn.pad(data, before, after, tirx.const(value, data.dtype), name="pad_temp")
    product = _product(_spread(padded, tiles, transforms, kind), kernel, tiles, groups)
    results = _results(product, transforms, _KINDS[kind].of_results)

    def result(*at: tirx.Var) -> tirx.Expr:
        *image, y, x, o = at
        element = results(tiles.number(image, y // tile, x // tile), y % tile, x % tile, o)
        if factor == 1:
            return element
        return (element * tirx.const((1 + _EVER) / factor**2, element.ty.dtype)).astype(_KINDS[kind].sums)

    seen = [int(extent) for extent in kernel.shape[2:-2]]
    out_depth = [extent - taps + 1 for extent, taps in zip(frames, seen, strict=True)]
    return te.compute((batch, *out_depth, out_height, out_width, int(kernel.shape[-1])), result, name=FUNCTION)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of padded images, one after the other; of volumes all images are, as if they were of one."""

    size: int  # m
    down: int  # in an image
    across: int
    batch: int
    frames: int = 0  # images of a volume; 0: there are images alone

    @property
    def of_image(self) -> int:
        """How many an image has."""
        return self.down * self.across

    @property
    def count(self) -> int:
        """How many there are."""
        return self.batch * max(1, self.frames) * self.of_image

    def number(self, image: Sequence[tirx.Expr], down: tirx.Expr, across: tirx.Expr) -> tirx.Expr:
        """The place of a tile of an image, (n,) or (n, frame), among all of them."""
        first, *frame = image
        one = first * self.frames + frame[0] if frame else first
        return (one * self.down + down) * self.across + across

    def begin(self, number: tirx.Expr) -> tuple[list[tirx.Expr], tirx.Expr, tirx.Expr]:
        """The image of a tile, and the line and column of it where its inputs begin."""
        image, rest = number // self.of_image, number % self.of_image
        at = [image // self.frames, image % self.frames] if self.frames else [image]
        return at, rest // self.across * self.size, rest % self.across * self.size


def _spread(padded: te.Tensor, tiles: _Tiles, transforms: Transforms, kind: str) -> te.Tensor:
    """B^T d B of each tile, n x n x tiles x C, in the element type of the kernel."""
    matrix, size, channels, own = transforms.data, transforms.window, int(padded.shape[-1]), _KINDS[kind].of_data

    def inputs(number: tirx.Var, line: tirx.Var, column: tirx.Var, channel: tirx.Var) -> tirx.Expr:
        image, y, x = tiles.begin(number)
        return wide(padded(*image, y + line, x + column, channel), own)

    line, column = te.reduce_axis((0, size), "line"), te.reduce_axis((0, size), "column")
    half = te.compute(
        (tiles.count, size, size, channels),
        lambda p, a, j, c: te.sum(inputs(p, line, j, c) * entry(matrix, a, line, own), axis=line),
        name="data_lines",
    )
    spread = te.compute(
        (size, size, tiles.count, channels),
        lambda a, b, p, c: te.sum(half[p, a, column, c] * entry(matrix, b, column, own), axis=column),
        name="data_columns",
    )
    return spread if own == kind else rounded(spread, kind)


def _product(spread: te.Tensor, kernel: te.Tensor, tiles: _Tiles, groups: int) -> te.Tensor:
    """Of each position, summed over the channels of a group, and of volumes over the images that a result sees, each of
    which has its tiles as many places later as an image has tiles. What begins in one volume and ends in the next is
    unused.
    """
    size, _, *seen, channels, columns = (int(extent) for extent in kernel.shape)
    channel = te.reduce_axis((0, channels), "channel")
    steps = [te.reduce_axis((0, extent), "frame") for extent in seen]
    count, sums = tiles.count - sum(extent - 1 for extent in seen) * tiles.of_image, _KINDS[str(kernel.dtype)].sums

    def product(a: tirx.Var, b: tirx.Var, p: tirx.Var, o: tirx.Var) -> tirx.Expr:
        place = sum((step * tiles.of_image for step in steps), p)
        own = channel if groups == 1 else o // (columns // groups) * channels + channel
        factors = wide(spread(a, b, place, own), sums), wide(kernel(a, b, *steps, channel, o), sums)
        return te.sum(factors[0] * factors[1], axis=[*steps, channel])

    return te.compute((size, size, count, columns), product, name="product")


def _results(product: te.Tensor, transforms: Transforms, kind: str) -> te.Tensor:
    """A^T M A of each tile, in an element type: tiles x m x m x O."""
    size, _, count, columns = (int(extent) for extent in product.shape)
    matrix, tile = transforms.result, transforms.tile
    position, other = te.reduce_axis((0, size), "position"), te.reduce_axis((0, size), "other")
    lines = te.compute(
        (count, tile, size, columns),
        lambda p, i, b, o: te.sum(
            wide(product(position, b, p, o), kind) * entry(matrix, i, position, kind), axis=position
        ),
        name="result_lines",
    )
    return te.compute(
        (count, tile, tile, columns),
        lambda p, i, j, o: te.sum(lines[p, i, other, o] * entry(matrix, j, other, kind), axis=other),
        name="result_columns",
    )


def _fits_sums(kernel: np.ndarray, tile: int) -> bool:
    """Whether sums of products of bytes and a kernel fit 32 bits, whatever the bytes are.

    Transformed, they lie between sums of the entries that they are multiplied with."""
    line = integral(tile, kernel.shape[0])[0].data
    up, down = np.maximum(line, 0).sum(axis=1), np.maximum(-line, 0).sum(axis=1)
    high, low = np.outer(up, up) + np.outer(down, down), np.outer(up, down) + np.outer(down, up)
    factors = transformed(kernel, tile, _PAIRS)
    added, taken = (np.maximum(each, 0).sum(axis=2, dtype=np.float64) for each in (factors, -factors))
    (high, low), sums = (each[..., None] for each in (high, low)), (added, taken)
    largest = max(float((a * high + b * low).max()) for a, b in (sums, sums[::-1]))
    return _BYTES * largest < 1 << 31


def _tile(call: relax.Call, kind: str, instructions: str, lanes: int, most: int = 4) -> int:
    """m of the transform for a call; 0 if it is no such convolution, or would not be faster."""
    if not is_call(call, "relax.nn.conv2d", "relax.nn.conv3d") or dtype(call) != _KINDS[kind].sums:
        return 0
    attrs = call.attrs
    apart, dilation = int(attrs.dilation[0]), {int(n) for n in attrs.dilation}
    may_be_apart = kind == _WIDE and is_call(call, "relax.nn.conv2d")
    is_plain = {int(n) for n in attrs.strides} == {1} and dilation == {apart if may_be_apart else 1}
    data, kernel, out = shape_of(call.args[0]), shape_of(call.args[1]), shape_of(call)
    if not is_plain or not is_channels_last(call) or not out or not data:
        return 0
    *depth, lines, columns, inputs, outputs = kernel
    groups = groups_of(call)
    if lines != columns or inputs % _LANES or outputs // groups % _LANES:
        return 0
    if groups > 1 and (kind == _NARROW or outputs // groups % lanes):  # their columns are not padded
        return 0
    frames, channels = (math.prod(data[:-3]), math.prod(out[:-3])), (inputs * groups, outputs)
    image, moved = (out[-3], out[-2]), 0
    if apart > 1:
        image, frames = dilated.extents(*image, apart), (frames[0] * apart**2, frames[1] * apart**2)
        moved = math.prod(data) + math.prod(out)
        if min(image) < _SMALLEST:
            return 0
    return best_tile(image, channels, frames, math.prod(depth), kind, instructions, lines, groups, most, moved)


def _emit(
    tile: int, kind: str, outputs: int, builder: relax.BlockBuilder, call: relax.Call, args: Sequence[relax.Expr]
) -> relax.Expr:
    data, kernel = args
    padding: Sequence[int] = [int(p) for p in call.attrs.padding]
    value = 0
    if kind == _NARROW:
        data = builder.emit(op.astype(data, kind))
    elif kind == _PAIRS:
        data, padding, value = taken_in(builder, data, padding)
    if (dilation := int(call.attrs.dilation[0])) > 1:
        _, height, width, _ = shape_of(call)
        lines, pixels = (n + shape_of(call.args[1])[0] - 1 for n in dilated.extents(height, width, dilation))
        data, padding = dilated.apart(builder, data, padding, dilation, lines, pixels), [0] * 4
    computed = builder.call_te(
        convolution, data, kernel, tile, padding, groups_of(call), value,
        primfunc_name_hint=FUNCTION, primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE),
    )  # fmt: skip
    if shape_of(kernel)[-1] > outputs:
        computed = widen.cut(builder, builder.emit(computed), outputs)
    return dilated.together(builder, builder.emit(computed), dilation, shape_of(call)) if dilation > 1 else computed
