"""A few rows times a matrix of numbers of four or eight bits, from the import of a model until its operators become
programs in TIR (`lib.tir.few_bits`).

As for recurrent layers (`lib.graph.recurrence`), a call of a function that nobody has stands for it.
"""

import math

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from lib.graph import patterns
from lib.graph.rewrite import Rewriter, constant, dtype, is_call, rewrite, rule, static_shape
from lib.tir import few_bits
from lib.tir.few_bits import Layout

MOST_ROWS = 8  # of more, a matrix that is widened once is multiplied faster
_CALL = "relax.call_pure_packed"
_STANDS_FOR = f"lib.{few_bits.FUNCTION}"


def emit(
    builder: relax.BlockBuilder,
    x: relax.Expr,
    layout: Layout,
    numbers: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
) -> relax.Expr:
    """A product of x (..., k) with such a matrix: (..., n).

    Args:
        numbers: (n, blocks, block), uint8.
        scales, zeros: (n, blocks), float32 and uint8: of what is multiplied, `(numbers - zeros) * scales`. Scales that
            float16 has as well are kept so.
    """
    *outer, _ = static_shape(x) or ()
    rows = math.prod(outer)
    flat = builder.emit(op.reshape(x, (rows, layout.k)))
    short = scales.astype(np.float16)
    packed = [layout.words(numbers), layout.by_block(short if (short == scales).all() else scales)]
    packed.append(zeros.reshape(-1)[:1].reshape(1, 1, 1, 1) if np.ptp(zeros) == 0 else layout.by_block(zeros))
    result = relax.TensorType((rows, layout.n), "float32")
    call = op.call_pure_packed(relax.ExternFunc(_STANDS_FOR), flat, *map(constant, packed), layout.text, ty_args=result)
    return op.reshape(builder.emit(call), (*outer, layout.n))


@rule(_CALL)
def _program(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    if not _is_product(call):
        return None
    x, *packed, text = call.args[1:]
    rows, _ = static_shape(x) or ()
    has_one_zero = math.prod(static_shape(packed[2]) or ()) == 1
    function = few_bits.product(Layout.parsed(str(text.value)), rows, dtype(packed[1]), has_one_zero=has_one_zero)
    function = function.with_attrs(patterns.marks(patterns.OPAQUE))
    made = rewriter.builder_.add_func(function, few_bits.FUNCTION)
    return relax.call_tir(made, [x, *packed], call.ty_args[0])


def _is_product(call: relax.Expr) -> bool:
    return is_call(call, _CALL) and str(getattr(call.args[0], "global_symbol", "")) == _STANDS_FOR


def in_programs(module: tvm.IRModule) -> tvm.IRModule:
    """The module with such products as functions in TIR; the same module if it has none."""
    found = []
    relax.analysis.post_order_visit(module["main"], lambda expr: found.append(_is_product(expr)))
    return rewrite(module, [_program]) if any(found) else module
