"""Instructions for elements narrower than float32: of vectors, that add several products to each lane, and of matrices.

A CPU multiplies 16 pairs of bf16, or 16 quads of bytes, in the time of 16 floats; with AVX2 alone, 8 pairs of integers
of 16 bits, which hold bytes, in that of 8, but adds them by another instruction; or 16 pairs of bytes, in sums of 16
bits, which may overflow; an ARM without dot products 8 bytes in that of 4. Which of these there are decides which
programs are worth having; how one is written into a program is `lib.tir.dot`. Some CPUs also have registers for small
matrices, and an instruction that multiplies two of them and adds the product to a third, in the same types and order of
elements: sixteen times as many operations (`lib.tir.matrix`).
"""

from collections.abc import Sequence
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
    holds: int = 0  # registers beside those of sums, data and weights, where another instruction adds to the sums
    words: int = 1  # of neighbours along the reduction that may be added together, at most, where sums are of 16 bits

    @property
    def adds(self) -> bool:
        """Whether it adds to the sums itself."""
        return not self.holds


@dataclass(frozen=True, slots=True)
class Matrix:
    """An instruction of AMX: sums (rows x lanes) += data (rows x steps * depth) @ weights (steps x lanes * depth), each
    in one of `REGISTERS`.

    Source: Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3.
    """

    name: str  # as the marks of programs have it
    feature: str  # of LLVM, which a CPU needs for it
    dot: Dot  # what it does to a row in one step

    ROWS = STEPS = LANES = 16  # at most
    REGISTERS = 8
    LATENCY = 52  # cycles until a sum can be added to again
    LINE = 2.25  # cycles that a row takes from L2 (measured; 0.5 from L1)

    def at_once(self, steps: int) -> int:
        """As how many of a reduction's steps are multiplied at once: what divides them."""
        return max(n for n in range(1, self.STEPS + 1) if steps % n == 0)

    def heights(self, rows: int) -> list[int]:
        """The rows of each register that so many are divided into."""
        return [min(self.ROWS, rows - first) for first in range(0, rows, self.ROWS)]

    def keeps_data(self, heights: Sequence[int], vectors: int) -> bool:
        """Whether a step of a tile, of rows in registers of some heights and of so many vectors, keeps all of its data,
        and has one register for parts of the weights, or the other way round: what takes fewer registers. All that one
        register holds must have one height."""
        return len(set(heights)) > 1 or len(heights) <= vectors

    def registers(self, heights: Sequence[int], vectors: int) -> int:
        """How many a tile takes."""
        n = len(heights)
        return n * vectors + (n if self.keeps_data(heights, vectors) else vectors) + 1

    def cycles(self, heights: Sequence[int], vectors: int, steps: int) -> float:
        """That a tile takes for one product of each of its registers: the largest of the products, a cycle for each row
        of data; their latency; and its loads from L2, of data and weights."""
        rows = sum(heights)
        return max(rows * vectors, self.LATENCY, self.LINE * (rows + vectors * steps))


BF16 = Dot("vdpbf16ps", frozenset({"avx512bf16"}), 2, "bfloat16", "bfloat16", "float32")
INT8 = Dot("vpdpbusd", frozenset({"avx512vnni", "avxvnni"}), 4, "uint8", "int8", "int32")
INT16 = Dot("vpmaddwd", frozenset({"avx2"}), 2, "int16", "int16", "int32", holds=1)
# Adds two products in 16 bits, a second instruction two of these sums, and a third adds that: for weights of which no
# two neighbours are too large for that (`lib.tir.small_weights`).
INT7 = Dot("vpmaddubsw", frozenset({"avx2"}), 4, "uint8", "int8", "int32", holds=2, words=2)
ARM_BF16 = Dot("bfdot", frozenset({"bf16"}), 2, "bfloat16", "bfloat16", "float32")
ARM_INT8 = Dot("usdot", frozenset({"i8mm"}), 4, "uint8", "int8", "int32")
ARM_SIGNED = Dot("sdot", frozenset({"dotprod"}), 4, "int8", "int8", "int32")
# Of all ARMs of 64 bits: eight products of 16 bits each, twice, a third instruction adds neighbours, and a fourth those
# of these, to the sums. Of two weights that are -128, the products may not fit. LLVM has two such steps under way.
ARM_SMALL = Dot("smull", frozenset({"neon"}), 4, "int8", "int8", "int32", holds=4)
DOTS = (BF16, INT8, INT16, ARM_BF16, ARM_INT8, ARM_SIGNED)
FOR_SMALL = (INT7, ARM_SMALL)  # for bytes and weights that are small enough (`lib.tir.small_weights`)

AMX_BF16 = Matrix("tdpbf16ps", "amx-bf16", BF16)
AMX_INT8 = Matrix("tdpbusd", "amx-int8", INT8)
MATRICES = (AMX_BF16, AMX_INT8)


def named(name: str) -> Dot:
    """Of the instructions of vectors, by its name."""
    return next(dot for dot in (*DOTS, *FOR_SMALL) if dot.name == name)


def matrix_named(name: str) -> Matrix:
    """Of those of matrices, by its name."""
    return next(matrix for matrix in MATRICES if matrix.name == name)
