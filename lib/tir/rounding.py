"""Rounding to bf16 by the CPU's own instruction, where it has one.

TVM writes arithmetic on bits for it, before loops become vectors: five instructions for each vector of results, which
made a softmax that stores bf16 slower than one that stores twice the bytes. Here such a cast becomes an operator of
TVM that can be a vector, too; when it is lowered, it is a function in LLVM's language, where the cast is one
instruction. It rounds as TVM does, to the nearest, ties to even; denormals become zero.
"""

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.target import Target

from lib.machine.registers import registers

_OPERATOR = "tirx.family_tuner_to_bf16"
_FUNCTION = "family_tuner_to_bf16"
_LANES = range(1, 65)  # vectors at the end of a row have any number
_TEXT = """
define linkonce_odr {integers} @{name}_{n}({floats} %x) alwaysinline nounwind {{
  %y = fptrunc {floats} %x to {narrow}
  %r = bitcast {narrow} %y to {integers}
  ret {integers} %r
}}
"""


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Have casts from float32 to bf16 done by the instruction, on a target that has one."""
    target = (function.attrs or {}).get("target")
    if target is None or target.kind.name != "llvm" or not _has_it(target):
        return function
    found = []

    def rounded(cast: tirx.Cast) -> Any:
        if (str(cast.ty.dtype), str(cast.value.ty.dtype)) != ("bfloat16", "float32"):
            return cast
        found.append(cast)
        return tirx.reinterpret("bfloat16", tirx.call_intrin("uint16", _OPERATOR, cast.value))

    body = tvm_ffi.structural_map(function.body, (tirx.Cast, rounded))
    if not found:
        return function
    text = tvm.ir.StringImm("".join(map(_text, _LANES)))
    return function.with_body(tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, body))


def _text(lanes: int) -> str:
    kinds = {"integers": "i16", "floats": "float", "narrow": "bfloat"}
    vectors = kinds if lanes == 1 else {name: f"<{lanes} x {kind}>" for name, kind in kinds.items()}
    return _TEXT.format(n=lanes, name=_FUNCTION, **vectors)


def _has_it(target: Target) -> bool:
    return any(dot.data == "bfloat16" for dot in registers(target).dots)


def _lowered(call: tvm.ir.Call) -> Any:
    kind = str(call.ty.dtype)
    lanes = tvm.DataType(kind).lanes
    return tirx.call_pure_extern(kind, f"{_FUNCTION}_{lanes}", *call.args) if lanes in _LANES else _by_bits(*call.args)


def _by_bits(value: Any) -> Any:
    """As TVM has it."""
    lanes = tvm.DataType(str(value.ty.dtype)).lanes

    def number(each: int) -> Any:
        found = tirx.const(each, "uint32")
        return found if lanes == 1 else tirx.Broadcast(found, lanes)

    kind = "uint32" if lanes == 1 else f"uint32x{lanes}"
    bits = tirx.call_intrin(kind, "tirx.reinterpret", value)
    even = ((bits >> number(16)) & number(1)) + number(0x7FFF)
    return tirx.Cast(kind.replace("32", "16", 1), (bits + even) >> number(16))


def _register() -> None:
    like = tvm.ir.Op.get("tirx.exp")
    for name in ("TCallEffectKind", "TVectorizable"):
        tvm.ir.register_op_attr(_OPERATOR, name, like.get_attr(name))
    tvm.ir.register_op_attr(_OPERATOR, "TScriptPrinterName", _FUNCTION)
    tirx.register_intrin_lowering(_OPERATOR, "llvm", f=_lowered)


_register()
