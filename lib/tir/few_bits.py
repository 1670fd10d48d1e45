"""A few rows times a matrix whose numbers have four or eight bits, in blocks with a scale each: a token of a language
model, which reads all weights once. They stay as small as the file has them, and become floats in registers.

A word of 32 bits has eight numbers of four bits, of one column. Masked where they stand, they are numbers times a power
of sixteen, which float32 has exactly, and the rows were divided by that power before: so a product takes a mask, a
conversion and a multiply-add, and no shift.

    y[m, n]  =  sum over blocks b  s[n, b] * (sum over k in b  q[n, k] x[m, k]  -  z[n, b] * sum over k in b  x[m, k])

Rows are in float32, as ONNX Runtime's `MatMulNBits` has them at its accuracy levels 0 and 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from lib.tir import parallel

FUNCTION = "few_bits"  # name of the functions and of their blocks
BITS = (4, 8)
_WORD = 32
_VECTORS = 4  # of columns that are summed together
_SUMS = 8  # vectors of them and of rows, at most: with as many totals, and what is unpacked, they fill the registers
_CHAINS = 2  # of sums for each, where one row alone leaves the units waiting for one another


@dataclass(frozen=True, slots=True)
class Layout:
    """How the numbers of a matrix (k, n) lie in words.

    Attributes:
        block: Numbers along k that have a scale together.
        rows: That are multiplied at once.
        lanes: Of a vector of columns.
        sums: Vectors of columns and rows, at most.
    """

    n: int
    k: int
    bits: int
    block: int
    rows: int = 1
    lanes: int = 16
    sums: int = _SUMS

    @classmethod
    def on(cls, lanes: int, n: int, k: int, bits: int, block: int, rows: int) -> "Layout":
        """As suits a CPU whose vectors have so many lanes: sixteen take two of AVX2's sixteen registers, which the sums
        overflowed (2.3 times as slow for four rows of four bits). One row of bytes is the fastest with few of these."""
        if lanes >= 16:
            return cls(n, k, bits, block, rows)
        return cls(n, k, bits, block, rows, 16, 2) if (bits, rows) == (8, 1) else cls(n, k, bits, block, rows, 8)

    @property
    def blocks(self) -> int:
        """Along k; the last one is filled up with zeros."""
        return -(-self.k // self.block)

    @property
    def per_word(self) -> int:
        return _WORD // self.bits

    @property
    def steps(self) -> int:
        """Words of a block."""
        return self.block // self.per_word

    @property
    def vectors(self) -> int:
        """Of columns, in a tile."""
        fitting = (v for v in (_VECTORS, 2, 1) if v == 1 or v * self.rows <= self.sums)
        return next(v for v in fitting if -(-self.n // self.lanes) % v == 0)

    @property
    def tiles(self) -> int:
        return -(-self.n // (self.lanes * self.vectors))

    @property
    def text(self) -> str:
        return f"{self.n} {self.k} {self.bits} {self.block} {self.rows} {self.lanes} {self.sums}"

    @classmethod
    def parsed(cls, text: str) -> "Layout":
        """What `text` gave."""
        return cls(*map(int, text.split()))

    def words(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers (n, blocks, block) as int32 (tiles, blocks, steps, vectors, lanes)."""
        split = numbers.reshape(self.n, self.blocks, self.steps, self.per_word).astype(np.uint32)
        shifts = np.arange(self.per_word, dtype=np.uint32) * np.uint32(self.bits)
        joined = np.bitwise_or.reduce(split << shifts, axis=-1)
        return np.ascontiguousarray(self._in_tiles(joined).transpose(0, 3, 4, 1, 2)).view(np.int32)

    def by_block(self, values: np.ndarray) -> np.ndarray:
        """Scales or zero points (n, blocks) as (tiles, blocks, vectors, lanes)."""
        return np.ascontiguousarray(self._in_tiles(values).transpose(0, 3, 1, 2))

    def _in_tiles(self, values: np.ndarray) -> np.ndarray:
        columns = self.tiles * self.vectors * self.lanes
        whole = np.pad(values, [(0, columns - self.n), *[(0, 0)] * (values.ndim - 1)])
        return whole.reshape(self.tiles, self.vectors, self.lanes, *values.shape[1:])


@cache
def product(layout: Layout, kind: str = "float32", *, has_one_zero: bool = False) -> tirx.PrimFunc:
    """A function of rows (rows, k), `Layout.words`, and scales and zero points (uint8) as `Layout.by_block` has them,
    to (rows, n).

    Args:
        kind: Element type of the scales: float32, or float16, which is half to be read.
        has_one_zero: Zero points are all the same: one, of shape (1, 1, 1, 1).
    """
    n, k, rows, block, per_word, steps = layout.n, layout.k, layout.rows, layout.block, layout.per_word, layout.steps
    blocks, vectors, tiles, lanes = layout.blocks, layout.vectors, layout.tiles, layout.lanes
    chains, is_whole = _CHAINS if rows == 1 else 1, n == tiles * vectors * lanes
    width = min(block, lanes)
    z_tiles, z_blocks, z_vectors, z_lanes = (1,) * 4 if has_one_zero else (tiles, blocks, vectors, lanes)
    of_words = tuple(map(T.int64, (tiles, blocks, steps, vectors, lanes)))
    of_columns = tuple(map(T.int64, (tiles, blocks, vectors, lanes)))
    of_zeros = tuple(map(T.int64, (z_tiles, z_blocks, z_vectors, z_lanes)))

    def number(word: tirx.Expr, place: tirx.Expr) -> tirx.Expr:
        """Of a word, times its power of two."""
        found = word & _mask(layout, 0)
        for at in range(1, per_word):
            moved = word if at < per_word - 1 else tirx.shift_right(word, tirx.const(layout.bits, "int32"))
            found = tirx.Select(place == at, moved & _mask(layout, at), found)
        return tirx.Cast("float32", found)

    def inverse(place: tirx.Expr) -> tirx.Expr:
        """The power by which a row is divided for that."""
        found: tirx.Expr = tirx.const(1.0, "float32")
        for at in range(1, per_word):
            found = tirx.Select(place == at, tirx.const(2.0 ** -_power(layout, at), "float32"), found)
        return found

    def element(x: tirx.Buffer, m: tirx.Expr, at: tirx.Expr) -> tirx.Expr:
        """Of a row that zeros fill up to whole blocks."""
        if k == blocks * block:
            return x[m, at]
        return tirx.Select(at < k, x[m, tirx.Min(at, tirx.const(k - 1, "int64"))], tirx.const(0.0, "float32"))

    def zero(zeros: tirx.Buffer, at: Sequence[tirx.Expr]) -> tirx.Expr:
        return tirx.Cast("float32", zeros[(0,) * 4 if has_one_zero else tuple(at)])

    @T.prim_func(private=True, s_tir=True)
    def function(
        x: T.Buffer((T.int64(rows), T.int64(k)), "float32"),  # type: ignore[valid-type]
        words: T.Buffer(of_words, "int32"),  # type: ignore[valid-type]
        scales: T.Buffer(of_columns, kind),  # type: ignore[valid-type]
        zeros: T.Buffer(of_zeros, "uint8"),  # type: ignore[valid-type]
        y: T.Buffer((T.int64(rows), T.int64(n)), "float32"),  # type: ignore[valid-type]
    ) -> None:
        divided = T.sblock_alloc_buffer((T.int64(rows), T.int64(blocks * block)), "float32")
        sums_of_rows = T.sblock_alloc_buffer((T.int64(rows), T.int64(blocks)), "float32")
        with T.sblock(FUNCTION + "_rows"):
            T.reads(x[T.int64(0) : T.int64(rows), T.int64(0) : T.int64(k)])
            T.writes(
                divided[T.int64(0) : T.int64(rows), T.int64(0) : T.int64(blocks * block)],
                sums_of_rows[T.int64(0) : T.int64(rows), T.int64(0) : T.int64(blocks)],
            )
            sums_of_lanes = T.sblock_alloc_buffer((T.int64(width),), "float32", scope="local")
            for m, b in T.grid(T.int64(rows), T.int64(blocks)):
                for lane in T.vectorized(T.int64(width)):
                    sums_of_lanes[lane] = T.float32(0)
                for v in T.serial(T.int64(block // width)):
                    for lane in T.vectorized(T.int64(width)):
                        sums_of_lanes[lane] = sums_of_lanes[lane] + element(
                            x, m, b * T.int64(block) + v * T.int64(width) + lane
                        )
                    for lane in T.vectorized(T.int64(width)):
                        divided[m, b * T.int64(block) + v * T.int64(width) + lane] = element(
                            x, m, b * T.int64(block) + v * T.int64(width) + lane
                        ) * inverse(lane % per_word)
                sums_of_rows[m, b] = T.float32(0)
                for lane in T.unroll(T.int64(width)):
                    sums_of_rows[m, b] = sums_of_rows[m, b] + sums_of_lanes[lane]
        for tile in T.serial(T.int64(tiles), annotations={parallel.MARK: 1}):
            with T.sblock(FUNCTION):
                p = T.axis.spatial(T.int64(tiles), tile)
                T.reads(
                    divided[T.int64(0) : T.int64(rows), T.int64(0) : T.int64(blocks * block)],
                    sums_of_rows[T.int64(0) : T.int64(rows), T.int64(0) : T.int64(blocks)],
                    words[
                        p,
                        T.int64(0) : T.int64(blocks),
                        T.int64(0) : T.int64(steps),
                        T.int64(0) : T.int64(vectors),
                        T.int64(0) : T.int64(lanes),
                    ],
                    scales[p, T.int64(0) : T.int64(blocks), T.int64(0) : T.int64(vectors), T.int64(0) : T.int64(lanes)],
                    zeros[
                        T.int64(0) : T.int64(z_tiles),
                        T.int64(0) : T.int64(z_blocks),
                        T.int64(0) : T.int64(z_vectors),
                        T.int64(0) : T.int64(z_lanes),
                    ],
                )
                T.writes(y[T.int64(0) : T.int64(rows), T.int64(0) : T.int64(n)])
                total = T.sblock_alloc_buffer(
                    (T.int64(rows), T.int64(vectors), T.int64(lanes)), "float32", scope="local"
                )
                sums = T.sblock_alloc_buffer(
                    (T.int64(chains), T.int64(rows), T.int64(vectors), T.int64(lanes)), "float32", scope="local"
                )
                for m in T.unroll(T.int64(rows)):
                    for v in T.unroll(T.int64(vectors)):
                        for lane in T.vectorized(T.int64(lanes)):
                            total[m, v, lane] = T.float32(0)
                for b in T.serial(T.int64(blocks)):
                    for c in T.unroll(T.int64(chains)):
                        for m in T.unroll(T.int64(rows)):
                            for v in T.unroll(T.int64(vectors)):
                                for lane in T.vectorized(T.int64(lanes)):
                                    sums[c, m, v, lane] = T.float32(0)
                    for s in T.serial(T.int64(steps)):
                        for v in T.unroll(T.int64(vectors)):
                            for at in T.unroll(T.int64(per_word)):
                                for m in T.unroll(T.int64(rows)):
                                    for lane in T.vectorized(T.int64(lanes)):
                                        sums[at % chains, m, v, lane] = (
                                            sums[at % chains, m, v, lane]
                                            + number(words[p, b, s, v, lane], at)
                                            * divided[m, b * T.int64(block) + s * T.int64(per_word) + at]
                                        )
                    for m in T.unroll(T.int64(rows)):
                        for v in T.unroll(T.int64(vectors)):
                            for lane in T.vectorized(T.int64(lanes)):
                                total[m, v, lane] = total[m, v, lane] + T.Cast("float32", scales[p, b, v, lane]) * (
                                    (sums[0, m, v, lane] + sums[1, m, v, lane] if chains > 1 else sums[0, m, v, lane])
                                    - zero(zeros, (p, b, v, lane)) * sums_of_rows[m, b]
                                )
                for m in T.unroll(T.int64(rows)):
                    for v in T.unroll(T.int64(vectors)):
                        if is_whole:
                            for lane in T.vectorized(T.int64(lanes)):
                                y[m, (p * T.int64(vectors) + v) * T.int64(lanes) + lane] = total[m, v, lane]
                        else:
                            for lane in T.serial(T.int64(lanes)):
                                if (p * T.int64(vectors) + v) * T.int64(lanes) + lane < T.int64(n):
                                    y[m, (p * T.int64(vectors) + v) * T.int64(lanes) + lane] = total[m, v, lane]

    return function.with_attr("tirx.noalias", True)


def _power(layout: Layout, place: int) -> int:
    """The bit at which a number stands in a word, once it is masked. The last one is shifted before: where it stands it
    would make the word negative."""
    return layout.bits * min(place, layout.per_word - 2)


def _mask(layout: Layout, place: int) -> tirx.Expr:
    return tirx.const(((1 << layout.bits) - 1) << _power(layout, place), "int32")
