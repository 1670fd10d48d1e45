"""Rows put or added where indices say by a kernel of our own (`lib.tir.scatter`); TVM's takes element after element."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op
from tvm.target import Target

from lib.graph import patterns
from lib.graph.rewrite import Rewriter, Rule, constant, dtype, in_order, rewrite, static_shape, undoing
from lib.tir import scatter

_KINDS, _PLACES = ("float32", "int32", "int64"), ("int32", "int64")
_WORTH_THREADS = 1 << 13  # elements that are read; of fewer, to wake other threads takes longer


def in_rows(module: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Scattered rows as calls of functions in TIR; on CPUs, before TVM dispatches what it has libraries for."""
    threads = int(target.attrs.get("num-cores", 1))
    parts = Rule("scattered_parts", ("relax.scatter_nd",), partial(_scattered, threads))
    elements = Rule("scattered_elements", ("relax.scatter_elements",), partial(_elements, threads))
    return rewrite(module, [parts, elements])


def _scattered(threads: int, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Parts of the data, which are found by the first of its axes."""
    data, places, values = call.args
    shape, where = static_shape(data), static_shape(places)
    if not shape or not where or not 1 <= where[-1] <= len(shape):
        return None
    known = where[-1]
    if known > 1:
        steps = [math.prod(shape[n + 1 : known]) for n in range(known)]
        apart = rewriter.emit(op.multiply(places, constant(np.array(steps, dtype(places)))))
        places = rewriter.emit(op.sum(apart, [-1]))
    return _rows(threads, rewriter, (data, places, values), known, str(call.attrs.reduction))


def _elements(threads: int, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Elements whose places are the same all along a row: what is written to each node of a graph, say."""
    data, spread, values = call.args
    shape, given = static_shape(data), static_shape(values)
    axis = int(call.attrs.axis) % max(1, len(shape or ()))
    if not shape or not given or given[:axis] + given[axis + 1 :] != shape[:axis] + shape[axis + 1 :]:
        return None
    places = _of_rows(rewriter, spread, axis, len(shape))
    if places is None:
        return None
    zero, extent = (constant(np.array(n, dtype(places))) for n in (0, shape[axis]))
    is_from_the_end = rewriter.emit(op.less(places, zero))
    places = rewriter.emit(op.where(is_from_the_end, rewriter.emit(op.add(places, extent)), places))
    order = [axis, *(n for n in range(len(shape)) if n != axis)]
    tensors = in_order(rewriter, data, order), places, in_order(rewriter, values, order)
    rows = _rows(threads, rewriter, tensors, 1, str(call.attrs.reduction))
    return None if rows is None else in_order(rewriter, rewriter.emit(rows), undoing(order))


def _of_rows(rewriter: Rewriter, places: relax.Expr, axis: int, rank: int) -> relax.Expr | None:
    """Places that were spread over all axes but one, before that; None if they differ along another one."""
    if rank == 1:
        return places
    spread = rewriter.calls(places, "relax.broadcast_to")
    if spread is None:
        return None
    before, after = static_shape(spread.args[0]), static_shape(spread)
    if not before or not after:
        return None
    aligned = (1,) * (rank - len(before)) + before
    if math.prod(aligned) != aligned[axis] or aligned[axis] != after[axis]:
        return None
    return rewriter.emit(op.reshape(spread.args[0], (aligned[axis],)))


def _rows(
    threads: int, rewriter: Rewriter, tensors: Sequence[relax.Expr], known: int, reduction: str
) -> relax.Expr | None:
    """The data with its first axes in one, and all others in another.

    Args:
        tensors: Data, places and values; `known`: axes of the data that places are found by.
    """
    data, places, _ = tensors
    shape = static_shape(data) or ()
    n, rows, columns = math.prod(static_shape(places) or ()), math.prod(shape[:known]), math.prod(shape[known:])
    if not n or reduction not in scatter.REDUCTIONS or dtype(data) not in _KINDS or dtype(places) not in _PLACES:
        return None
    parts = min(rows, threads) if (rows + n) * columns >= _WORTH_THREADS else 1
    function = scatter.of_rows(rows, columns, n, dtype(data), dtype(places), reduction, parts)
    gvar = rewriter.builder_.add_func(function.with_attrs(patterns.marks(patterns.OPAQUE)), scatter.FUNCTION)
    shapes = (rows, columns), (n,), (n, columns)
    flat = [rewriter.emit(op.reshape(each, to)) for each, to in zip(tensors, shapes, strict=True)]
    made = relax.call_tir(gvar, flat, relax.TensorType((rows, columns), dtype(data)))
    return op.reshape(rewriter.emit(made), shape)
