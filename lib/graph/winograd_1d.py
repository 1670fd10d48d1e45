"""Convolutions along one axis with fewer multiplications: minimal filtering F(m, r) of signals.

Of signals, and of images and volumes whose kernels are long along one axis alone (1x7, 7x1, 3x1x1). As in
`lib.graph.winograd`, a tile of m results is computed from m + r - 1 data d and r taps g as A^T [(G g) * (B^T d)];
summed over the input channels, the product in the middle is one matrix product for each of the m + r - 1 positions.
F(6, 3) takes four ninths of the multiplications of a kernel of three.

The numbers in the transforms of longer kernels would be large. So a long kernel is cut into pieces of m taps, whose
data begin one tile after the other: the products of a position sum over the pieces too, and data are transformed once.
Nine taps are two pieces of F(5, 5), which take 18 multiplications for 45; eleven three of F(4, 4), 21 for 44.
Of a dilated kernel, a tile has results as far apart as the taps. With a stride s, s data that follow one another are as
one of s times as many channels, of which a kernel has as many taps fewer.

Errors in float32 are two to four times those of the definition, with F(5, 5) eight times. In bf16 the products read
transformed data and kernels in bf16; that makes 1.2 to 2 times the error of the convolution in bf16 with four or five
positions, and with more too much.
Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016), section 3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np
from tvm import relax, te, tirx
from tvm.relax import op

from lib.graph import patterns, widen
from lib.graph.filters import Transforms, entry, minimal, rounded, wide
from lib.graph.reweight import Choose, Replacement, shape_of
from lib.graph.rewrite import dtype, groups_of, is_call, is_channels_last

FUNCTION = "conv1d_winograd"  # name of the functions that compute one, for people
_WIDE, _NARROW = "float32", "bfloat16"
_FILTERS = {  # m and r to choose from
    _WIDE: ((4, 2), (6, 2), (3, 3), (4, 3), (6, 3), (4, 4), (4, 5), (5, 5)),
    _NARROW: ((3, 2), (4, 2), (2, 3), (3, 3)),
}
_CHANNELS, _LANES, _WHOLE = 4, 8, 16  # that fill a fourth, a half and all of a vector: of data, results, and strides
_SIGNAL = 3  # axes: (N, W, C)
_FROM_MEMORY, _BETWEEN = 10, 8  # cost of an element, in multiplications
_WORTH_IT = 0.9  # of the multiplications that there were
_FARTHEST = 16  # distance of taps: the results of all tiles that begin within it are unrolled
_MORE, _SIZES = 0.05, range(8, 129)  # of the tiles; of tasks and register tiles


@dataclass(frozen=True, slots=True)
class Filter:
    """How a kernel along one axis is computed."""

    tile: int  # m
    taps: int  # r, of a piece
    pieces: int
    distance: int = 1  # of taps: the dilation
    stride: int = 1  # of results, whose data are as one

    @property
    def transforms(self) -> Transforms:
        """The matrices of a piece."""
        return minimal(self.tile, self.taps)


def replacement(lanes: int = 1, *, is_narrow: bool = False) -> Choose:
    """What computes convolutions along one axis in Winograd's way, where that is faster.

    Args:
        lanes: Of the vectors that output channels are padded to where that is faster (`lib.graph.widen`); 1: of none.
        is_narrow: With products in bf16.
    """
    return partial(_replacement, lanes, _NARROW if is_narrow else _WIDE)


def _replacement(lanes: int, kind: str, call: relax.Call) -> Replacement | None:
    axis = _axis(call)
    if not axis:
        return None
    *window, inputs, outputs = shape_of(call.args[1])
    more = widen.computed(outputs, lanes) - outputs
    distance, stride = (int(each[axis - 1]) for each in (call.attrs.dilation, call.attrs.strides))
    taps = math.prod(window)
    if inputs % (_CHANNELS if stride == 1 else _WHOLE) or (outputs + more) % _LANES:
        return None
    choices = filters(taps, kind, distance, stride)
    chosen = best_filter(choices, taps, shape_of(call)[:-1], axis, (inputs, outputs + more), kind)
    if chosen is None:
        return None
    return Replacement(
        kind=(FUNCTION, chosen, kind, more),
        value=lambda kernel: transformed(widen.padded(1, more, kernel), chosen, kind),
        shape=(chosen.transforms.window, chosen.pieces, stride * inputs, outputs + more),
        emit=partial(_emit, chosen, axis, kind, outputs),
        dtype=kind,
    )


def _axis(call: relax.Call) -> int:
    """The axis of the data that the kernel of a convolution is along, and it alone; 0 if there is none, or the
    convolution is of another kind."""
    if not is_call(call, "relax.nn.conv1d", "relax.nn.conv2d") or groups_of(call) > 1:
        return 0
    if {dtype(call), *map(dtype, call.args)} != {_WIDE}:
        return 0
    data, kernel, attrs = shape_of(call.args[0]), shape_of(call.args[1]), call.attrs
    if not data or not kernel or not is_channels_last(call):
        return 0
    window, n_axes = kernel[:-2], len(kernel) - 2
    long = [n for n, taps in enumerate(window) if taps > 1]
    before, after = [int(n) for n in attrs.padding][:n_axes], [int(n) for n in attrs.padding][n_axes:]
    is_plain = all(before[n] == after[n] == 0 and int(attrs.strides[n]) == 1 for n in range(n_axes) if n not in long)
    if len(long) != 1 or not is_plain:
        return 0
    [n] = long
    return 0 if int(attrs.strides[n]) > 1 and int(attrs.dilation[n]) > 1 else 1 + n


def best_filter(
    choices: Sequence[Filter], taps: int, rows: Sequence[int], axis: int, channels: tuple[int, int], kind: str = _WIDE
) -> Filter | None:
    """How a kernel of some taps is computed with the least cost, from and to channels; None as it is defined.

    Counts as `lib.graph.winograd.best_tile` does, in multiplications of floats: what each algorithm multiplies, of
    which bf16 takes half the time, kernels that come from memory, and the elements between the transforms and the
    products, which stay in a cache.

    Args:
        rows: The extents of the results without their channels.
        axis: That the kernel is along.
    """
    share = 0.5 if kind == _NARROW else 1.0
    inputs, outputs = channels
    n_rows = math.prod(rows)

    def cost(chosen: Filter) -> float:
        n_tiles = n_rows // rows[axis] * tiles(rows[axis], chosen)
        window, depth = chosen.transforms.window, chosen.stride * inputs
        products = share * window * chosen.pieces * (n_tiles + _FROM_MEMORY) * depth * outputs
        return products + _BETWEEN * window * n_tiles * (share * depth + outputs)

    best = min(choices, key=cost, default=None)
    plain = share * taps * (n_rows + _FROM_MEMORY) * inputs * outputs
    return best if best and cost(best) < _WORTH_IT * plain else None


def filters(taps: int, kind: str = _WIDE, distance: int = 1, stride: int = 1) -> list[Filter]:
    """Those for a kernel of some taps: whole, or in pieces that begin where tiles do; none of taps far apart."""
    if distance > _FARTHEST:
        return []
    steps = -(-taps // stride)
    found = [Filter(tile, piece, -(-steps // piece), distance, stride) for tile, piece in _FILTERS[kind]]
    return [each for each in found if each.taps == steps or (each.tile == each.taps and each.pieces > 1)]


def tiles(results: int, chosen: Filter) -> int:
    """How many there are for so many results along the axis: those of each place within a distance, and a few more
    where tasks and register tiles can then be of more sizes."""
    needed = -(-results // (chosen.tile * chosen.distance))
    some = range(needed, int(needed * (1 + _MORE)) + 1)
    return max(some, key=lambda n: sum(n % size == 0 for size in _SIZES)) * chosen.distance


def transformed(kernel: np.ndarray, chosen: Filter, kind: str = _WIDE) -> np.ndarray:
    """G g for each piece and pair of channels: ... x I x O, one of the axes before with more than one element, to
    (m + r - 1) x pieces x (stride I) x O, summed in double precision."""
    inputs, outputs = kernel.shape[-2:]
    taps = kernel.reshape(-1, inputs, outputs).astype(np.float64)
    whole = np.pad(taps, [(0, chosen.pieces * chosen.taps * chosen.stride - len(taps)), (0, 0), (0, 0)])
    pieces = whole.reshape(chosen.pieces, chosen.taps, chosen.stride * inputs, outputs)
    found = np.einsum("ar,prio->apio", chosen.transforms.kernel, pieces).astype(np.float32)
    return found.astype(ml_dtypes.bfloat16) if kind == _NARROW else found


def convolution(
    data: te.Tensor, kernel: te.Tensor, chosen: Filter, axis: int, results: int, before: int
) -> te.Tensor:  # fmt: skip
    """A convolution of signals (N, W, C) or images (N, H, W, C) along one axis with a transformed kernel, to float32.

    Args:
        data: Of the element type of the kernel: float32 or bf16.
        axis: Of the data.
        results: How many there are along it.
        before: How many zeros precede the data; after them there are as many as are read.
    """
    extents = [int(extent) for extent in data.shape[:-1]]
    lines = _Tiles(chosen, tiles(results, chosen), math.prod(extents[1:]) // extents[axis])
    padded = _padded(data, lines.length, axis, before, chosen.stride)
    found = _results(_product(_spread(padded, lines, axis, kernel.dtype), kernel, lines), lines)

    def result(*at: tirx.Var) -> tirx.Expr:
        *row, o = at
        image, place, others = row[0], row.pop(axis), row[1:]
        block, n, phase = lines.of_result(place)
        return found[image, block, others[0] if others else 0, phase, n, o]

    rows = [results if n == axis else extent for n, extent in enumerate(extents)]
    return te.compute((*rows, int(kernel.shape[-1])), result, name=FUNCTION)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of a padded image, in blocks of those that begin within a distance, for each place in other axes."""

    filter: Filter
    results: int  # tiles along the axis, with results
    across: int  # places in an image that differ in other axes

    @property
    def along(self) -> int:
        """Tiles along the axis, with those that have data for the last results alone."""
        return self.results + (self.filter.pieces - 1) * self.filter.distance

    @property
    def length(self) -> int:
        """Of the padded data along the axis, in strides."""
        return self.along * self.filter.tile + (self.filter.taps - 1) * self.filter.distance

    def begin(self, number: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """Where along the axis the data of a tile begin, and where it is in other axes."""
        distance = self.filter.distance
        block, other, phase = number // (distance * self.across), number // distance % self.across, number % distance
        return block * self.filter.tile * distance + phase, other

    def of_result(self, place: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
        """The block of tiles that a result along the axis is in, which of a tile's it is, and the tile in the block."""
        tile, distance = self.filter.tile, self.filter.distance
        return place // (tile * distance), place // distance % tile, place % distance


def _padded(data: te.Tensor, length: int, axis: int, before: int, stride: int) -> te.Tensor:
    """Data with zeros around them along an axis, those of a stride side by side: in place of ... x W x C, ... x length
    x (stride C)."""
    *extents, channels = (int(extent) for extent in data.shape)

    def value(*at: tirx.Var) -> tirx.Expr:
        *row, c = at
        which, n = (c // channels, c % channels) if stride > 1 else (0, c)
        place = row[axis] * stride + which - before
        row[axis] = place
        is_within = tirx.all(place >= 0, place < extents[axis])
        return tirx.if_then_else(is_within, data(*row, n), tirx.const(0, data.dtype))

    shape = [length if n == axis else extent for n, extent in enumerate(extents)]
    return te.compute((*shape, stride * channels), value, name="pad_temp")


def _spread(padded: te.Tensor, lines: _Tiles, axis: int, kind: str) -> te.Tensor:
    """B^T d of each tile, (m + r - 1) x N x tiles x C, in the element type of the kernel."""
    transforms, (images, *_, channels) = lines.filter.transforms, (int(extent) for extent in padded.shape)
    n = te.reduce_axis((0, transforms.window), "place")

    def value(image: tirx.Var, number: tirx.Var, channel: tirx.Var) -> tirx.Expr:
        first, other = lines.begin(number)
        at = [other] if len(padded.shape) > _SIGNAL else []
        at.insert(axis - 1, first + n * lines.filter.distance)
        return wide(padded(image, *at, channel))

    spread = te.compute(
        (transforms.window, images, lines.along * lines.across, channels),
        lambda a, i, p, c: te.sum(value(i, p, c) * entry(transforms.data, a, n), axis=n),
        name="data_columns",
    )
    return rounded(spread, kind)


def _product(spread: te.Tensor, kernel: te.Tensor, lines: _Tiles) -> te.Tensor:
    """Of each position, summed over the channels and pieces: (m + r - 1) x N x tiles x O."""
    window, pieces, channels, columns = (int(extent) for extent in kernel.shape)
    piece, channel = te.reduce_axis((0, pieces), "piece"), te.reduce_axis((0, channels), "channel")
    step = lines.filter.distance * lines.across  # from one piece to the next

    def product(a: tirx.Var, i: tirx.Var, p: tirx.Var, o: tirx.Var) -> tirx.Expr:
        factors = spread(a, i, p + piece * step, channel), kernel(a, piece, channel, o)
        return te.sum(wide(factors[0]) * wide(factors[1]), axis=[piece, channel])

    return te.compute((window, spread.shape[1], lines.results * lines.across, columns), product, name="product")


def _results(product: te.Tensor, lines: _Tiles) -> te.Tensor:
    """A^T M of each tile: N x blocks x places in other axes x tiles of a block x m x O."""
    window, images, _, columns = (int(extent) for extent in product.shape)
    chosen, matrix = lines.filter, lines.filter.transforms.result
    position = te.reduce_axis((0, window), "position")

    def result(i: tirx.Var, block: tirx.Var, other: tirx.Var, phase: tirx.Var, n: tirx.Var, o: tirx.Var) -> tirx.Expr:
        number = (block * lines.across + other) * chosen.distance + phase
        return te.sum(product[position, i, number, o] * entry(matrix, n, position), axis=position)

    shape = (images, lines.results // chosen.distance, lines.across, chosen.distance, chosen.tile, columns)
    return te.compute(shape, result, name="result_columns")


def _emit(
    chosen: Filter, axis: int, kind: str, outputs: int, builder: relax.BlockBuilder, call: relax.Call,
    args: Sequence[relax.Expr],
) -> relax.Expr:  # fmt: skip
    data, kernel = args
    if kind != _WIDE:
        data = builder.emit(op.astype(data, kind))
    results, before = shape_of(call)[axis], int(call.attrs.padding[axis - 1])
    made = partial(convolution, chosen=chosen, axis=axis, results=results, before=before)
    marks = patterns.marks(patterns.OUT_ELEMENTWISE)
    computed = builder.call_te(made, data, kernel, primfunc_name_hint=FUNCTION, primfunc_attrs=marks)
    is_wider = shape_of(kernel)[-1] > outputs
    return widen.cut(builder, builder.emit(computed), outputs) if is_wider else computed
