"""Rounding by the CPU's own instructions, where it has them: to bf16, and to unsigned bytes.

To bf16, TVM writes arithmetic on bits, before loops become vectors: five instructions for each vector of results, which
made a softmax that stores bf16 slower than one that stores twice the bytes. Here such a cast becomes an operator of
TVM that can be a vector, too; when it is lowered, it is a function in LLVM's language, where the cast is one
instruction. It rounds as TVM does, to the nearest, ties to even; denormals become zero.

To bytes, what quantised models do, min(max(round(x) + zero, 0), 255), is six instructions for each vector: rounded,
added to, bounded twice, converted, narrowed. Conversion rounds by itself, to the nearest, ties to even, and what is
narrowed is bounded: four remain, three without a zero point. What no integer can hold becomes 2**31 on x86, and so 255;
what is no number, 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from lib.machine.dots import INT7, INT8, INT16
from lib.machine.registers import registers
from lib.tir import analysis

_TO_BF16, _TO_BYTES = "family_tuner_to_bf16", "family_tuner_to_bytes"
_LANES = range(1, 65)  # vectors at the end of a row have any number
_TEXTS = {
    _TO_BF16: """
define linkonce_odr {i16} @{name}_{n}({float} %x) alwaysinline nounwind {{
  %y = fptrunc {float} %x to {bfloat}
  %r = bitcast {bfloat} %y to {i16}
  ret {i16} %r
}}
""",
    _TO_BYTES: """
define linkonce_odr {i8} @{name}_{n}({float} %x, {float} %zero) alwaysinline nounwind {{
  %whole = call {float} @llvm.floor.{v}f32({float} %zero)
  %least = fneg {float} %whole
  %is = fcmp ogt {float} %x, %least
  %y = select {i1} %is, {float} %x, {float} %least
  %near = call {i32} @llvm.lrint.{v}i32.{v}f32({float} %y)
  %z = fptosi {float} %whole to {i32}
  %i = add {i32} %near, %z
  %u = call {i32} @llvm.umin.{v}i32({i32} %i, {i32} {most})
  %r = trunc {i32} %u to {i8}
  ret {i8} %r
}}
declare {float} @llvm.floor.{v}f32({float})
declare {i32} @llvm.lrint.{v}i32.{v}f32({float})
declare {i32} @llvm.umin.{v}i32({i32}, {i32})
""",
}
_KINDS = ("float", "bfloat", "i1", "i8", "i16", "i32")
_MOST = 255


def in_parts(rest: tirx.Expr, count: int) -> list[tirx.Expr]:
    """A float as some of bf16, nearly their sum: what it is rounded to, the rest rounded in turn, and so on
    (`lib.graph.splitting`).

    Rounded by its bits: a cast to bf16 and back is nothing to TVM's BF16ComputeLegalize, and the rest would be zero.
    """
    found = []
    for _ in range(count - 1):
        bits = tirx.reinterpret("uint32", rest) + tirx.const(0x8000, "uint32")
        high = tirx.reinterpret("float32", bits & tirx.const(0xFFFF0000, "uint32"))
        found.append(high.astype("bfloat16"))
        rest = rest - high
    return [*found, rest.astype("bfloat16")]


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Have casts of float32 to bf16, and of rounded ones to bytes, done by instructions, on a target that has them."""
    target = (function.attrs or {}).get("target")
    if target is None or target.kind.name != "llvm":
        return function
    machine, found = registers(target), set[str]()
    there = machine.dots
    has_bf16 = any(dot.data == "bfloat16" for dot in there)
    is_x86 = not {INT8, INT16, INT7}.isdisjoint((*there, machine.for_small))

    def call(name: str, kind: str, *values: Any) -> Any:
        found.add(name)
        return tirx.call_intrin(kind, f"tirx.{name}", *values)

    def rounded(cast: tirx.Cast) -> Any:
        if has_bf16 and (cast.ty.dtype, cast.value.ty.dtype) == ("bfloat16", "float32"):
            return tirx.reinterpret("bfloat16", call(_TO_BF16, "uint16", cast.value))
        numbers = _bounded(cast) if is_x86 else None
        return cast if numbers is None else call(_TO_BYTES, "uint8", *numbers)

    body = tvm_ffi.structural_map(function.body, (tirx.Cast, rounded))
    for name in sorted(found):
        text = tvm.ir.StringImm("".join(_text(name, lanes) for lanes in _LANES))
        body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, body)
    return function.with_body(body) if found else function


def _bounded(cast: tirx.Cast) -> tuple[Any, Any] | None:
    """x and zero of min(max(round(x) + zero, 0), 255) in float32, if a cast makes an unsigned byte of that."""
    least = cast.value
    if cast.ty.dtype != "uint8" or not isinstance(least, tirx.Min) or not isinstance(least.a, tirx.Max):
        return None
    number, zero, bounds = least.a.a, tirx.const(0, "float32"), (least.a.b, least.b)
    if isinstance(number, tirx.Add) and analysis.is_rounded(number.a):
        number, zero = number.a, number.b
    if not analysis.is_rounded(number) or not all(isinstance(bound, tirx.FloatImm) for bound in bounds):
        return None
    if number.ty.dtype != "float32" or [float(bound.value) for bound in bounds] != [0, _MOST]:
        return None
    return number.args[0], zero


def _text(name: str, lanes: int) -> str:
    kinds = {kind: kind if lanes == 1 else f"<{lanes} x {kind}>" for kind in _KINDS}
    most = str(_MOST) if lanes == 1 else f"splat (i32 {_MOST})"
    return _TEXTS[name].format(name=name, n=lanes, v="" if lanes == 1 else f"v{lanes}", most=most, **kinds)


def _lowered(name: str, otherwise: Callable[..., Any], call: tvm.ir.Call) -> Any:
    kind = str(call.ty.dtype)
    lanes = tvm.DataType(kind).lanes
    return tirx.call_pure_extern(kind, f"{name}_{lanes}", *call.args) if lanes in _LANES else otherwise(*call.args)


def _by_bits(value: Any) -> Any:
    """To bf16 as TVM has it."""
    lanes = tvm.DataType(str(value.ty.dtype)).lanes
    number = partial(_everywhere, "uint32", lanes)
    kind = "uint32" if lanes == 1 else f"uint32x{lanes}"
    bits = tirx.call_intrin(kind, "tirx.reinterpret", value)
    even = ((bits >> number(16)) & number(1)) + number(0x7FFF)
    return tirx.Cast(kind.replace("32", "16", 1), (bits + even) >> number(16))


def _by_bounds(value: Any, zero: Any) -> Any:
    """To bytes as TVM has it."""
    kind = str(value.ty.dtype)
    lanes = tvm.DataType(kind).lanes
    number = partial(_everywhere, "float32", lanes)
    moved = tirx.call_llvm_pure_intrin(kind, "llvm.nearbyint", value) + zero
    bounded = tirx.Min(tirx.Max(moved, number(0)), number(_MOST))
    return tirx.Cast("uint8" if lanes == 1 else f"uint8x{lanes}", bounded)


def _everywhere(kind: str, lanes: int, number: int) -> Any:
    """A number in each lane of a vector."""
    found = tirx.const(number, kind)
    return found if lanes == 1 else tirx.Broadcast(found, lanes)


def _register() -> None:
    like = tvm.ir.Op.get("tirx.exp")
    plain: dict[str, Callable[..., Any]] = {_TO_BF16: _by_bits, _TO_BYTES: _by_bounds}
    for name, otherwise in plain.items():
        for attribute in ("TCallEffectKind", "TVectorizable"):
            tvm.ir.register_op_attr(f"tirx.{name}", attribute, like.get_attr(attribute))
        tvm.ir.register_op_attr(f"tirx.{name}", "TScriptPrinterName", name)
        tirx.register_intrin_lowering(f"tirx.{name}", "llvm", f=partial(_lowered, name, otherwise))


_register()
