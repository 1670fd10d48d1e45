"""Running sums along an axis that others follow, by a kernel of our own (`lib.tir.running`).

Along the last axis TVM's are as fast: the chains of additions of several rows overlap in a core.
"""

import math
from functools import partial

import tvm
from tvm import relax
from tvm.relax import op
from tvm.target import Target

from lib.graph import patterns
from lib.graph.rewrite import Rewriter, Rule, dtype, rewrite, static_shape
from lib.tir import running

_KINDS = ("float32", "int32", "int64")
_WORTH_THREADS = 1 << 13  # elements; of fewer, to wake other threads takes longer


def in_lines(module: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Running sums as calls of functions in TIR; on CPUs, before TVM lowers them as it would."""
    threads = int(target.attrs.get("num-cores", 1))
    return rewrite(module, [Rule("running_sum", ("relax.cumsum",), partial(_summed, threads))])


def _summed(threads: int, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    data, shape = call.args[0], static_shape(call.args[0])
    if not shape or math.prod(shape) == 0 or dtype(call) != dtype(data) or dtype(data) not in _KINDS:
        return None
    if call.attrs.axis is None:
        return None
    axis = int(call.attrs.axis) % len(shape)
    outer, length, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    if running.width(inner) == 1:
        return None
    vectors = outer * inner // running.width(inner)
    parts = min(vectors, threads) if math.prod(shape) >= _WORTH_THREADS else 1
    function = running.of_lines(outer, length, inner, dtype(data), bool(call.attrs.exclusive), parts)
    gvar = rewriter.builder_.add_func(function.with_attrs(patterns.marks(patterns.OPAQUE)), running.FUNCTION)
    lines = rewriter.emit(op.reshape(data, (outer, length, inner)))
    made = relax.call_tir(gvar, [lines], relax.TensorType((outer, length, inner), dtype(data)))
    return op.reshape(rewriter.emit(made), shape)
