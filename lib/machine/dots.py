"""Instructions that add several products to each lane of a vector: what CPUs have for elements narrower than float32.

A CPU multiplies 16 pairs of bf16, or 16 quads of bytes, in the time of 16 floats. Which of these instructions there are
decides which programs are worth having; how one is written into a program is `lib.tir.dot`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dot:
    """An instruction, for vectors of any width."""

    name: str  # as the marks of programs have it
    features: frozenset[str]  # of LLVM, any of which a CPU needs for it
    depth: int  # products that are added to each lane
    data: str  # element types
    weights: str
    sums: str


BF16 = Dot("vdpbf16ps", frozenset({"avx512bf16"}), 2, "bfloat16", "bfloat16", "float32")
INT8 = Dot("vpdpbusd", frozenset({"avx512vnni", "avxvnni"}), 4, "uint8", "int8", "int32")
ARM_BF16 = Dot("bfdot", frozenset({"bf16"}), 2, "bfloat16", "bfloat16", "float32")
ARM_INT8 = Dot("usdot", frozenset({"i8mm"}), 4, "uint8", "int8", "int32")
ARM_SIGNED = Dot("sdot", frozenset({"dotprod"}), 4, "int8", "int8", "int32")
DOTS = (BF16, INT8, ARM_BF16, ARM_INT8, ARM_SIGNED)


def named(name: str) -> Dot:
    """Of these, by its name."""
    return next(dot for dot in DOTS if dot.name == name)
