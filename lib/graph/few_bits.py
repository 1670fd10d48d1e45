"""Rows times a matrix of numbers of four or eight bits, from the import of a model until its operators become programs
in TIR: of few rows in float32 (`lib.tir.few_bits`), of many in bytes (`lib.tir.few_bits_rows`); and few rows times one
of halves (`lib.tir.halves`).

As for recurrent layers (`lib.graph.recurrence`), a call of a function that nobody has stands for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax import op

from lib.graph import patterns
from lib.graph.rewrite import (
    STAND_IN,
    Rewriter,
    constant,
    dtype,
    has_stand_ins,
    is_stand_in,
    rewrite,
    rule,
    static_shape,
)
from lib.tir import few_bits, few_bits_rows, halves
from lib.tir.few_bits import Layout

WORTH = 1 << 16  # elements of a matrix in halves or bytes; of fewer, it stays in cache as floats
MOST_ROWS = 8  # of more, a matrix that is widened once is multiplied faster
_STANDS_FOR = f"lib.{few_bits.FUNCTION}"


@dataclass(frozen=True, slots=True)
class Matrix:
    """What is multiplied, `(numbers - zeros) * scales`: numbers (n, blocks, block), uint8, of a block along k; scales
    and zeros (n, blocks), float32 and uint8."""

    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray


def emit(
    builder: relax.BlockBuilder, x: relax.Expr, layout: Layout, matrix: Matrix, instruction: str = ""
) -> relax.Expr:
    """A product of x (..., k) with such a matrix: (..., n).

    Args:
        instruction: For rows that are rounded to bytes (`lib.tir.few_bits_rows`); empty: they stay in float32.
    """
    short = matrix.scales.astype(np.float16)  # half to be read, where nothing is lost
    scales, zeros = short if (short == matrix.scales).all() else matrix.scales, matrix.zeros
    if instruction:
        found = few_bits_rows.Bytes.of(layout, matrix.numbers, scales, zeros)
        packed = [found.packed, found.scales, found.zeros, found.begins]
    else:
        packed = [layout.words(matrix.numbers), layout.by_block(scales)]
        packed.append(zeros.reshape(-1)[:1].reshape(1, 1, 1, 1) if np.ptp(zeros) == 0 else layout.by_block(zeros))
    return _stand_in(builder, x, layout.n, packed, f"{layout.text} {instruction}")


def in_halves(matrix: np.ndarray, rows: int) -> np.ndarray | None:
    """A matrix of float32 as so many rows are multiplied with it: in float16 or bf16, where nothing is lost and it is
    faster; else None."""
    return halves.narrowed(matrix) if rows <= MOST_ROWS and matrix.size >= WORTH else None


def emit_halves(builder: relax.BlockBuilder, x: relax.Expr, matrix: np.ndarray, lanes: int) -> relax.Expr:
    """A product of x (..., k) with a matrix (k, n) in float16 or bf16: (..., n), in float32.

    Args:
        lanes: Of a vector of the target.
    """
    *outer, _ = static_shape(x) or ()
    n = matrix.shape[1]
    return _stand_in(builder, x, n, [halves.packed(matrix, math.prod(outer), lanes)], str(n))


def _stand_in(
    builder: relax.BlockBuilder, x: relax.Expr, n: int, packed: Sequence[np.ndarray], text: str
) -> relax.Expr:
    """What `_program` makes a program of: (..., k) to (..., n), by a packed matrix and what says how it is."""
    *outer, k = static_shape(x) or ()
    rows = math.prod(outer)
    flat = builder.emit(op.reshape(x, (rows, k)))
    result = relax.TensorType((rows, n), "float32")
    call = op.call_pure_packed(relax.ExternFunc(_STANDS_FOR), flat, *map(constant, packed), text, ty_args=result)
    return op.reshape(builder.emit(call), (*outer, n))


@rule(STAND_IN)
def _program(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    if not is_stand_in(call, _STANDS_FOR):
        return None
    x, *packed, text = call.args[1:]
    rows, _ = static_shape(x) or ()
    function, name = _function(packed, str(text.value), rows)
    made = rewriter.builder_.add_func(function.with_attrs(patterns.marks(patterns.OPAQUE)), name)
    return relax.call_tir(made, [x, *packed], call.ty_args[0])


def _function(packed: Sequence[relax.Expr], text: str, rows: int) -> tuple[tirx.PrimFunc, str]:
    """The program for what was emitted, and its name."""
    if len(packed) == 1:
        shape: Any = static_shape(packed[0])
        return halves.product(int(text), rows, str(packed[0].ty.dtype), shape), halves.FUNCTION
    *numbers, instruction = text.split(" ")
    layout, kind = Layout.parsed(" ".join(numbers)), dtype(packed[1])
    if instruction:
        return few_bits_rows.product(layout, kind, instruction), few_bits_rows.FUNCTION
    has_one_zero = math.prod(static_shape(packed[2]) or ()) == 1
    return few_bits.product(layout, kind, has_one_zero=has_one_zero), few_bits.FUNCTION


def in_programs(module: tvm.IRModule) -> tvm.IRModule:
    """The module with such products as functions in TIR; the same module if it has none."""
    return rewrite(module, [_program]) if has_stand_ins(module, _STANDS_FOR) else module
