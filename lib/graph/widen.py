"""Output channels padded to whole vectors: 1000 become 1008, of which the last eight are computed for nothing.

A register tile is made of whole vectors (`lib.search.spaces.tiling`). With 1,000 channels these would be half as wide,
since 16 does not divide them, and the kernel would run at half the speed. So the weights are padded with channels of
zeros, and the epilogue of the tile drops what they give (a function `cut`, which FuseOps fuses into the contraction).
So are those of 272: no number of vectors that a tile holds divides 17, and tiles of one load a number for each product.
Of sixteen registers a tile of two rows or more has two vectors or three, so there 40 channels, five vectors, become 48,
and 1,000 become 1,008 (benchmarks/notes/avx2.md, "Tiles of sixteen registers").
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from tvm import relax, te, tirx

from lib.graph import patterns
from lib.graph.reweight import Choose, Replacement, shape_of
from lib.graph.rewrite import CONTRACTIONS, alike, dtype, groups_of, has_columns_last, is_call
from lib.machine.registers import Registers, narrowed

SUMS = ("float32", "int32")  # element types of results that get more channels
_FUNCTION = "cut"  # name of the functions that drop the channels, for people
_MIN_ROWS = 8  # with fewer, the kernel is bound by reading the weights, of which there would be more
_MOST_VECTORS = {16: 3, 32: 13}  # of a tile, by how many registers there are
_MIN_LANES = 4  # of vectors; where no more fill the columns, as 222, there is no register tile at all


def replacement(machine: Registers) -> Choose:
    """What pads the output channels of convolutions and products with weights to vectors that fill tiles, where that is
    faster."""
    return partial(_replacement, machine)


def _replacement(machine: Registers, call: relax.Call) -> Replacement | None:
    if not is_call(call, *CONTRACTIONS) or dtype(call) not in SUMS:
        return None
    weight, out = shape_of(call.args[1]), shape_of(call)
    if not weight or not out or not has_columns_last(call, weight):
        return None
    groups = groups_of(call)
    columns, lanes = weight[-1] // groups, machine.lanes
    wider = computed(columns, lanes)
    if machine.spreads or (groups == 1 and dtype(call) == SUMS[0]):  # of bytes: two instructions to each load
        wider = in_tiles(wider, machine)
    is_read_once = int(np.prod(out[:-1])) < _MIN_ROWS
    is_narrow = narrowed(lanes, columns) >= _MIN_LANES or columns == 1
    if (is_read_once and is_narrow) or wider == columns:
        return None
    if groups > 1 and columns < lanes // 2:  # depthwise, or nearly: most of the padded channels would be padding
        return None
    return Replacement(
        kind=(_FUNCTION, groups, wider),
        value=partial(padded, groups, wider - columns),
        shape=(*weight[:-1], groups * wider),
        emit=partial(_emit, columns),
        dtype=dtype(call.args[1]),
    )


def padded(groups: int, more: int, weight: np.ndarray) -> np.ndarray:
    """A weight with `more` columns of zeros after those of each group."""
    apart = weight.reshape(*weight.shape[:-1], groups, -1)
    return np.pad(apart, [(0, 0)] * (apart.ndim - 1) + [(0, more)]).reshape(*weight.shape[:-1], -1)


def computed(columns: int, lanes: int) -> int:
    """How many columns there are, or how many fill whole vectors: these, if the share of them that is of use is larger
    than the share of a register that vectors without padding would fill. A single column fills none, and has no
    register tile: a vocoder's samples, a map of depths."""
    wider = -(-columns // lanes) * lanes
    return wider if columns == 1 or columns / wider > narrowed(lanes, columns) / lanes else columns


def in_tiles(columns: int, machine: Registers) -> int:
    """How many columns are computed where tiles of one vector would be left: another vector, and two divide them."""
    vectors, rest = divmod(columns, machine.lanes)
    most = _MOST_VECTORS[machine.count]
    is_alone = not rest and vectors > most and all(vectors % n for n in range(2, most + 1))
    return columns + machine.lanes if is_alone else columns


def _emit(columns: int, builder: relax.BlockBuilder, call: relax.Call, args: Sequence[relax.Expr]) -> relax.Expr:
    wide = alike(call, args[0], args[1], dtype(call))
    return cut(builder, builder.emit(wide), columns, groups_of(call))


def cut(builder: relax.BlockBuilder, wide: relax.Expr, columns: int, groups: int = 1) -> relax.Expr:
    """The first `columns` of each group of a product's or convolution's channels; part of its epilogue."""
    drop, marks = partial(_cut, groups, columns), patterns.marks(patterns.ELEMENTWISE)
    return builder.call_te(drop, wide, primfunc_name_hint=_FUNCTION, primfunc_attrs=marks)


def _cut(groups: int, columns: int, wide: te.Tensor) -> te.Tensor:
    """The first `columns` channels of each group."""
    shape, wider = [*wide.shape[:-1], tirx.IntImm("int64", groups * columns)], int(wide.shape[-1]) // groups

    def padded(column: tirx.Var) -> tirx.Expr:
        return column if groups == 1 else column // columns * wider + column % columns

    return te.compute(shape, lambda *index: wide(*index[:-1], padded(index[-1])), name=_FUNCTION)
