"""Instructions that add several products to each lane of a vector, in place of a marked loop over the lanes.

No loop makes LLVM emit `vdpbf16ps` or `vpdpbusd`, which add two or four products of neighbouring elements to each lane,
nor `vpmaddwd` and `vpmaddubsw`, which add two to one another, nor ARM's `smull` and what adds its products, for a
register tile. So a space marks the loop over the lanes of a register tile, around the one over these products, with the
name of an instruction (`lib.machine.dots`); when programs are lowered, one call takes the place of both. Until then a
program says what it computes in plain arithmetic: its weights are packed, prefetched and peeled like any others, and
where an instruction does not fit, as in vectors that are cut off at a border, the loops stay and compute the same.
"""

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize
from tvm.sym import Analyzer

from lib.machine.dots import (
    ARM_BF16,
    ARM_INT8,
    ARM_SIGNED,
    ARM_SMALL,
    BF16,
    DOTS,
    FOR_SMALL,
    INT7,
    INT8,
    INT16,
    Dot,
    named,
)
from lib.machine.registers import registers
from lib.tir import analysis
from lib.tir.small_weights import MARK as SMALL

MARK = "dot"  # annotation of the loop over lanes: the name of an instruction
TOGETHER = "words_together"  # annotation of the loop around it, over words that are added to one another first

_WIDTHS = {BF16: (4, 8, 16), INT8: (4, 8, 16), INT16: (4, 8), INT7: (4, 8, 16),
           ARM_BF16: (4,), ARM_INT8: (4,), ARM_SIGNED: (4,), ARM_SMALL: (4,)}  # lanes  # fmt: skip
# TVM knows bf16 as integers, LLVM's intrinsics want its own type.
_WRAPPER = """
define <{n} x float> @{name}_{n}(<{n} x float> %c, <{m} x i16> %x, <{m} x i16> %w) alwaysinline nounwind {{
  %a = bitcast <{m} x i16> %x to <{m} x bfloat>
  %b = bitcast <{m} x i16> %w to <{m} x bfloat>
  %r = call <{n} x float> @{intrinsic}(<{n} x float> %c, <{m} x bfloat> %a, <{m} x bfloat> %b)
  ret <{n} x float> %r
}}
declare <{n} x float> @{intrinsic}(<{n} x float>, <{m} x bfloat>, <{m} x bfloat>)
"""
# LLVM would add the products of several steps to one another first, and spill the sums of a tile for that.
_IN_ORDER = """
define <{n} x i32> @{name}_{n}(<{n} x i32> %c, <{m} x i16> %x, <{m} x i16> %w) alwaysinline nounwind {{
  %both = call {{ <{n} x i32>, <{n} x i32> }} asm "{name} $4, $3, $1\\0Avpaddd $1, $0, $0", "=x,=&x,0,x,x"(
      <{n} x i32> %c, <{m} x i16> %x, <{m} x i16> %w)
  %r = extractvalue {{ <{n} x i32>, <{n} x i32> }} %both, 0
  ret <{n} x i32> %r
}}
"""
# Two products in 16 bits, two of their sums in 32.
_OF_SMALL = """
define <{n} x i32> @{name}_{n}(<{n} x i32> %c, <{m} x i8> %x, <{m} x i8> %w) alwaysinline nounwind {{
  %both = call {{ <{n} x i32>, <{n} x i32> }} asm
      "{name} $4, $3, $1\\0Avpmaddwd $5, $1, $1\\0Avpaddd $1, $0, $0", "=v,=&v,0,v,v,v"(
      <{n} x i32> %c, <{m} x i8> %x, <{m} x i8> %w, <{half} x i16> splat (i16 1))
  %r = extractvalue {{ <{n} x i32>, <{n} x i32> }} %both, 0
  ret <{n} x i32> %r
}}
"""
# Of two words, the sums of 16 bits together.
_OF_TWO_WORDS = """
define <{n} x i32> @{name}_{n}_twice(
    <{n} x i32> %c, <{m} x i8> %x, <{m} x i8> %w, <{m} x i8> %y, <{m} x i8> %v) alwaysinline nounwind {{
  %all = call {{ <{n} x i32>, <{n} x i32>, <{n} x i32> }} asm
      "{name} $5, $4, $1\\0A{name} $7, $6, $2\\0Avpaddw $2, $1, $1\\0Avpmaddwd $8, $1, $1\\0Avpaddd $1, $0, $0",
      "=v,=&v,=&v,0,v,v,v,v,v"(
      <{n} x i32> %c, <{m} x i8> %x, <{m} x i8> %w, <{m} x i8> %y, <{m} x i8> %v, <{half} x i16> splat (i16 1))
  %r = extractvalue {{ <{n} x i32>, <{n} x i32>, <{n} x i32> }} %all, 0
  ret <{n} x i32> %r
}}
"""
# Eight products, twice; the sums of two neighbours each, in 16 bits; and of two of these, in 32. Each is a statement of
# its own, which LLVM may move, for CPUs that wait for each in its turn. Of intrinsics, it would bring the second halves
# of weights to registers of their own, and add the products of several steps to one another first.
_OF_SIGNED = """
define <{n} x i32> @{name}_{n}(<{n} x i32> %c, <{m} x i8> %x, <{m} x i8> %w) alwaysinline nounwind {{
  %p = call <{half} x i16> asm "{name} $0.{half}h, $1.{half}b, $2.{half}b", "=w,w,w"(<{m} x i8> %x, <{m} x i8> %w)
  %q = call <{half} x i16> asm "{name}2 $0.{half}h, $1.{m}b, $2.{m}b", "=w,w,w"(<{m} x i8> %x, <{m} x i8> %w)
  %s = call <{half} x i16> asm "addp $0.{half}h, $1.{half}h, $2.{half}h", "=w,w,w"(
      <{half} x i16> %p, <{half} x i16> %q)
  %r = call <{n} x i32> asm "sadalp $0.{n}s, $2.{half}h", "=w,0,w"(<{n} x i32> %c, <{half} x i16> %s)
  ret <{n} x i32> %r
}}
"""
_OF_SUMS_IN_TURN = {INT16: _IN_ORDER, INT7: _OF_SMALL + _OF_TWO_WORDS, ARM_SMALL: _OF_SIGNED}


def _is_wrapped(dot: Dot) -> bool:
    """Whether programs call a function around the instruction."""
    return dot.data == "bfloat16" or not dot.adds


def _wrapper(dot: Dot, lanes: int) -> str:
    if not dot.adds:
        return _OF_SUMS_IN_TURN[dot].format(n=lanes, m=dot.depth * lanes, half=2 * lanes, name=dot.name)
    x86, arm = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}", f"llvm.aarch64.neon.bfdot.v{lanes}f32.v{2 * lanes}bf16"
    return _WRAPPER.format(n=lanes, m=2 * lanes, name=dot.name, intrinsic=x86 if dot == BF16 else arm)


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Write instructions in place of marked loops that they fit; other programs stay as they are.

    Where the function's target lacks an instruction, or vectors of that width, the loops stay: programs for one CPU
    compute the same on another.
    """
    marked = [loop for loop in analysis.walk(function.body, tirx.For) if MARK in loop.annotations]
    if not marked:
        return function
    target = (function.attrs or {}).get("target")
    machine = None if target is None else registers(target)
    there = {*DOTS, *FOR_SMALL} if machine is None else {*machine.dots, machine.for_small}
    wrapped: set[tuple[Dot, int]] = set()

    together = {loop.loop_var for loop in analysis.walk(function.body, tirx.For) if _may_be_together(loop)}

    def with_instruction(loop: tirx.For) -> Any:
        if TOGETHER in loop.annotations:
            return _together(loop, loop.loop_var in together)
        if MARK not in loop.annotations:
            return loop
        dot = named(str(loop.annotations[MARK]))
        is_here = dot in there and (machine is None or int(loop.extent) <= machine.lanes)
        found = _instruction(loop) if is_here else None
        if found is None:
            return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body)
        if _is_wrapped(dot):
            wrapped.add((dot, int(loop.extent)))
        return found

    body = tvm_ffi.structural_map(function.body, (tirx.For, with_instruction))
    for dot, lanes in sorted(wrapped, key=lambda each: each[1]):
        text = tvm.ir.StringImm(_wrapper(dot, lanes))
        body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, body)
    return function.with_body(body)


def _may_be_together(loop: tirx.For) -> bool:
    """Whether a loop is over as many words as the weights allow that the block in it reads."""
    blocks = [each.block for each in analysis.walk(loop.body, SBlockRealize)] if TOGETHER in loop.annotations else []
    return len(blocks) == 1 and int(loop.extent) == INT7.words <= int(blocks[0].annotations.get(SMALL, 0))


def _together(loop: tirx.For, may_be: bool) -> tirx.Stmt:
    """One call for the words of a loop, in which there is one for each by now; the loop without its mark if they may
    not be added together, or the instruction does not fit it."""
    calls = [store for store in analysis.walk(loop.body, tirx.BufferStore) if _is_of_small(store.value)]
    if len(calls) != 1 or not may_be:
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, loop.body)
    [store] = calls
    name, sums, *operands = store.value.args
    words = [analysis.replaced(each, {loop.loop_var: tirx.IntImm(loop.loop_var.ty.dtype, n)})
             for n in range(INT7.words) for each in operands]  # fmt: skip
    kind = str(store.value.ty.dtype)
    value = tirx.call_pure_extern(kind, f"{name.value}_twice", sums, *words)
    both = tirx.BufferStore(store.buffer, value, store.indices)
    return tvm_ffi.structural_map(loop.body, (tirx.BufferStore, lambda each: both if each.same_as(store) else each))


def _is_of_small(value: Any) -> bool:
    """Whether it is a call that adds products with small weights."""
    name = value.args[0] if isinstance(value, tvm.ir.Call) and value.args else None
    return isinstance(name, tvm.ir.StringImm) and str(name.value).startswith(f"{INT7.name}_")


def _instruction(loop: tirx.For) -> tirx.Stmt | None:
    """What takes the place of a loop over lanes; None if the instruction does not fit it."""
    dot = named(str(loop.annotations[MARK]))
    lanes, inner = int(loop.extent), analysis.walk(loop.body, tirx.For)
    realizations = analysis.walk(loop.body, SBlockRealize)
    if lanes not in _WIDTHS[dot] or len(inner) != 1 or int(inner[0].extent) != dot.depth or len(realizations) != 1:
        return None
    [realization], variables = realizations, [loop.loop_var, inner[0].loop_var]
    if dot in FOR_SMALL and SMALL not in realization.block.annotations:
        return None  # a trace that was found for other weights
    operands = analysis.added_factors(realization.block)
    if operands is None or any(var in analysis.variables([realization.predicate]) for var in variables):
        return None
    bound = {axis.var: value for axis, value in zip(realization.block.iter_vars, realization.iter_values, strict=True)}
    store = analysis.stored(realization.block)
    sums = [analysis.replaced(index, bound) for index in store.indices]
    loads = [(load.source, [analysis.replaced(index, bound) for index in load.indices]) for load in operands]
    strides = [_strides(indices, tensor.ty.shape, variables) for tensor, indices in loads]
    are_words = analysis.of_words(realization.block)
    of_data = (1, 0) if are_words else (0, 1)  # a word for each lane, or the same neighbours for all
    if sorted(strides) != [of_data, (dot.depth, 1)] or _strides(sums, store.buffer.shape, variables) != (1, 0):
        return None
    data, weights = loads if strides[0] == of_data else loads[::-1]
    zeros = {var: tirx.IntImm(var.ty.dtype, 0) for var in variables}
    at = _vector_indices(sums, zeros, lanes)
    if are_words:
        own = _vector(data, zeros, lanes)
    elif (of_group := _of_group(data, loop, dot)) == lanes:
        own = _for_all_lanes(_vector(data, zeros, dot.depth), lanes)
    elif of_group:
        own = _for_lanes_of_groups(data, zeros, lanes, of_group, dot)
    else:
        return None
    value = _call(dot, tirx.BufferLoad(store.buffer, at), own, _vector(weights, zeros, dot.depth * lanes), lanes)
    # BF16ComputeLegalize makes float32 of the tensors within a program, unless somebody asks where they lie.
    kept = [tirx.Evaluate(tensor.data) for tensor, _ in loads]
    stored = tirx.SeqStmt([*kept, tirx.BufferStore(store.buffer, value, at)])
    return tirx.IfThenElse(realization.predicate, stored, None) if _is_checked(realization) else stored


def _is_checked(realization: SBlockRealize) -> bool:
    predicate = realization.predicate
    return not (isinstance(predicate, tirx.IntImm) and int(predicate) == 1)


def _strides(indices: Sequence[Any], shape: Sequence[Any], variables: Sequence[Any]) -> tuple[int, int]:
    lane, product = (analysis.stride(indices, shape, var) for var in variables)
    return lane, product


def _vector(load: tuple[Any, Sequence[Any]], zeros: dict[Any, Any], length: int) -> Any:
    """So many elements of a tensor from where a load begins."""
    tensor, indices = load
    return tirx.BufferLoad(tensor, _vector_indices(indices, zeros, length))


def _vector_indices(indices: Sequence[Any], zeros: dict[Any, Any], length: int) -> list[Any]:
    *outer, last = [analysis.replaced(index, zeros) for index in indices]
    return [*outer, tirx.Ramp(last, tirx.IntImm(last.ty.dtype, 1), length)]


def _of_group(data: tuple[Any, Sequence[Any]], loop: tirx.For, dot: Dot) -> int:
    """How many neighbouring lanes read the same elements: all of them; or the columns of a group of a convolution, the
    next of which read what lies as many elements further, whole words of it; 0 if it is otherwise."""
    (tensor, indices), lanes = data, int(loop.extent)
    at = indices, tensor.ty.shape, loop.loop_var
    if analysis.is_linear(*at, lanes):  # the next lane reads the same
        return lanes
    apart = [analysis.stride(*at, lane) for lane in range(1, lanes)]
    of_group = next(lane for lane, far in enumerate(apart, start=1) if far)
    nowhere = {var: tirx.IntImm(var.ty.dtype, 0) for var in analysis.variables(indices)}
    first = Analyzer().simplify(analysis.replaced(indices[-1], nowhere))  # where the channels of the first group begin
    begins = isinstance(first, tirx.IntImm) and int(first) % of_group == 0
    fits = begins and of_group % dot.depth == 0 and lanes % of_group == 0
    return of_group if fits and apart == [lane // of_group * of_group for lane in range(1, lanes)] else 0


def _for_lanes_of_groups(
    data: tuple[Any, Sequence[Any]], zeros: dict[Any, Any], lanes: int, of_group: int, dot: Dot
) -> Any:
    """A word of each group's own elements for each lane. All channels of these groups are loaded, of which there are as
    many as lanes; which word of a group it is must be a number by the time that loops are unrolled."""
    tensor, indices = data
    *outer, last = [analysis.replaced(index, zeros) for index in indices]
    within = tirx.floormod(last, of_group)
    whole = _vector((tensor, [*outer, last - within]), zeros, lanes)
    words = tirx.call_intrin(f"int32x{lanes // dot.depth}", "tirx.reinterpret", whole)
    word = tirx.Cast("int32", tirx.floordiv(within, dot.depth))
    places = [word + lane // of_group * (of_group // dot.depth) for lane in range(lanes)]
    return tirx.Shuffle([words] * dot.depth, places)  # TVM takes no fewer elements than there are places


def _for_all_lanes(data: Any, lanes: int) -> Any:
    """The `depth` elements of a vector as a word for each lane."""
    return tirx.Broadcast(tirx.call_intrin("int32", "tirx.reinterpret", data), lanes)


def _call(dot: Dot, sums: Any, data: Any, weights: Any, lanes: int) -> Any:
    """The sums, and what is added to them.

    Args:
        sums: A vector of so many lanes; `data`: a word of `depth` elements for each; `weights`: as many.
    """
    elements = dot.depth * lanes
    if dot.data == "bfloat16":
        pairs = [tirx.call_intrin(f"uint16x{elements}", "tirx.reinterpret", each) for each in (data, weights)]
        return tirx.call_pure_extern(f"float32x{lanes}", f"{dot.name}_{lanes}", sums, *pairs)
    own = tirx.call_intrin(f"{dot.data}x{elements}", "tirx.reinterpret", data)
    if not dot.adds:
        return tirx.call_pure_extern(f"int32x{lanes}", f"{dot.name}_{lanes}", sums, own, weights)
    name = f"llvm.x86.avx512.{dot.name}.{32 * lanes}" if dot == INT8 else f"llvm.aarch64.neon.{dot.name}"
    return tirx.call_llvm_pure_intrin(f"int32x{lanes}", name, sums, own, weights)
