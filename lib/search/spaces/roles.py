"""The roles of a block's axes, for the spaces that tile them: rows, columns, reduction, windows, transpositions."""

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import SBlock
from tvm.sym import Analyzer

from lib.machine.dots import INT8
from lib.tir import analysis
from lib.tir.operators import operator

_SUMS = ("float32", "int32")  # element types of sums that registers are tiled for
_SIDE_BY_SIDE = 4  # elements at most
_BY_CHANNEL = (  # reductions that may be over space alone
    "depthwise_conv1d", "depthwise_conv2d", "depthwise_conv3d", "max_pool", "min_pool", "avg_pool",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Roles:
    """The axes of a contraction or of a window by their roles: positions among the block's axes."""

    batch: tuple[int, ...]  # in the data and in the weights; of weights that are chosen, their blocks of columns
    rows: tuple[int, ...]  # in the data alone, in the order of the output
    columns: int  # in the weights alone, and last in the output
    reduction: tuple[int, ...]
    groups: int = 1  # of columns, contiguous, each with data of its own


def contraction_roles(block: SBlock) -> Roles | None:
    """The axes of a sum of products; None if it is another block, or its columns are not contiguous."""
    product = analysis.weight_and_data(block)
    if product is None or str(analysis.stored(block).buffer.dtype) not in _SUMS:
        return None
    axes = [axis.var for axis in block.iter_vars]
    column = analysis.stored(block).indices[-1]
    weight, data = product
    of_weight, of_data = analysis.own_variables(weight), analysis.variables(data.indices)
    groups = _groups(data, column, analysis.extents(block).get(column, 0))
    if column not in axes or not groups or not analysis.column(weight).same_as(column):
        return None
    spatial = analysis.spatial_axes(block)
    rows = tuple(n for n in spatial if axes[n] not in of_weight)
    shared = (of_weight if analysis.is_chosen(weight) else of_weight & of_data) - {column}
    batch = tuple(n for n in spatial if axes[n] in shared)
    columns = [n for n in spatial if n not in rows and n not in batch]
    reduction = tuple(analysis.reduction_axes(block))
    if not rows or not reduction or len(columns) != 1 or not axes[columns[0]].same_as(column):
        return None
    return Roles(batch, rows, columns[0], reduction, groups)


def _groups(data: Any, column: Any, extent: int) -> int:
    """The number of groups of columns that read the same data; 0 if single columns read data of their own."""
    divisions = [div for div in analysis.walk(data.indices, tirx.FloorDiv) if div.a.same_as(column)]
    sizes = {int(div.b) for div in divisions if isinstance(div.b, tirx.IntImm)}
    n_uses = sum(var.same_as(column) for index in data.indices for var in analysis.walk(index, tirx.Var))
    if n_uses != len(divisions) or len(sizes) > 1:
        return 0
    size = sizes.pop() if sizes else extent
    return extent // size if size and extent % size == 0 else 0


def window_roles(block: SBlock) -> Roles | None:
    """The axes of a window that slides over a signal, an image or a volume, for each channel (the last axis) by itself.

    None if it is another block: one that reduces over channels, or does not slide.
    """
    if block.init is None or len(analysis.walk(block.body, tirx.BufferStore)) > 2:
        return None
    if operator(block).removesuffix("_int8") not in _BY_CHANNEL:
        return None
    store = analysis.stored(block)
    axes = [axis.var for axis in block.iter_vars]
    column = store.indices[-1]
    loads = analysis.loaded(store)
    extents = analysis.extents(block)
    is_of_words = analysis.of_words(block)
    channels = [
        {var for var in analysis.variables([_channel(load, is_of_words)]) if var.same_as(column) or extents[var] > 1}
        for load in loads
    ]
    if column not in axes or any(found != {column} for found in channels):
        return None
    columns = analysis.last_axis(block)
    rows = tuple(n for n in analysis.spatial_axes(block) if n != columns)
    reduction = tuple(analysis.reduction_axes(block))
    return Roles((), rows, columns, reduction) if len(rows) >= 2 and reduction else None


def _channel(load: Any, is_of_words: bool) -> Any:
    """The index of a load along the channels: the last one, but that of weights which words are multiplied by, where
    the bytes of one come last."""
    return load.indices[-2 if is_of_words and str(load.source.dtype) == INT8.weights else -1]


def row_extents(block: SBlock) -> tuple[int, ...] | None:
    """The extents of a reduction (sum, maximum, minimum) in float32 or int32 over the last axis of what it reads: those
    of its spatial axes, then that of the reduction. None if it is another block, or a contraction."""
    *spatial, last = block.iter_vars
    store = analysis.stored(block)
    if (
        block.init is None
        or len(analysis.walk(block.body, tirx.BufferStore)) > 1
        or str(store.buffer.dtype) not in _SUMS
    ):
        return None
    if int(last.iter_type) != analysis.REDUCTION or any(int(axis.iter_type) != analysis.SPATIAL for axis in spatial):
        return None
    if not isinstance(store.value, (tirx.Add, tirx.Max, tirx.Min)) or analysis.factors(block) is not None:
        return None
    loads = analysis.loaded(store)
    rows = [load for load in loads if last.var in analysis.variables(load.indices)]
    if not rows or not all(load.indices[-1].same_as(last.var) for load in rows):
        return None
    return tuple(analysis.extents(block).values())


def transposed(block: SBlock) -> int | None:
    """The axis of an element-wise block that is contiguous in a tensor that it reads, where another axis is contiguous
    in the tensor that it writes.

    Returns:
        Its position; one after the last if it is not the last axis itself but stretches of it (see `period`) that are
        contiguous in steps of one stretch, as in a channel shuffle. None if there is no such axis, or several. Where a
        few elements stay side by side (`side_by_side`), contiguous in steps of those.
    """
    stores = analysis.walk(block.body, tirx.BufferStore)
    if block.init is not None or len(stores) != 1 or analysis.walk(block.body, tirx.For):
        return None
    axes = [axis.var for axis in block.iter_vars]
    extents = analysis.extents(block)
    last = analysis.column_written(block)
    if not axes or not last.same_as(axes[-1]) or extents[axes[-1]] == 1:
        return None
    found: set[int] = set()
    length, together = period(block), side_by_side(block)
    for load in analysis.walk(stores[0].value, tvm.ir.TensorLoad):
        strides = [
            analysis.stride(load.indices, load.source.ty.shape, axis) if extents[axis] > 1 else 0 for axis in axes
        ]
        if strides[-1] > 1:
            strides += [analysis.stride(load.indices, load.source.ty.shape, last, length)] if length else []
            found |= {n for n, stride in enumerate(strides) if stride == 1}
        elif together > 1 and strides[-2] > extents[last]:
            found |= {n for n, stride in enumerate(strides[:-2]) if stride == extents[last]}
    return found.pop() if len(found) == 1 else None


def side_by_side(block: SBlock) -> int:
    """How many elements an element-wise block moves together, as packing for `lib.machine.dots` does: the extent of its
    last axis, where that is short, and contiguous in what is read as well; else 1."""
    axis, extent = block.iter_vars[-1].var, analysis.extents(block)[block.iter_vars[-1].var]
    loads = analysis.walk(analysis.stored(block).value, tvm.ir.TensorLoad)
    strides = {analysis.stride(load.indices, load.source.ty.shape, axis) for load in loads}
    return extent if len(block.iter_vars) > 1 and 1 < extent <= _SIDE_BY_SIDE and strides == {1} else 1


def period(block: SBlock) -> int:
    """The length of the stretches into which a block divides the last axis of what it writes to address what it reads,
    as reshapes and channel shuffles do; 0 if there is no division, or several."""
    stores = analysis.walk(block.body, tirx.BufferStore)
    last = block.iter_vars[-1].var if block.iter_vars else None
    if len(stores) != 1 or last not in analysis.variables([stores[0].indices[-1]]):
        return 0
    analyzer = Analyzer()
    for axis in block.iter_vars:
        analyzer.bind(axis.var, axis.dom)
    loads = analysis.walk(stores[0].value, tvm.ir.TensorLoad)
    indices = [analyzer.simplify(index) for load in loads for index in load.indices]
    divisions = [node for kind in (tirx.FloorDiv, tirx.FloorMod) for node in analysis.walk(indices, kind)]
    lengths = {int(node.b) for node in divisions if node.a.same_as(last) and isinstance(node.b, tirx.IntImm)}
    length = lengths.pop() if len(lengths) == 1 else 0
    return length if length > 1 and analysis.extents(block)[last] % length == 0 else 0
