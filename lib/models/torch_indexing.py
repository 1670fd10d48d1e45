"""Elements that are read or written where tensors say, as torch's advanced indexing has them, in Relax.

TVM 0.27's importer reads several axes one after the other, also where their indices belong together, and broadcasts
indices of different ranks to what has no common shape.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax


def _index(node: Any, importer: Any) -> relax.Var:
    """To read every element once, in order (as the masks of transformers are read), is to reshape; a single tensor of
    indices, or several that each have an axis of their own, are read axis by axis; others together."""
    x, indices = importer.env[node.args[0]], [importer.env.get(index) for index in node.args[1]]
    if all(isinstance(index, tvm.ir.Constant) for index in indices):
        numbers = np.arange(math.prod(node.args[0].meta["val"].shape)).reshape(node.args[0].meta["val"].shape)
        read = numbers[tuple(index.value.numpy() for index in indices)]
        if np.array_equal(read.ravel(), numbers.ravel()):
            return importer.block_builder.emit(relax.op.reshape(x, read.shape))
    taken = [axis for axis, index in enumerate(indices) if index is not None]
    if any(str(indices[axis].ty.dtype) == "bool" for axis in taken):
        return importer._index_tensor(node)
    crossed = _crossed(node, importer)
    return _together(node, importer, taken) if crossed is None else crossed


def _crossed(node: Any, importer: Any) -> relax.Var | None:
    """Neighbouring axes of which each is read at places of its own, as an enlarged volume reads them: axis by axis.
    None for all else."""
    taken = [(axis, index) for axis, index in enumerate(node.args[1]) if index is not None]
    shapes = [tuple(index.meta["val"].shape) for _, index in taken]
    rank = max(map(len, shapes))
    along = [[rank - len(shape) + n for n, extent in enumerate(shape) if extent != 1] for shape in shapes]
    places = [place for each in along for place in each]
    axes = [axis for axis, _ in taken]
    is_crossed = all(len(each) == 1 for each in along) and places == sorted(set(places))
    if len(taken) == 1 or not is_crossed or axes != list(range(axes[0], axes[0] + len(axes))):
        return None
    found, emit = importer.env[node.args[0]], importer.block_builder.emit
    for axis, index in taken:
        places_of_axis = emit(relax.op.reshape(_counted(importer.env[index], found, axis, emit), (-1,)))
        found = emit(relax.op.take(found, places_of_axis, axis=axis))
    return emit(relax.op.reshape(found, tuple(node.meta["val"].shape)))


def _together(node: Any, importer: Any, taken: Sequence[int]) -> relax.Var:
    """Axes whose indices belong together, as one axis with one index: where the first of them was, or at the front, if
    there are others between them."""
    found, emit = importer.env[node.args[0]], importer.block_builder.emit
    indices = [_counted(importer.env[node.args[1][axis]], found, axis, emit) for axis in taken]
    if len(taken) > 1:
        indices = [_from_start(index, int(found.ty.shape[axis]), emit)
                   for axis, index in zip(taken, indices, strict=True)]  # fmt: skip
    if list(taken) != list(range(taken[0], taken[0] + len(taken))):
        others = [axis for axis in range(found.ty.ndim) if axis not in taken]
        found, taken = emit(relax.op.permute_dims(found, [*taken, *others])), range(len(taken))
    shape, first, after = [int(n) for n in found.ty.shape], taken[0], taken[0] + len(taken)
    place = indices[0]
    for axis, index in zip(taken[1:], indices[1:], strict=True):
        place = emit(relax.op.add(emit(relax.op.multiply(place, relax.const(shape[axis], "int64"))), index))
    if len(taken) > 1:
        merged = math.prod(shape[first:after])
        found = emit(relax.op.reshape(found, (*shape[:first], merged, *shape[after:])))
    return emit(relax.op.take(found, place, axis=first))


def _counted(index: relax.Expr, found: relax.Expr, axis: int, emit: Callable[[relax.Expr], relax.Var]) -> relax.Expr:
    """Indices in int64 that are counted from the start, where they are known. Others are as they are: of one that is
    read as it comes it is known how large it may be, for the inputs that programs are tried with."""
    if isinstance(index, tvm.ir.Constant):
        places, extent = index.value.numpy().astype(np.int64), int(found.ty.shape[axis])
        return relax.const(np.where(places < 0, places + extent, places), "int64")
    return index if str(index.ty.dtype) == "int64" else emit(relax.op.astype(index, "int64"))


def _from_start(index: relax.Expr, extent: int, emit: Callable[[relax.Expr], relax.Var]) -> relax.Expr:
    """The same of others, which are computed with."""
    if isinstance(index, tvm.ir.Constant):
        return index
    is_from_end = emit(relax.op.less(index, relax.const(0, "int64")))
    return emit(relax.op.where(is_from_end, emit(relax.op.add(index, relax.const(extent, "int64"))), index))


def _put(node: Any, importer: Any) -> relax.Var:
    """One value where a mask says so, or values at places; the importer takes places of all axes alone."""
    (x, places, values), is_added = node.args[:3], len(node.args) > 3 and bool(node.args[3])
    is_masked = len(places) == 1 and str(places[0].meta["val"].dtype) == "torch.bool"
    if not is_masked:
        return _put_at(node, importer, is_added=is_added)
    if is_added or values.meta["val"].numel() != 1:
        return importer._index_put(node)
    x, mask, value = (importer.env[each] for each in (x, places[0], values))
    missing = list(range(mask.ty.ndim, x.ty.ndim))
    mask = importer.block_builder.emit(relax.op.expand_dims(mask, missing)) if missing else mask
    return importer.block_builder.emit(relax.op.where(mask, value, x))


def _put_at(node: Any, importer: Any, *, is_added: bool) -> relax.Var:
    """Values at places of some axes, which come first meanwhile."""
    emit, x, values = importer.block_builder.emit, importer.env[node.args[0]], importer.env[node.args[2]]
    taken = [axis for axis, index in enumerate(node.args[1]) if index is not None]
    indices = [_from_start(_counted(importer.env[node.args[1][axis]], x, axis, emit), int(x.ty.shape[axis]), emit)
               for axis in taken]  # fmt: skip
    order = [*taken, *(axis for axis in range(x.ty.ndim) if axis not in taken)]
    first = emit(relax.op.permute_dims(x, order)) if order != sorted(order) else x
    shape = [int(n) for n in first.ty.shape]
    of_places = np.broadcast_shapes(*(tuple(int(n) for n in index.ty.shape) for index in indices))
    spread = [emit(relax.op.expand_dims(emit(relax.op.broadcast_to(index, of_places)), [-1])) for index in indices]
    joined = emit(relax.op.concat(spread, -1)) if len(spread) > 1 else spread[0]
    updates = _as_indexed(node, values, taken, of_places, shape[len(taken) :], emit)
    put = emit(relax.op.scatter_nd(first, joined, updates, "add" if is_added else "update"))
    back = [order.index(axis) for axis in range(len(order))]
    return emit(relax.op.permute_dims(put, back)) if order != sorted(order) else put


def _as_indexed(
    node: Any, values: relax.Expr, taken: Sequence[int], of_places: tuple[int, ...], rest: Sequence[int],
    emit: Callable[[relax.Expr], relax.Var],
) -> relax.Expr:  # fmt: skip
    """Values with the axes of places first. torch has these where the first axis that is read at places was, if those
    axes are neighbours."""
    before = taken[0] if list(taken) == list(range(taken[0], taken[0] + len(taken))) else 0
    whole = emit(relax.op.broadcast_to(values, (*rest[:before], *of_places, *rest[before:])))
    if not before:
        return whole
    n_places = len(of_places)
    order = [*range(before, before + n_places), *range(before), *range(before + n_places, len(rest) + n_places)]
    return emit(relax.op.permute_dims(whole, order))


CONVERTERS: dict[str, Callable[[Any, Any], relax.Expr]] = {"index.Tensor": _index, "index_put.default": _put}
