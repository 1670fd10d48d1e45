"""Kernels that say what the CPU lacks, where it lacks what they were compiled for; else they would end the process.

Compilers may write any instruction that they were told a CPU has, and a CPU that meets one that it does not know stops
the program: of a library that was copied to another machine, the user sees `Illegal instruction` at best. So each
kernel asserts first that the CPU has all of them. It is asked once (x86: `cpuid`; ARM: Linux, which tells it in the
auxiliary vector); after that this is a load and a branch. For AMX, which no compiler writes unasked, `lib.tir.matrix`
does the same.
"""

from collections import defaultdict
from collections.abc import Collection

import tvm
from tvm import tirx
from tvm.target import Target, codegen

from lib.machine.targets import platform_of
from lib.tir import asking

# By LLVM's names, those that it uses without being asked to: where cpuid has them (leaf, subleaf, register, bit; the
# registers are eax, ebx, ecx, edx), as in Intel's "Software Developer's Manual", volume 2, CPUID.
PLACES = {
    "fma": (1, 0, 2, 12), "movbe": (1, 0, 2, 22), "popcnt": (1, 0, 2, 23), "avx": (1, 0, 2, 28), "f16c": (1, 0, 2, 29),
    "lzcnt": (0x80000001, 0, 2, 5), "bmi": (7, 0, 1, 3), "avx2": (7, 0, 1, 5), "bmi2": (7, 0, 1, 8),
    "avx512f": (7, 0, 1, 16), "avx512dq": (7, 0, 1, 17), "avx512ifma": (7, 0, 1, 21), "avx512cd": (7, 0, 1, 28),
    "avx512bw": (7, 0, 1, 30), "avx512vl": (7, 0, 1, 31), "avx512vbmi": (7, 0, 2, 1), "avx512vbmi2": (7, 0, 2, 6),
    "gfni": (7, 0, 2, 8), "avx512vnni": (7, 0, 2, 11), "avx512bitalg": (7, 0, 2, 12),
    "avx512vpopcntdq": (7, 0, 2, 14), "avx512fp16": (7, 0, 3, 23), "avxvnni": (7, 1, 0, 4),
    "avx512bf16": (7, 1, 0, 5),
}  # fmt: skip
# The same of ARM under Linux: which entry of the auxiliary vector (AT_HWCAP, AT_HWCAP2) has it in which bit, as in
# Linux's "ARM64 ELF hwcaps". What every aarch64 CPU has is not asked.
_HWCAP, _HWCAP2 = 16, 26
HWCAPS = {
    "lse": (_HWCAP, 8), "fullfp16": (_HWCAP, 10), "rdm": (_HWCAP, 12), "dotprod": (_HWCAP, 20), "sve": (_HWCAP, 22),
    "sve2": (_HWCAP2, 1), "i8mm": (_HWCAP2, 13), "bf16": (_HWCAP2, 14),
}  # fmt: skip
_SAVED = (1, 0, 2, 27)  # the operating system keeps registers when it changes between threads; xgetbv says which
_VECTORS, _LONG_VECTORS = 0x6, 0xE6  # of the registers that xgetbv tells: those of AVX, and of AVX-512 as well
_FUNCTION = "family_tuner_cpu_has_all"
_PACKED = 1  # tvm::CallingConv: functions that the host calls

_ASKING = """{cpuid}
  br i1 %{all}, label %saved, label %answer
saved:
  %x = call {{ i32, i32 }} asm sideeffect "xgetbv", "={{ax}},={{dx}},{{cx}}"(i32 0)
  %low = extractvalue {{ i32, i32 }} %x, 0
  %kept = and i32 %low, {registers}
  %keeps = icmp eq i32 %kept, {registers}
  %has = zext i1 %keeps to i32
  br label %answer
answer:
  %found = phi i32 [ 0, %ask ], [ %has, %saved ]"""
_ASKING_ARM = """{hwcaps}
  %found = zext i1 %{all} to i32"""
_GETAUXVAL = "declare i64 @getauxval(i64)\n"
_COMPARE_HWCAP = """  %q{n} = call i64 @getauxval(i64 {entry})
  %m{n} = and i64 %q{n}, {mask}
  %c{n} = icmp eq i64 %m{n}, {mask}
  %a{n} = and i1 {before}, %c{n}
"""
_ASK = """  %q{n} = call {{ i32, i32, i32, i32 }}
    asm sideeffect "cpuid", "={{ax}},={{bx}},={{cx}},={{dx}},0,2"(i32 {leaf}, i32 {sub})
"""
_COMPARE = """  %r{n}.{register} = extractvalue {{ i32, i32, i32, i32 }} %q{n}, {register}
  %m{n}.{register} = and i32 %r{n}.{register}, {mask}
  %c{n}.{register} = icmp eq i32 %m{n}.{register}, {mask}
  %a{n}.{register} = and i1 {before}, %c{n}.{register}
"""


def needed(target: Target) -> list[str]:
    """What kernels that are compiled for a target may need of an x86 CPU, or of ARM's under Linux, by LLVM's names;
    empty for other CPUs, and for the oldest of these."""
    triple = str(target.attrs.get("mtriple", ""))
    if target.kind.name != "llvm" or not (triple.startswith("x86_64") or _is_arm(triple)):
        return []
    features = {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    if _is_arm(triple):
        return sorted(features & set(HWCAPS))
    return sorted(features & set(PLACES)) if "avx" in features else []


def _is_arm(triple: str) -> bool:
    return platform_of(triple) == ("aarch64", "linux")


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Have a lowered function assert first that the CPU has what it was compiled for.

    The caller gets a RuntimeError that names it.
    """
    attrs = function.attrs or {}
    names = needed(attrs["target"]) if "target" in attrs and int(attrs.get("calling_conv", 0)) == _PACKED else []
    if not names:
        return function
    told = (
        f"this library was compiled for a CPU with {', '.join(names)}, and this CPU, or its operating system, lacks "
        "some of them. Compile the model for it: on this machine, or with --target."
    )
    check = asking.required(_FUNCTION, told)
    is_arm = _is_arm(str(attrs["target"].attrs.get("mtriple", "")))
    text = tvm.ir.StringImm(_text_of_arm(names) if is_arm else _text(names))
    body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, tirx.SeqStmt([check, function.body]))
    return function.with_body(body)


def _text(names: Collection[str]) -> str:
    """The function in LLVM's language that tells whether the CPU has all of these."""
    masks: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for leaf, sub, register, bit in [_SAVED, *(PLACES[name] for name in names)]:
        masks[leaf, sub][register] |= 1 << bit
    lines, so_far = [], "true"
    for n, ((leaf, sub), registers) in enumerate(masks.items()):
        lines.append(_ASK.format(n=n, leaf=leaf, sub=sub))
        for register, mask in registers.items():
            lines.append(_COMPARE.format(n=n, register=register, mask=mask, before=so_far))
            so_far = f"%a{n}.{register}"
    kept = _LONG_VECTORS if "avx512f" in names else _VECTORS
    asked = _ASKING.format(cpuid="".join(lines), all=so_far.removeprefix("%"), registers=kept)
    return asking.once(_FUNCTION, asked)


def _text_of_arm(names: Collection[str]) -> str:
    masks: dict[int, int] = defaultdict(int)
    for entry, bit in (HWCAPS[name] for name in names):
        masks[entry] |= 1 << bit
    lines, so_far = [], "true"
    for n, (entry, mask) in enumerate(masks.items()):
        lines.append(_COMPARE_HWCAP.format(n=n, entry=entry, mask=mask, before=so_far))
        so_far = f"%a{n}"
    asked = _ASKING_ARM.format(hwcaps="".join(lines), all=so_far.removeprefix("%"))
    return _GETAUXVAL + asking.once(_FUNCTION, asked)
