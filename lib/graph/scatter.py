"""Rows put or added where indices say by a kernel of our own (`lib.tir.scatter`); TVM's takes element after element."""

import math

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op
from tvm.target import Target

from lib.graph import patterns
from lib.graph.rewrite import Rewriter, Rule, constant, dtype, rewrite, rule, static_shape, undoing
from lib.tir import scatter

_KINDS, _PLACES = ("float32", "int32", "int64"), ("int32", "int64")
_WORTH_THREADS = 1 << 13  # elements that are read; of fewer, to wake other threads takes longer


def in_rows(module: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Scattered rows as calls of functions in TIR; on CPUs, before TVM dispatches what it has libraries for."""
    threads = int(target.attrs.get("num-cores", 1))
    return rewrite(module, [_scattered(threads), _elements(threads)])


def _scattered(threads: int) -> Rule:
    @rule("relax.scatter_nd")
    def scattered(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        """Parts of the data, which are found by the first of its axes."""
        shape, where = static_shape(call.args[0]), static_shape(call.args[1])
        if not shape or not where or not 1 <= where[-1] <= len(shape):
            return None
        known = where[-1]
        places = call.args[1]
        if known > 1:
            steps = [math.prod(shape[n + 1 : known]) for n in range(known)]
            apart = rewriter.emit(op.multiply(places, constant(np.array(steps, dtype(places)))))
            places = rewriter.emit(op.sum(apart, [-1]))
        return _rows(rewriter, call, places, known, threads)

    return scattered


def _elements(threads: int) -> Rule:
    @rule("relax.scatter_elements")
    def elements(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        """Elements whose places are the same all along a row: what is written to each node of a graph, say."""
        shape, values = static_shape(call.args[0]), static_shape(call.args[2])
        axis = int(call.attrs.axis) % max(1, len(shape or ()))
        if not shape or not values or values[:axis] + values[axis + 1 :] != shape[:axis] + shape[axis + 1 :]:
            return None
        places = _of_rows(rewriter, call.args[1], axis, len(shape))
        if places is None:
            return None
        zero, extent = (constant(np.array(n, dtype(places))) for n in (0, shape[axis]))
        is_from_the_end = rewriter.emit(op.less(places, zero))
        places = rewriter.emit(op.where(is_from_the_end, rewriter.emit(op.add(places, extent)), places))
        order = [axis, *(n for n in range(len(shape)) if n != axis)]
        if axis == 0:
            return _rows(rewriter, call, places, 1, threads)
        moved = [rewriter.emit(op.permute_dims(call.args[n], order)) for n in (0, 2)]
        first = relax.Call(call.op, [moved[0], call.args[1], moved[1]], call.attrs)
        rows = _rows(rewriter, first, places, 1, threads)
        return None if rows is None else op.permute_dims(rewriter.emit(rows), undoing(order))

    return elements


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


def _rows(rewriter: Rewriter, call: relax.Call, places: relax.Expr, known: int, threads: int) -> relax.Expr | None:
    """The data with its first axes in one, and all others in another."""
    data, given, kind = call.args[0], call.args[2], str(call.attrs.reduction)
    shape = static_shape(data) or ()
    n, rows, columns = math.prod(static_shape(places) or ()), math.prod(shape[:known]), math.prod(shape[known:])
    if not n or kind not in scatter.REDUCTIONS or dtype(data) not in _KINDS or dtype(places) not in _PLACES:
        return None
    parts = min(rows, threads) if (rows + n) * columns >= _WORTH_THREADS else 1
    function = scatter.of_rows(rows, columns, n, dtype(data), dtype(places), kind, parts)
    gvar = rewriter.builder_.add_func(function.with_attrs(patterns.marks(patterns.OPAQUE)), scatter.FUNCTION)
    shapes = ((data, (rows, columns)), (places, (n,)), (given, (n, columns)))
    flat = [rewriter.emit(op.reshape(each, to)) for each, to in shapes]
    made = relax.call_tir(gvar, flat, relax.TensorType((rows, columns), dtype(data)))
    return op.reshape(rewriter.emit(made), shape)
