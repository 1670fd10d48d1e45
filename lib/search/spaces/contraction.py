"""A space for contractions on CPUs: a register tile of accumulators, filled by one loop over the reduction.

MetaSchedule tiles every loop alike (SSRSRS) and leaves it to chance that an inner tile fits the registers, that its
columns fill vectors, and that LLVM keeps it there. Here that is how the space is made: for each step of the K loop the
micro-kernel loads the vectors of one row of weights once and multiplies them with broadcast elements of the data into
`rows x vectors` accumulators, as many as the machine has registers for. It is the inner kernel of Goto and van de
Geijn, "Anatomy of High-Performance Matrix Multiplication" (TOMS 2008), for convolutions as well: their rows are
neighbouring pixels. What is left to the search is how many rows and vectors, how far the K loop is unrolled, and which
part of the output a parallel task computes and in which order.

    parallel (batch, rows.0, groups, columns.0)
        columns.1, rows.1, other rows
            reduction.0, kernel window
                reduction.1 (unrolled), rows (unrolled), vectors (unrolled), lanes (vectorised)
            the epilogue of the tile
        of groups that were widened (`lib.graph.widen`): what takes the first columns of each

Groups of fewer columns than a vector has lanes share one, if they have as many channels each: an element of the data is
spread to the lanes of its group (`lib.tir.spread`), and there are no loops over groups.

Where the data of a task leave L2, it goes through the reduction in slabs, outermost: one after the other, each for all
of its tiles, whose sums are added to those of the slabs before. What follows comes after the last. Where a reduction is
so deep that the weights of a tile are several times as large as L1, this is left to the search: all rows of a task read
those of a slab while they are near.

Weights are packed to be read in order by MetaSchedule's RewriteLayout, where they are marked as free to be. Elements
narrower than float32 are multiplied by an instruction that adds several products to each lane, where the machine has it
for them (`lib.tir.dot`): one more loop, innermost, over the products that it adds.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from lib.machine.dots import BF16, Dot
from lib.machine.registers import Registers, registers
from lib.search.spaces import tiling
from lib.search.spaces.microkernel import Slabs, tile_contraction
from lib.search.spaces.roles import Roles, contraction_roles
from lib.search.spaces.space import Space, feasible
from lib.search.spaces.tiling import Image, Tile
from lib.tir import analysis, small_weights
from lib.tir.parameters import weight_positions

_FEW_ROWS = 4  # instructions for matrices would wait for each other
_STAYS = 5 << 18  # bytes of data that stay in L2 (2 MB) beside weights
_ENOUGH = 128  # rows of a task, for which its weights are read once
_MOST_SLABS = 8
_FAR = 1 << 17  # bytes of the weights of a vector of columns, if it is faster to read them slab by slab
_NEAR = range(1 << 14, (1 << 16) + 1)  # bytes of these in a slab
_STEPS = 8  # of the reduction in a slab, or a multiple
_ROWS = 32  # two register tiles or more


def space(remainders: bool = True) -> Space:
    """The space; its register tiles divide every output, unless `remainders` are allowed (`tiling.tiles`)."""
    return Space(
        "contraction",
        fits=partial(fits, remainders=remainders),
        sketches=partial(sketches, remainders=remainders),
        packs_weights=partial(packs_weights, remainders=remainders),
    )


def fits(workload: tvm.IRModule, target: Target, remainders: bool = True) -> bool:
    """Whether the space has programs of a workload: one contraction, with element-wise blocks around it."""
    return bool(_tiles_of(workload, target, remainders))


def packs_weights(workload: tvm.IRModule, target: Target, remainders: bool = True) -> bool:
    """Whether RewriteLayout can bring the weights of all programs of a workload that fits into their order.

    It knows no layouts with gaps: where vectors do not fill the columns, the one that it finds splits vectors. Where
    some are read more often than others, it writes them as often, and it knows nothing of a table that chooses among
    them; these have their order already.
    """
    reduction = analysis.only_reduction(workload["main"])
    operands = None if reduction is None else analysis.weight_and_data(reduction)
    assert reduction is not None
    assert operands is not None
    if analysis.is_in_vectors(operands[0]) or analysis.is_chosen(operands[0]):
        return False
    columns = int(reduction.iter_vars[analysis.last_axis(reduction)].dom.extent)
    return all(columns % tile.lanes == 0 for tile in _tiles_of(workload, target, remainders))


def _tiles_of(workload: tvm.IRModule, target: Target, remainders: bool) -> list[Tile]:
    reduction = analysis.only_reduction(workload["main"])
    roles = contraction_roles(reduction) if reduction else None
    if reduction is None or roles is None:
        return []
    return _tiles(workload["main"], reduction, roles, registers(target), remainders)


def sketches(schedule: Schedule, block: SBlockRV, machine: Registers, remainders: bool = True) -> list[Schedule]:
    """Of a contraction, one for each number of vectors in a tile and each place of the padding; element-wise
    blocks before it were inlined."""
    roles = contraction_roles(schedule.get(block))
    if roles is None or len(schedule.get_loops(block)) != len(schedule.get(block).iter_vars):
        return []
    places = (False, True) if schedule.get_producers(block) else (False,)

    def tiled(tile: Tile, padded_in_task: bool, slabs: Slabs | None, sketch: Schedule) -> None:
        tile_contraction(sketch, block, roles, tile, sketch.get_producers(block), padded_in_task, slabs=slabs)

    tiles = _tiles(schedule.mod["main"], schedule.get(block), roles, machine, remainders)
    if not tiles:
        return []
    by_slab = _slabs(schedule.get(block), roles, tiles)
    return feasible(schedule, [partial(tiled, *choice) for choice in itertools.product(tiles, places, by_slab)])


def _slabs(reduction: SBlock, roles: Roles, tiles: Sequence[Tile]) -> list[Slabs | None]:
    """Into which parts a reduction may be cut; None: into none."""
    operands = analysis.weight_and_data(reduction)
    assert operands is not None
    weight, data = operands
    if roles.groups > 1 or roles.batch:
        return [None]
    if analysis.is_in_vectors(weight):
        return [_for_data(reduction, roles, data)]
    if any(tile.matrix for tile in tiles):
        return [None]
    near = _for_weights(reduction, roles, max(tile.lanes for tile in tiles) * analysis.itemsize(weight.source.dtype))
    return [None, near] if near else [None]


def _for_weights(reduction: SBlock, roles: Roles, vector: int) -> Slabs | None:
    """Parts of a deep reduction whose weights stay near while all rows of a task read them.

    Args:
        vector: Bytes of the weights that are multiplied by one number.
    """
    extents = [int(axis.dom.extent) for axis in reduction.iter_vars]
    *window, channels = (extents[n] for n in roles.reduction)
    of_all = math.prod(window) * channels * vector
    counts = tuple(n for n in tiling.divisors(channels) if of_all // n in _NEAR and channels // n % _STEPS == 0)
    are_read_again = math.prod(extents[n] for n in roles.rows) >= _ROWS
    return Slabs(len(window), counts) if of_all > _FAR and are_read_again and counts else None


def _for_data(reduction: SBlock, roles: Roles, data: Any) -> Slabs | None:
    """Parts of a product's reduction, which is in blocks (`lib.graph.splitting`), if that is so deep that the data of a
    task with rows enough do not stay in L2 beside its weights."""
    *window, _blocks, _product, _turn = (int(reduction.iter_vars[n].dom.extent) for n in roles.reduction)
    blocks, *rows, parts, length = map(int, data.source.ty.shape)
    of_row = blocks * parts * length * analysis.itemsize(data.source.dtype)
    counts = tuple(n for n in tiling.divisors(blocks) if 1 < n <= _MOST_SLABS)
    is_deep = math.prod(window) == 1 and of_row * min(math.prod(rows), _ENOUGH) > _STAYS
    return Slabs(len(window), counts) if is_deep and counts else None


def _tiles(
    function: tirx.PrimFunc, reduction: SBlock, roles: Roles, machine: Registers, remainders: bool
) -> list[Tile]:
    """Those for a block of a function. In groups, what lies beyond the last column of one is inside the next, so that
    tiles must divide them."""
    extents = [int(axis.dom.extent) for axis in reduction.iter_vars]
    columns = extents[roles.columns] // roles.groups
    may_remain, row_bytes = remainders and roles.groups == 1, _row_bytes(reduction, roles)
    dot = instruction(function, reduction, roles, machine)
    words = _words_together(reduction, roles, dot)
    left = machine.beside(dot, words)
    found = tiling.tiles(extents[roles.rows[-1]], columns, left, remainders=may_remain, row_bytes=row_bytes)
    if dot is None:
        if tiles := _spread(extents, roles, machine) or found:
            return tiles
        return tiling.narrow_tiles(extents[roles.rows[-1]], columns, machine) if may_remain else []
    matrices = [] if extents[roles.rows[-1]] < _FEW_ROWS else _of_matrices(reduction, roles, machine, dot)
    if not matrices and dot == BF16 and (spread := _spread(extents, roles, machine)):
        return [replace(tile, dot=dot, steps=tile.steps // dot.depth) for tile in spread]
    return matrices or [replace(tile, dot=dot, words=words) for tile in found if columns % tile.lanes == 0]


def _words_together(reduction: SBlock, roles: Roles, dot: Dot | None) -> int:
    """How many words of small weights are added together before they are to the sums; 1 of others."""
    most = min(dot.words, int(reduction.annotations.get(small_weights.MARK, 1))) if dot else 1
    channels = int(reduction.iter_vars[roles.reduction[-1]].dom.extent)
    return most if dot and channels % (most * dot.depth) == 0 else 1


def _spread(extents: Sequence[int], roles: Roles, machine: Registers) -> list[Tile]:
    """Tiles whose vectors have the columns of several groups, where one group does not fill a vector and has as many
    channels as columns: see `lib.tir.spread`."""
    columns, channels = extents[roles.columns], extents[roles.reduction[-1]]
    of_group = columns // roles.groups
    fills_part = 1 < of_group < machine.lanes and machine.lanes % of_group == 0
    if roles.groups == 1 or of_group != channels or not fills_part:
        return []
    # No element of the data serves two accumulators, and LLVM keeps some in registers: with 28 accumulators, which fit
    # 32 registers otherwise, ResNeXt's take twice as long as with 7 to 16.
    found = tiling.tiles(extents[roles.rows[-1]], columns, replace(machine, count=machine.count // 2))
    return [replace(tile, spread=True, steps=channels) for tile in found if tile.lanes == machine.lanes]


def _row_bytes(reduction: SBlock, roles: Roles) -> int:
    """From one row of the data to the next; 0 if that is not constant."""
    operands = analysis.weight_and_data(reduction)
    assert operands is not None
    _, data = operands
    elements = analysis.stride(data.indices, data.source.ty.shape, reduction.iter_vars[roles.rows[-1]].var)
    return elements * analysis.itemsize(data.source.dtype)


def _of_matrices(reduction: SBlock, roles: Roles, machine: Registers, dot: Dot) -> list[Tile]:
    """The tiles for an instruction that multiplies matrices, if the machine has one for these elements, and the rows of
    the data are equally far apart."""
    matrix = machine.matrix(dot)
    operands = analysis.weight_and_data(reduction)
    if matrix is None or operands is None:
        return []
    extents, (_, data) = [int(axis.dom.extent) for axis in reduction.iter_vars], operands
    rows, columns, channels = (extents[n] for n in (roles.rows[-1], roles.columns, roles.reduction[-1]))

    def stride(n: int) -> int:
        """Of the data with a row axis; 0 if it is not constant."""
        at, var = (data.indices, data.source.ty.shape), reduction.iter_vars[n].var
        return analysis.stride(*at, var) if analysis.is_linear(*at, var, extents[n]) else 0

    if rows > 1 and not stride(roles.rows[-1]):
        return []
    lines = extents[roles.rows[-2]] if len(roles.rows) > 1 else 1
    is_even = lines > 1 and stride(roles.rows[-2]) == rows * stride(roles.rows[-1])
    return tiling.matrix_tiles(Image(lines, rows, is_even), columns // roles.groups, channels // dot.depth, matrix)


def instruction(function: tirx.PrimFunc, reduction: SBlock, roles: Roles, machine: Registers) -> Dot | None:
    """The instruction that multiplies a contraction's elements, if the machine has one. It takes neighbours along the
    reduction: weights of the model are packed in that order here, activations are or are not; data have it anyway."""
    operands = analysis.weight_and_data(reduction)
    assert operands is not None
    (weight, data), channel = operands, reduction.iter_vars[roles.reduction[-1]]
    weights = [function.params[n] for n in weight_positions(function)]
    is_free = any(weight.source.same_as(each) for each in weights)
    if not (is_free or analysis.is_packed(weight)) or analysis.stride(data.indices[-1:], [1], channel.var) != 1:
        return None
    types = str(data.source.dtype), str(weight.source.dtype), str(analysis.stored(reduction).buffer.dtype)
    of_small = [machine.for_small] if machine.for_small and small_weights.MARK in reduction.annotations else []
    fitting = (dot for dot in (*machine.dots, *of_small) if (dot.data, dot.weights, dot.sums) == types)
    return next((dot for dot in fitting if int(channel.dom.extent) % dot.depth == 0), None)
