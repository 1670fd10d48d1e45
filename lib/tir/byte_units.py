"""Units of bytes that are chosen when the values are known (ONNX's DynamicQuantizeLinear): one pass over all of them.

TVM reduces to a single number on one core, once for the largest and once for the smallest, and computes what follows
of each in a kernel of its own: for rows of 768 numbers these together take longer than the products of the bytes.
"""

from functools import cache

from tvm import tirx
from tvm.script import tirx as T

from lib.tir import parallel

FUNCTION = "byte_units"  # name of the functions and of their blocks
_LANES = (64, 32, 16, 8, 4, 2, 1)  # of the extrema that a part keeps; several vectors, whose chains overlap in a core
MOST = 255.0  # the largest byte


@cache
def of_all(n: int, parts: int) -> tirx.PrimFunc:
    """A function of data (n,) to (2,): the distance of neighbouring bytes, and the byte that stands for zero.

    Bytes reach from the smallest value to the largest, and to zero in any case. Where all is zero, neighbours are one
    apart, as ONNX Runtime has it (`onnxruntime/core/util/qmath.h`); in float32, both.

    Args:
        parts: That the data is cut into, as many as there are threads.
    """
    lanes = next(width for width in _LANES if width <= n)
    each = -(-n // (lanes * parts))

    def begin(vector: tirx.Expr) -> tirx.Expr:
        """The last one covers some elements twice, which changes no extremum."""
        return tirx.Min(vector * lanes, tirx.IntImm("int64", n - lanes))

    @T.prim_func(private=True, s_tir=True)
    def function(
        data: T.Buffer((T.int64(n),), "float32"),  # type: ignore[valid-type]
        units: T.Buffer((T.int64(2),), "float32"),  # type: ignore[valid-type]
    ) -> None:
        extrema = T.sblock_alloc_buffer((T.int64(parts), T.int64(2), T.int64(lanes)), "float32")
        for part in T.serial(T.int64(parts), annotations={parallel.MARK: 1}):
            with T.sblock(FUNCTION + "_parts"):
                p = T.axis.spatial(T.int64(parts), part)
                T.reads(data[T.int64(0) : T.int64(n)])
                T.writes(extrema[p, T.int64(0) : T.int64(2), T.int64(0) : T.int64(lanes)])
                most = T.sblock_alloc_buffer((T.int64(lanes),), "float32", scope="local")
                least = T.sblock_alloc_buffer((T.int64(lanes),), "float32", scope="local")
                for lane in T.vectorized(T.int64(lanes)):
                    most[lane] = T.float32(0)
                    least[lane] = T.float32(0)
                for v in T.serial(T.int64(each)):
                    for lane in T.vectorized(T.int64(lanes)):
                        most[lane] = T.max(most[lane], data[begin(p * T.int64(each) + v) + lane])
                        least[lane] = T.min(least[lane], data[begin(p * T.int64(each) + v) + lane])
                for lane in T.vectorized(T.int64(lanes)):
                    extrema[p, 0, lane] = most[lane]
                    extrema[p, 1, lane] = least[lane]
        with T.sblock(FUNCTION):
            T.reads(extrema[T.int64(0) : T.int64(parts), T.int64(0) : T.int64(2), T.int64(0) : T.int64(lanes)])
            T.writes(units[T.int64(0) : T.int64(2)])
            ends = T.sblock_alloc_buffer((T.int64(2),), "float32", scope="local")
            ends[0] = T.float32(0)
            ends[1] = T.float32(0)
            for p, lane in T.grid(T.int64(parts), T.int64(lanes)):
                ends[0] = T.max(ends[0], extrema[p, 0, lane])
                ends[1] = T.min(ends[1], extrema[p, 1, lane])
            units[0] = T.Select(ends[0] == ends[1], T.float32(1), (ends[0] - ends[1]) / T.float32(MOST))
            units[1] = T.nearbyint(T.min(T.max(-ends[1] / units[0], T.float32(0)), T.float32(MOST)))

    return function.with_attr("tirx.noalias", True)
