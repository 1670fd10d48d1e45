"""Bytes in units that are chosen when the values are known, from the import of a model until its operators become
programs in TIR (`lib.tir.byte_units`).

A call of a function that nobody has stands for the choice, as for recurrent layers (`lib.graph.recurrence`): TVM's
passes leave it alone, so that it is still one when it is lowered.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op
from tvm.target import Target

from lib.graph import patterns
from lib.graph.rewrite import STAND_IN, Rewriter, Rule, constant, has_stand_ins, is_stand_in, rewrite, static_shape
from lib.tir import byte_units

_STANDS_FOR = f"lib.{byte_units.FUNCTION}"
_WORTH_THREADS = 1 << 13  # elements; of fewer, to wake other threads takes longer


@dataclass(frozen=True, slots=True)
class Bytes:
    """Unsigned bytes of the shape of what they stand for, which is `(values - zero) * scale`."""

    values: relax.Expr
    scale: relax.Expr  # (1,), float32
    zero: relax.Expr  # (1,), uint8


def emit(builder: relax.BlockBuilder, x: relax.Expr) -> Bytes:
    """Quantise a tensor of float32 and static shape, rounding to the nearest and ties to even."""
    units = builder.emit(
        op.call_pure_packed(relax.ExternFunc(_STANDS_FOR), x, ty_args=relax.TensorType((2,), "float32"))
    )
    scale, zero = (builder.emit(op.strided_slice(units, [0], [n], [n + 1])) for n in range(2))
    # Of the rank of what they are of, without which ConvertLayout returns to channels first here.
    aligned = [builder.emit(op.reshape(each, (1,) * len(static_shape(x) or ()))) for each in (scale, zero)]
    counted = builder.emit(op.round(builder.emit(op.divide(x, aligned[0]))))
    shifted = builder.emit(op.clip(builder.emit(op.add(counted, aligned[1])), 0.0, byte_units.MOST))
    return Bytes(builder.emit(op.astype(shifted, "uint8")), scale, builder.emit(op.astype(zero, "uint8")))


def chosen(module: tvm.IRModule, target: Target) -> tvm.IRModule:
    """The module with such choices as functions in TIR on CPUs, and as operators elsewhere; the same if it has none."""
    if not has_stand_ins(module, _STANDS_FOR):
        return module
    threads = int(target.attrs.get("num-cores", 1)) if target.kind.name == "llvm" else 0
    return rewrite(module, [Rule("byte_units", (STAND_IN,), partial(_chosen, threads))])


def _chosen(threads: int, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    if not is_stand_in(call, _STANDS_FOR):
        return None
    data = call.args[1]
    while (moved := rewriter.calls(data, "relax.permute_dims", "relax.reshape")) is not None:
        data = moved.args[0]  # the extrema are the same in any order
    n = math.prod(static_shape(data) or ())
    if not threads:
        return _in_operators(rewriter, data)
    function = byte_units.of_all(n, threads if n >= _WORTH_THREADS else 1)
    made = rewriter.builder_.add_func(function.with_attrs(patterns.marks(patterns.OPAQUE)), byte_units.FUNCTION)
    return relax.call_tir(made, [rewriter.emit(op.reshape(data, (n,)))], call.ty_args[0])


def _in_operators(rewriter: Rewriter, data: relax.Expr) -> relax.Expr:
    nothing, one, most = (constant(np.array(n, np.float32)) for n in (0, 1, byte_units.MOST))
    above = rewriter.emit(op.maximum(rewriter.emit(op.max(data)), nothing))
    below = rewriter.emit(op.minimum(rewriter.emit(op.min(data)), nothing))
    distance = rewriter.emit(op.divide(rewriter.emit(op.subtract(above, below)), most))
    scale = rewriter.emit(op.where(rewriter.emit(op.equal(above, below)), one, distance))
    zero = rewriter.emit(op.divide(rewriter.emit(op.negative(below)), scale))
    zero = rewriter.emit(op.round(rewriter.emit(op.clip(zero, 0.0, byte_units.MOST))))
    return op.concat([rewriter.emit(op.reshape(each, (1,))) for each in (scale, zero)], 0)
