"""The vector registers of a CPU, as LLVM may use them: how many, how wide, and which vectors fill an extent."""

from dataclasses import dataclass, replace

from tvm.target import Target, codegen

from lib.machine.dots import ARM_SMALL, DOTS, INT7, INT8, INT16, MATRICES, Dot, Matrix

FLOAT_BITS = 32
_ARM_32 = ("armv", "arm-", "thumb")  # triples of the older architecture, which has half as many


@dataclass(frozen=True, slots=True)
class Registers:
    """The vector registers of a CPU."""

    count: int
    lanes: int  # float32 elements in each
    dots: tuple[Dot, ...] = ()  # instructions for narrower elements
    matrices: tuple[Matrix, ...] = ()  # those that multiply whole matrices of them
    looks_up: bool = False  # whether a vector of bytes is looked up in a table of all bytes (AVX512-VBMI)
    spreads: bool = True  # whether what multiplies vectors takes one number of the memory for all lanes
    for_small: Dot | None = None  # for bytes and small weights (`lib.tir.small_weights`), where none is for all bytes

    def matrix(self, dot: Dot | None) -> Matrix | None:
        """The one that does to each row what an instruction of vectors does, if there is one."""
        return next((matrix for matrix in self.matrices if matrix.dot == dot), None)

    def beside(self, dot: Dot | None, words: int = 1) -> "Registers":
        """With the registers that an instruction leaves: one that does not add products itself needs some for these, as
        many more as words are added together, and with others to add them, numbers are loaded in the meantime."""
        if dot is None or dot.adds:
            return self
        return replace(self, count=self.count - dot.holds - words + 1, spreads=True)

    @property
    def weight_bits(self) -> int:
        """Of weights of bytes that are multiplied fastest."""
        return 7 if self.for_small == INT7 else 8

    def fastest(self, weights: str) -> Dot | Matrix | None:
        """The instruction that multiplies most elements of a type, if there is one."""
        dots = (*self.dots, self.for_small) if self.for_small else self.dots
        dot = next((dot for dot in dots if dot.weights == weights), None)
        return self.matrix(dot) or dot


def registers(target: Target) -> Registers:
    """What LLVM may use when it compiles for a CPU target.

    The instruction sets decide the width: TVM's `llvm_get_vector_width` does not look at them on x86 (512 for a
    Haswell). What it does know is the target's own `vector-width`, a limit that the user sets.
    """
    features = {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    limit = int(codegen.llvm_get_vector_width(target)) // FLOAT_BITS
    dots = tuple(dot for dot in DOTS if dot.features & features)
    if "avx512f" in features:
        lanes = min(16, limit)
        narrow = tuple(dot for dot in dots if dot != INT16) if "avx512vl" in features else ()
        looks_up = lanes == 16 and "avx512vbmi" in features
        for_small = INT7 if {"avx512vl", "avx512bw"} <= features and INT8 not in dots else None
        return Registers(32, lanes, narrow, _matrices(target, features, lanes), looks_up, for_small=for_small)
    if "avx" in features:
        for_small = INT7 if INT8 not in dots and INT7.features & features else None
        return Registers(16, min(8, limit), dots, spreads=False, for_small=for_small)
    if "neon" in features and not str(target.attrs.get("mtriple", "")).startswith(_ARM_32):
        has_bytes = any(dot.weights == ARM_SMALL.weights for dot in dots)
        return Registers(32, min(4, limit), dots, for_small=None if has_bytes else ARM_SMALL)
    return Registers(16, min(4, limit), spreads=False)


def _matrices(target: Target, features: set[str], lanes: int) -> tuple[Matrix, ...]:
    """Those of a CPU, whose registers Linux lets a process use that asks for them."""
    triple = str(target.attrs.get("mtriple", codegen.llvm_get_system_triple()))
    if lanes < Matrix.LANES or not {"amx-tile", "avx512vl"} <= features or "-linux" not in triple:
        return ()
    return tuple(matrix for matrix in MATRICES if matrix.feature in features)


def narrowed(lanes: int, extent: int) -> int:
    """The widest vectors that fill an extent, of as many lanes, a half or a quarter of them; else 1."""
    return next(n for n in (lanes, lanes // 2, lanes // 4, 1) if n and extent % n == 0)
