"""Logarithms in vectors; LLVM calls libm for each element of a vector, which takes a nanosecond and more.

They are expanded when loops are vectors already. As a formula of the model's own function, the argument would stand in
it a hundred times: searching and compiling a softplus took minutes. The relative error is 1.8e-7 at most.
"""

import math
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from lib.tir import analysis

_SERIES = [2 / n for n in (11, 9, 7, 5, 3)]  # of powers of a square, after the first term
_MANTISSA_BITS, _LEAST_NORMAL = 23, 2.0**-126
_TWO_THIRDS, _INFINITY, _NOT_A_NUMBER, _MAGNITUDE = 0x3F2AAAAB, 0x7F800000, 0x7FC00000, 0x7FFFFFFF  # bits


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace calls of `log` of float32, on CPUs; after loops became vectors."""
    target = (function.attrs or {}).get("target")
    if target is None or target.kind.name != "llvm" or not any(map(_is_log, analysis.walk(function.body, tvm.ir.Call))):
        return function

    def expanded(call: tvm.ir.Call) -> tirx.Expr:
        return _logarithm(call.args[0]) if _is_log(call) else call

    return function.with_body(tvm_ffi.structural_map(function.body, (tvm.ir.Call, expanded)))


def _is_log(call: Any) -> bool:
    return bool(call.op.same_as(_LOG)) and str(call.ty.dtype).partition("x")[0] == "float32"


_LOG = tvm.ir.Op.get("tirx.log")


def _logarithm(x: tirx.Expr) -> tirx.Expr:
    """log(x) = k log 2 + log(m) for x = 2^k m, m in [2/3, 4/3), and log(m) = 2 artanh((m - 1) / (m + 1)) by its series.
    Which numbers have none is told by their bits, of which TVM's simplifier knows nothing."""
    lanes = tvm.DataType(str(x.ty.dtype)).lanes
    of, integer = partial(_constant, lanes, "float32"), partial(_constant, lanes, "int32")
    floats, integers = (kind if lanes == 1 else f"{kind}x{lanes}" for kind in ("float32", "int32"))
    given, normal, mantissa, ratio, square, found = (
        tirx.Var(name, floats) for name in ("given", "normal", "mantissa", "ratio", "square", "found")
    )
    bits, power = tirx.Var("bits", integers), tirx.Var("power", integers)
    is_small = given < of(_LEAST_NORMAL)
    series = of(_SERIES[0])
    for each in _SERIES[1:]:
        series = series * square + of(each)
    shift = tirx.Select(is_small, integer(_MANTISSA_BITS), integer(0))
    of_normal = (power - shift).astype(floats) * of(math.log(2)) + (ratio * of(2.0) + ratio * square * series)
    sign_and_all = tirx.reinterpret(integers, given)
    special = tirx.Select(sign_and_all < integer(0), tirx.reinterpret(floats, integer(_NOT_A_NUMBER)), found)
    is_zero = tirx.bitwise_and(sign_and_all, integer(_MAGNITUDE)).equal(integer(0))
    special = tirx.Select(is_zero, of(-math.inf), special)
    result = tirx.Select(sign_and_all >= integer(_INFINITY), given, special)  # also what is not a number
    bindings = (
        (given, x),
        (normal, tirx.Select(is_small, given * of(2.0**_MANTISSA_BITS), given)),
        (bits, tirx.reinterpret(integers, normal)),
        (power, (bits - integer(_TWO_THIRDS)) >> integer(_MANTISSA_BITS)),
        (mantissa, tirx.reinterpret(floats, bits - (power << integer(_MANTISSA_BITS)))),
        (ratio, (mantissa - of(1.0)) / (mantissa + of(1.0))),
        (square, ratio * ratio),
        (found, of_normal),
    )
    for variable, value in reversed(bindings):
        result = tirx.Let(variable, value, result)
    return result


def _constant(lanes: int, kind: str, value: float) -> tirx.Expr:
    one = tirx.const(value, kind)
    return one if lanes == 1 else tirx.Broadcast(one, lanes)
