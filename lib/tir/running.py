"""Running sums along an axis that others follow: of gates of a state space, of maps of masks.

Vectors of what follows the axis are summed, each in the order of the elements. TVM's own program goes along the axis
for one element after the other, which touches a line of the cache for each.
"""

from functools import cache

from tvm import tirx
from tvm.script import tirx as T

from lib.tir import parallel

FUNCTION = "running_sum"  # name of the functions and of their blocks
_LANES = 16


def width(inner: int) -> int:
    """Of the vectors that are summed: the widest that fill what follows the axis."""
    return next(n for n in range(_LANES, 0, -1) if inner % n == 0)


@cache
def of_lines(outer: int, length: int, inner: int, kind: str, is_exclusive: bool, parts: int) -> tirx.PrimFunc:
    """A function of data (outer, length, inner) to its sums along the second axis, in the same shape.

    Args:
        kind: Element type of both.
        is_exclusive: Sums are of what comes before an element, without it.
        parts: That the vectors are cut into, as many as there are threads.
    """
    lanes = width(inner)
    across = inner // lanes
    each = -(-outer * across // parts)

    def row(vector: tirx.Expr) -> tirx.Expr:
        return vector // across

    def column(vector: tirx.Expr, lane: tirx.Expr) -> tirx.Expr:
        return vector % across * lanes + lane

    @T.prim_func(private=True, s_tir=True)
    def function(
        data: T.Buffer((T.int64(outer), T.int64(length), T.int64(inner)), kind),  # type: ignore[valid-type]
        result: T.Buffer((T.int64(outer), T.int64(length), T.int64(inner)), kind),  # type: ignore[valid-type]
    ) -> None:
        for part in T.serial(T.int64(parts), annotations={parallel.MARK: 1}):
            with T.sblock(FUNCTION):
                p = T.axis.spatial(T.int64(parts), part)
                T.reads(data[T.int64(0) : T.int64(outer), T.int64(0) : T.int64(length), T.int64(0) : T.int64(inner)])
                T.writes(result[T.int64(0) : T.int64(outer), T.int64(0) : T.int64(length), T.int64(0) : T.int64(inner)])
                total = T.sblock_alloc_buffer((T.int64(lanes),), kind, scope="local")
                for n in T.serial(T.int64(each)):
                    if p * T.int64(each) + n < T.int64(outer * across):
                        for lane in T.vectorized(T.int64(lanes)):
                            total[lane] = T.Cast(kind, 0)
                        for line in T.serial(T.int64(length)):
                            for lane in T.vectorized(T.int64(lanes)):
                                if is_exclusive:
                                    result[row(p * T.int64(each) + n), line, column(p * T.int64(each) + n, lane)] = (
                                        total[lane]
                                    )
                                total[lane] = (
                                    total[lane]
                                    + data[row(p * T.int64(each) + n), line, column(p * T.int64(each) + n, lane)]
                                )
                                if not is_exclusive:
                                    result[row(p * T.int64(each) + n), line, column(p * T.int64(each) + n, lane)] = (
                                        total[lane]
                                    )

    return function.with_attr("tirx.noalias", True)
