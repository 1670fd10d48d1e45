"""The largest or smallest elements along an axis by a kernel of our own (`lib.tir.topk`); TVM's would sort all."""

import math
from collections.abc import Sequence

import tvm
from tvm import relax
from tvm.relax import op

from lib.graph import patterns
from lib.graph.rewrite import Rewriter, dtype, in_order, rewrite, rule, static_shape, to_last, undoing
from lib.tir import topk

_FEW = 40  # times the logarithm of a row's length: of more elements, to sort the row takes no longer
_LONGEST = 1 << 14  # elements of a row, which are on a thread's stack
_KINDS = ("int32", "int64")


def in_vectors(module: tvm.IRModule) -> tvm.IRModule:
    """A few of many elements as calls of functions in TIR; on CPUs, before TVM dispatches sorts."""
    return rewrite(module, [first_of_many])


@rule("relax.topk")
def first_of_many(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Rows of a matrix, along whichever axis the elements are looked for."""
    shape = static_shape(call.args[0])
    if not shape or not _is_taken(call, shape):
        return None
    axis, k, places = int(call.attrs.axis) % len(shape), int(call.attrs.k), str(call.attrs.dtype)
    order, rows, columns = to_last(len(shape), axis), math.prod(shape) // shape[axis], shape[axis]
    function = topk.of_rows(rows, columns, k, places, is_largest=bool(call.attrs.largest))
    gvar = rewriter.builder_.add_func(function.with_attrs(patterns.marks(patterns.OPAQUE)), topk.FUNCTION)
    data = rewriter.emit(op.reshape(in_order(rewriter, call.args[0], order), (rows, columns)))
    kinds = [relax.TensorType((rows, k), kind) for kind in ("float32", places)]
    both = rewriter.emit(relax.call_tir(gvar, [data], kinds))
    outer = [shape[n] for n in order[:-1]]
    parts = (rewriter.emit(op.reshape(rewriter.emit(both[n]), (*outer, k))) for n in (0, 1))
    values, indices = (in_order(rewriter, part, undoing(order)) for part in parts)
    wanted = {"values": values, "indices": indices, "both": relax.Tuple([values, indices])}
    return wanted[str(call.attrs.ret_type)]


def _is_taken(call: relax.Call, shape: Sequence[int]) -> bool:
    columns, k = shape[int(call.attrs.axis)], int(call.attrs.k)
    is_known = dtype(call.args[0]) == "float32" and str(call.attrs.dtype) in _KINDS
    return is_known and 0 < k <= columns <= _LONGEST and k <= _FEW * math.log2(columns + 1)
