"""A few rows times a matrix in halves: a token of a language model whose file is in float16, or in bf16.

Such a product takes as long as its matrix takes to be read, so it is read as the file has it, and its numbers become
floats in registers; rows and sums are in float32.
"""

from functools import cache

import ml_dtypes
import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from lib.tir import parallel

FUNCTION = "few_halves"  # name of the functions and of their blocks
_VECTORS = 4  # of columns that are summed together
_SUMS = 16  # vectors of them and of rows, at most: all fill half of the registers; with AVX2, which has half as many, 8
_CHAINS = 2  # of sums for each, where one row alone leaves the units waiting for one another
_STEP = 4  # numbers along k in a turn of the loop


def packed(matrix: np.ndarray, rows: int, lanes: int) -> np.ndarray:
    """A matrix (k, n) as the program for so many rows reads it: (tiles, k, vectors, lanes).

    Args:
        lanes: Of the CPU's vectors. Sixteen take two registers where these have eight, and the sums overflow them.
    """
    (k, n), (lanes, most) = matrix.shape, (16, _SUMS) if lanes >= 16 else (8, _SUMS // 2)
    columns = -(-n // lanes) * lanes
    vectors = next(v for v in (_VECTORS, 2, 1) if columns // lanes % v == 0 and (v == 1 or v * rows <= most))
    whole = np.pad(matrix, [(0, 0), (0, columns - n)]).reshape(k, -1, vectors, lanes)
    return np.ascontiguousarray(whole.transpose(1, 0, 2, 3))


def narrowed(matrix: np.ndarray) -> np.ndarray | None:
    """A matrix of float32 in halves or bf16, where nothing is lost; else None."""
    with np.errstate(over="ignore"):
        kinds = (matrix.astype(kind) for kind in (np.float16, ml_dtypes.bfloat16))
        return next((short for short in kinds if np.array_equal(short.astype(np.float32), matrix)), None)


@cache
def product(n: int, rows: int, kind: str, shape: tuple[int, int, int, int]) -> tirx.PrimFunc:
    """A function of rows (rows, k) and `packed`, of such a shape and a kind that is `float16` or `bfloat16`, to
    (rows, n)."""
    tiles, k, vectors, lanes = shape
    chains, step = _CHAINS if rows == 1 else 1, _STEP if k % _STEP == 0 else 1
    is_whole = n == tiles * vectors * lanes

    def total(sums: tirx.Buffer, m: tirx.Expr, v: tirx.Expr, lane: tirx.Expr) -> tirx.Expr:
        return sums[0, m, v, lane] + sums[1, m, v, lane] if chains > 1 else sums[0, m, v, lane]

    @T.prim_func(private=True, s_tir=True)
    def function(
        x: T.Buffer((T.int64(rows), T.int64(k)), "float32"),  # type: ignore[valid-type]
        matrix: T.Buffer((T.int64(tiles), T.int64(k), T.int64(vectors), T.int64(lanes)), kind),  # type: ignore[valid-type]
        y: T.Buffer((T.int64(rows), T.int64(n)), "float32"),  # type: ignore[valid-type]
    ) -> None:
        for tile in T.serial(T.int64(tiles), annotations={parallel.MARK: 1}):
            with T.sblock(FUNCTION):
                p = T.axis.spatial(T.int64(tiles), tile)
                T.reads(
                    x[T.int64(0) : T.int64(rows), T.int64(0) : T.int64(k)],
                    matrix[p, T.int64(0) : T.int64(k), T.int64(0) : T.int64(vectors), T.int64(0) : T.int64(lanes)],
                )
                T.writes(y[T.int64(0) : T.int64(rows), T.int64(0) : T.int64(n)])
                sums = T.sblock_alloc_buffer(
                    (T.int64(chains), T.int64(rows), T.int64(vectors), T.int64(lanes)), "float32", scope="local"
                )
                for c in T.unroll(T.int64(chains)):
                    for m in T.unroll(T.int64(rows)):
                        for v in T.unroll(T.int64(vectors)):
                            for lane in T.vectorized(T.int64(lanes)):
                                sums[c, m, v, lane] = T.float32(0)
                for s in T.serial(T.int64(k // step)):
                    for at in T.unroll(T.int64(step)):
                        for v in T.unroll(T.int64(vectors)):
                            for m in T.unroll(T.int64(rows)):
                                for lane in T.vectorized(T.int64(lanes)):
                                    sums[at % chains, m, v, lane] = sums[at % chains, m, v, lane] + (
                                        T.Cast("float32", matrix[p, s * T.int64(step) + at, v, lane])
                                        * x[m, s * T.int64(step) + at]
                                    )
                for m in T.unroll(T.int64(rows)):
                    for v in T.unroll(T.int64(vectors)):
                        if is_whole:
                            for lane in T.vectorized(T.int64(lanes)):
                                y[m, (p * T.int64(vectors) + v) * T.int64(lanes) + lane] = total(sums, m, v, lane)
                        else:
                            for lane in T.serial(T.int64(lanes)):
                                if (p * T.int64(vectors) + v) * T.int64(lanes) + lane < T.int64(n):
                                    y[m, (p * T.int64(vectors) + v) * T.int64(lanes) + lane] = total(sums, m, v, lane)

    return function.with_attr("tirx.noalias", True)
