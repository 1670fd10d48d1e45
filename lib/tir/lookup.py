"""Tables of all bytes, in which a vector of bytes is looked up at once, where the CPU has instructions for it.

TVM reads each element of a vector from a place of its own. A table of 256 bytes is four registers of AVX-512, and
`vpermi2b` takes each byte of a vector from one of two: twice that, and what each byte's highest bit chooses, is a
vector of results (AVX512-VBMI).
"""

from typing import Any

import tvm
import tvm_ffi
from tvm import te, tirx

from lib.machine.registers import registers

VALUES = 256  # of a byte
FUNCTION = "lookup"
_NAME = "family_tuner_lookup"
_WIDTH = 64  # bytes of a register
_TEXT = """
define linkonce_odr <{n} x i8> @{name}_{n}(ptr %table, <{n} x i8> %x) alwaysinline nounwind {{
  %at = shufflevector <{n} x i8> %x, <{n} x i8> poison, <64 x i32> <{widened}>
  %p1 = getelementptr i8, ptr %table, i64 64
  %p2 = getelementptr i8, ptr %table, i64 128
  %p3 = getelementptr i8, ptr %table, i64 192
  %t0 = load <64 x i8>, ptr %table, align 1
  %t1 = load <64 x i8>, ptr %p1, align 1
  %t2 = load <64 x i8>, ptr %p2, align 1
  %t3 = load <64 x i8>, ptr %p3, align 1
  %low = call <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(<64 x i8> %t0, <64 x i8> %at, <64 x i8> %t1)
  %high = call <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(<64 x i8> %t2, <64 x i8> %at, <64 x i8> %t3)
  %is = icmp slt <64 x i8> %at, zeroinitializer
  %both = select <64 x i1> %is, <64 x i8> %high, <64 x i8> %low
  %r = shufflevector <64 x i8> %both, <64 x i8> poison, <{n} x i32> <{narrowed}>
  ret <{n} x i8> %r
}}
declare <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(<64 x i8>, <64 x i8>, <64 x i8>)
"""


def looked_up(table: te.Tensor, data: te.Tensor) -> te.Tensor:
    """The element of a table that each byte stands for."""
    return te.compute(data.shape, lambda *at: table(tirx.Cast("int32", data(*at))), name=FUNCTION)


def is_lookup(load: Any) -> bool:
    """Whether an element is looked up by bytes."""
    return _place(load) is not None


def _place(load: Any) -> tuple[Any, Any] | None:
    """Where the table begins in its tensor, and the bytes, if an element is looked up."""
    tensor, index = load.source, load.indices[0] if len(load.indices) == 1 else None
    extents = [extent.value for extent in tensor.ty.shape if isinstance(extent, tirx.IntImm)]
    if index is None or str(tensor.ty.dtype) != "uint8" or extents != [VALUES]:
        return None
    start = tirx.const(0, "int64")
    if isinstance(index, tirx.Add) and isinstance(index.b, tirx.Broadcast):  # of a table that begins anywhere
        index, start = index.a, index.b.value
    while isinstance(index, tirx.Cast) and not _are_bytes(index):
        index = index.value
    return (start, index) if _are_bytes(index) else None


def _are_bytes(expr: Any) -> bool:
    return str(expr.ty.dtype).startswith("uint8")


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Have vectors looked up by instructions, on a target that has them; after loops became vectors."""
    target = (function.attrs or {}).get("target")
    if target is None or target.kind.name != "llvm" or not registers(target).looks_up:
        return function
    found = set[int]()

    def vector(load: Any) -> Any:
        lanes, place = tvm.DataType(str(load.ty.dtype)).lanes, _place(load)
        if not 1 < lanes <= _WIDTH or place is None:
            return load
        found.add(lanes)
        table = tirx.address_of(tirx.BufferLoad(load.source, [place[0]]))
        return tirx.call_pure_extern(str(load.ty.dtype), f"{_NAME}_{lanes}", table, place[1])

    body = tvm_ffi.structural_map(function.body, (tvm.ir.TensorLoad, vector))
    for lanes in sorted(found):
        body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", tvm.ir.StringImm(_text(lanes)), body)
    return function.with_body(body) if found else function


def _text(lanes: int) -> str:
    within = [f"i32 {n}" if n < lanes else "i32 poison" for n in range(_WIDTH)]
    return _TEXT.format(n=lanes, name=_NAME, widened=", ".join(within), narrowed=", ".join(within[:lanes]))
