"""Many rows times a matrix of four bits, in bytes: a prompt of a language model.

What is multiplied is rounded to bytes in the matrix's own blocks, with a scale for each row and block, as ONNX Runtime
does where a file allows it (`accuracy_level` 4 of `MatMulNBits`). So sums over a block are of bytes, by the
instructions for these (`lib.machine.dots`), and only a block's sum is scaled:

    y[m, n]  =  sum over blocks b  t[m, b] s[n, b] * (sum over k in b  (u[m, k] - 128) (q[n, k] - z[n, b]))

where u are unsigned, as the instruction wants them, and what 128 adds is a constant of the matrix, with which its sums
begin. A thread unpacks the numbers of a tile of columns once, and takes all rows through it.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from lib.machine.dots import INT8
from lib.machine.registers import registers
from lib.tir import dot, parallel
from lib.tir.few_bits import Layout

FUNCTION = "few_bits_int8"  # name of the functions and of their blocks
_LANES, _DEPTH = 16, 4
_VECTORS = 2  # of columns, that are summed together
_ROWS = 6  # the same of rows: sums and totals fill the registers
_MIDDLE = 128
_STEP = 2 * _DEPTH  # numbers along k in a byte's two halves, times the depth of an instruction


@dataclass(frozen=True, slots=True)
class Bytes:
    """A matrix of four bits as the program reads it: `packed` (tiles, blocks, steps / 2, vectors, lanes * depth), a
    byte of which has a number of the first half of a block's steps and one of the second; scales, zero points (uint8)
    and `begins` (int32), (tiles, blocks, vectors, lanes) each."""

    packed: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    begins: np.ndarray

    @classmethod
    def of(cls, layout: Layout, numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> "Bytes":
        """Of numbers (n, blocks, block), scales and zero points (n, blocks)."""
        columns = tiles(layout) * _VECTORS * _LANES

        def wide(values: np.ndarray) -> np.ndarray:
            filled = np.pad(values, [(0, columns - layout.n), *[(0, 0)] * (values.ndim - 1)])
            return filled.reshape(-1, _VECTORS, _LANES, *values.shape[1:])

        halves = wide(numbers).reshape(-1, _VECTORS, _LANES, layout.blocks, 2, layout.block // _STEP, _DEPTH)
        low, high = halves[:, :, :, :, 0], halves[:, :, :, :, 1]
        packed = (low | (high << 4)).astype(np.uint8).transpose(0, 3, 4, 1, 2, 5)
        around = (numbers.astype(np.int32) - zeros.astype(np.int32)[..., None]).sum(-1)
        by_block = [
            np.ascontiguousarray(wide(each).transpose(0, 3, 1, 2)) for each in (scales, zeros, -_MIDDLE * around)
        ]
        shape = (*packed.shape[:4], _LANES * _DEPTH)
        return cls(np.ascontiguousarray(packed).reshape(shape), by_block[0], by_block[1], by_block[2].astype(np.int32))


def tiles(layout: Layout) -> int:
    """Of columns."""
    return -(-layout.n // (_VECTORS * _LANES))


def instruction(target: Target) -> str:
    """That its programs take on a CPU, by name; empty if there is none for vectors of its width."""
    found = registers(target)
    return INT8.name if found.lanes == _LANES and INT8 in found.dots else ""


def fits(layout: Layout) -> bool:
    """Whether there is a program for its rows."""
    return layout.bits == 4 and layout.block % _STEP == 0 and layout.rows >= _ROWS


@cache
def product(layout: Layout, kind: str, multiplied_by: str) -> tirx.PrimFunc:
    """A function of rows (rows, k), and of the arrays of `Bytes`, to (rows, n).

    Args:
        kind: Element type of the scales.
        multiplied_by: An instruction of `lib.machine.dots`.
    """
    n, k, rows, block, blocks = layout.n, layout.k, layout.rows, layout.block, layout.blocks
    n_tiles, steps, half = tiles(layout), block // _DEPTH, block // _STEP
    is_whole, width = n == n_tiles * _VECTORS * _LANES, min(block, _LANES)
    row_tiles = -(-rows // _ROWS)
    of_columns = tuple(map(T.int64, (n_tiles, blocks, _VECTORS, _LANES)))
    of_packed = tuple(map(T.int64, (n_tiles, blocks, half, _VECTORS, _LANES * _DEPTH)))

    def first(tile: tirx.Expr) -> tirx.Expr:
        """Row of a tile; the last one begins earlier, and computes some again."""
        return tirx.Min(tile * _ROWS, tirx.IntImm("int64", rows - _ROWS))

    def element(x: tirx.Buffer, m: tirx.Expr, at: tirx.Expr) -> tirx.Expr:
        if k == blocks * block:
            return x[m, at]
        return tirx.Select(at < k, x[m, tirx.Min(at, tirx.const(k - 1, "int64"))], tirx.const(0.0, "float32"))

    @T.prim_func(private=True, s_tir=True)
    def function(
        x: T.Buffer((T.int64(rows), T.int64(k)), "float32"),  # type: ignore[valid-type]
        packed: T.Buffer(of_packed, "uint8"),  # type: ignore[valid-type]
        scales: T.Buffer(of_columns, kind),  # type: ignore[valid-type]
        zeros: T.Buffer(of_columns, "uint8"),  # type: ignore[valid-type]
        begins: T.Buffer(of_columns, "int32"),  # type: ignore[valid-type]
        y: T.Buffer((T.int64(rows), T.int64(n)), "float32"),  # type: ignore[valid-type]
    ) -> None:
        units = T.sblock_alloc_buffer((T.int64(rows), T.int64(blocks * block)), "uint8")
        scales_of_rows = T.sblock_alloc_buffer((T.int64(rows), T.int64(blocks)), "float32")
        for row in T.serial(T.int64(rows), annotations={parallel.MARK: 1}):
            with T.sblock(FUNCTION + "_rows"):
                m = T.axis.spatial(T.int64(rows), row)
                T.reads(x[m, T.int64(0) : T.int64(k)])
                T.writes(
                    units[m, T.int64(0) : T.int64(blocks * block)], scales_of_rows[m, T.int64(0) : T.int64(blocks)]
                )
                largest = T.sblock_alloc_buffer((T.int64(width),), "float32", scope="local")
                inverse = T.sblock_alloc_buffer((T.int64(1),), "float32", scope="local")
                for b in T.serial(T.int64(blocks)):
                    for lane in T.vectorized(T.int64(width)):
                        largest[lane] = T.float32(0)
                    for v in T.unroll(T.int64(block // width)):
                        for lane in T.vectorized(T.int64(width)):
                            largest[lane] = T.max(
                                largest[lane], T.abs(element(x, m, b * T.int64(block) + v * T.int64(width) + lane))
                            )
                    for lane in T.vectorized(T.int64(8)):
                        largest[lane] = T.max(largest[lane], largest[lane + T.int64(8)])
                    for lane in T.vectorized(T.int64(4)):
                        largest[lane] = T.max(largest[lane], largest[lane + T.int64(4)])
                    for lane in T.vectorized(T.int64(2)):
                        largest[lane] = T.max(largest[lane], largest[lane + T.int64(2)])
                    inverse[0] = T.max(T.max(largest[0], largest[1]), T.float32(1e-30))
                    scales_of_rows[m, b] = inverse[0] * T.float32(1 / 127)
                    inverse[0] = T.float32(127) / inverse[0]
                    for v in T.unroll(T.int64(block // width)):
                        for lane in T.vectorized(T.int64(width)):
                            units[m, b * T.int64(block) + v * T.int64(width) + lane] = T.Cast(
                                "uint8",
                                T.Cast(
                                    "int32",
                                    T.nearbyint(
                                        element(x, m, b * T.int64(block) + v * T.int64(width) + lane) * inverse[0]
                                    ),
                                )
                                + 128,
                            )
        for tile in T.serial(T.int64(n_tiles), annotations={parallel.MARK: 1}):
            with T.sblock(FUNCTION):
                p = T.axis.spatial(T.int64(n_tiles), tile)
                T.reads(
                    units[T.int64(0) : T.int64(rows), T.int64(0) : T.int64(blocks * block)],
                    scales_of_rows[T.int64(0) : T.int64(rows), T.int64(0) : T.int64(blocks)],
                    packed[
                        p,
                        T.int64(0) : T.int64(blocks),
                        T.int64(0) : T.int64(half),
                        T.int64(0) : T.int64(_VECTORS),
                        T.int64(0) : T.int64(_LANES * _DEPTH),
                    ],
                    scales[
                        p, T.int64(0) : T.int64(blocks), T.int64(0) : T.int64(_VECTORS), T.int64(0) : T.int64(_LANES)
                    ],
                    zeros[
                        p, T.int64(0) : T.int64(blocks), T.int64(0) : T.int64(_VECTORS), T.int64(0) : T.int64(_LANES)
                    ],
                    begins[
                        p, T.int64(0) : T.int64(blocks), T.int64(0) : T.int64(_VECTORS), T.int64(0) : T.int64(_LANES)
                    ],
                )
                T.writes(y[T.int64(0) : T.int64(rows), T.int64(0) : T.int64(n)])
                numbers = T.sblock_alloc_buffer(
                    (T.int64(blocks), T.int64(steps), T.int64(_VECTORS), T.int64(_LANES), T.int64(_DEPTH)), "int8"
                )
                sums = T.sblock_alloc_buffer(
                    (T.int64(_ROWS), T.int64(_VECTORS), T.int64(_LANES)), "int32", scope="local"
                )
                total = T.sblock_alloc_buffer(
                    (T.int64(_ROWS), T.int64(_VECTORS), T.int64(_LANES)), "float32", scope="local"
                )
                for b in T.serial(T.int64(blocks)):
                    for s in T.serial(T.int64(half)):
                        for v in T.unroll(T.int64(_VECTORS)):
                            for lane in T.vectorized(T.int64(_LANES * _DEPTH)):
                                numbers[b, s, v, lane // _DEPTH, lane % _DEPTH] = T.Cast(
                                    "int8", packed[p, b, s, v, lane] & T.uint8(15)
                                ) - T.Cast("int8", zeros[p, b, v, lane // _DEPTH])
                            for lane in T.vectorized(T.int64(_LANES * _DEPTH)):
                                numbers[b, s + T.int64(half), v, lane // _DEPTH, lane % _DEPTH] = T.Cast(
                                    "int8", T.shift_right(packed[p, b, s, v, lane], T.uint8(4))
                                ) - T.Cast("int8", zeros[p, b, v, lane // _DEPTH])
                for t in T.serial(T.int64(row_tiles)):
                    for r in T.unroll(T.int64(_ROWS)):
                        for v in T.unroll(T.int64(_VECTORS)):
                            for lane in T.vectorized(T.int64(_LANES)):
                                total[r, v, lane] = T.float32(0)
                    for b in T.serial(T.int64(blocks)):
                        for r in T.unroll(T.int64(_ROWS)):
                            for v in T.unroll(T.int64(_VECTORS)):
                                for lane in T.vectorized(T.int64(_LANES)):
                                    sums[r, v, lane] = begins[p, b, v, lane]
                        for s in T.unroll(T.int64(steps)):
                            for r in T.unroll(T.int64(_ROWS)):
                                for v in T.unroll(T.int64(_VECTORS)):
                                    for lane in T.serial(T.int64(_LANES), annotations={dot.MARK: multiplied_by}):
                                        for d in T.serial(T.int64(_DEPTH)):
                                            with T.sblock(FUNCTION + "_sums"):
                                                T.reads()
                                                T.writes()
                                                sums[r, v, lane] = sums[r, v, lane] + T.Cast(
                                                    "int32",
                                                    units[first(t) + r, b * T.int64(block) + s * T.int64(_DEPTH) + d],
                                                ) * T.Cast("int32", numbers[b, s, v, lane, d])
                        for r in T.unroll(T.int64(_ROWS)):
                            for v in T.unroll(T.int64(_VECTORS)):
                                for lane in T.vectorized(T.int64(_LANES)):
                                    total[r, v, lane] = total[r, v, lane] + T.Cast("float32", sums[r, v, lane]) * (
                                        T.Cast("float32", scales[p, b, v, lane]) * scales_of_rows[first(t) + r, b]
                                    )
                    for r in T.unroll(T.int64(_ROWS)):
                        for v in T.unroll(T.int64(_VECTORS)):
                            if is_whole:
                                for lane in T.vectorized(T.int64(_LANES)):
                                    y[first(t) + r, (p * T.int64(_VECTORS) + v) * T.int64(_LANES) + lane] = total[
                                        r, v, lane
                                    ]
                            else:
                                for lane in T.serial(T.int64(_LANES)):
                                    if (p * T.int64(_VECTORS) + v) * T.int64(_LANES) + lane < T.int64(n):
                                        y[first(t) + r, (p * T.int64(_VECTORS) + v) * T.int64(_LANES) + lane] = total[
                                            r, v, lane
                                        ]

    return function.with_attr("tirx.noalias", True)
