"""Running sums along an axis: of gates of a state space, of positions, of masks.

Each sum is in the order of the elements. Where another axis follows, vectors of it are summed; else some rows go side
by side, as each is a chain of additions that wait for one another. TVM's own program goes along one row after the
other, element by element.
"""

from functools import cache

from tvm import tirx
from tvm.script import tirx as T

from lib.tir import parallel

FUNCTION = "running_sum"  # name of the functions and of their blocks
_LANES, _ROWS = 16, 8


@cache
def of_lines(outer: int, length: int, inner: int, kind: str, is_exclusive: bool, parts: int) -> tirx.PrimFunc:
    """A function of data (outer, length, inner) to its sums along the second axis, in the same shape.

    Args:
        kind: Element type of both.
        is_exclusive: Sums are of what comes before an element, without it.
        parts: That the lines are cut into, as many as there are threads.
    """
    width = _widest(inner, _LANES) if inner > 1 else _widest(outer, _ROWS)
    across, down = (inner // width, 1) if inner > 1 else (1, width)  # units along the last axis; rows in a unit
    units, loop = outer * inner // width, T.vectorized if inner > 1 else T.unroll
    each = -(-units // parts)

    def row(unit: tirx.Expr, lane: tirx.Expr) -> tirx.Expr:
        return unit * down + lane if down > 1 else unit // across

    def column(unit: tirx.Expr, lane: tirx.Expr) -> tirx.Expr:
        return unit % across * width + lane if inner > 1 else T.int64(0)

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
                total = T.sblock_alloc_buffer((T.int64(width),), kind, scope="local")
                for unit in T.serial(T.int64(each)):
                    if p * T.int64(each) + unit < T.int64(units):
                        for lane in loop(T.int64(width)):
                            total[lane] = T.Cast(kind, 0)
                        for n in T.serial(T.int64(length)):
                            for lane in loop(T.int64(width)):
                                if is_exclusive:
                                    result[
                                        row(p * T.int64(each) + unit, lane), n, column(p * T.int64(each) + unit, lane)
                                    ] = total[lane]
                                total[lane] = (
                                    total[lane]
                                    + data[
                                        row(p * T.int64(each) + unit, lane), n, column(p * T.int64(each) + unit, lane)
                                    ]
                                )
                                if not is_exclusive:
                                    result[
                                        row(p * T.int64(each) + unit, lane), n, column(p * T.int64(each) + unit, lane)
                                    ] = total[lane]

    return function.with_attr("tirx.noalias", True)


def _widest(extent: int, most: int) -> int:
    return next(n for n in range(most, 0, -1) if extent % n == 0)
