"""Minimal filtering F(m, r): m results of a filter of r taps from m + r - 1 multiplications, where m r are usual.

Results and taps are coefficients of polynomials, which are multiplied at m + r - 1 points, one of which is infinity,
and interpolated; transposed, that is A^T [(G g) * (B^T d)] for the taps g and the m + r - 1 data d that they see.
Points are small, so that the entries of the matrices are, and sums of data lose few digits.
Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016), section 3, whose matrices these
are but for signs, after Winograd, "Arithmetic Complexity of Computations" (SIAM 1980).
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.polynomial import polynomial
from tvm import te, tirx

_POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 4.0)  # beside infinity
_WIDE = "float32"


@dataclass(frozen=True, slots=True)
class Transforms:
    """The matrices of F(m, r)."""

    tile: int  # m: results
    taps: int  # r
    data: np.ndarray  # B^T, (m + r - 1) x (m + r - 1)
    kernel: np.ndarray  # G, (m + r - 1) x r
    result: np.ndarray  # A^T, m x (m + r - 1)

    @property
    def window(self) -> int:
        """Data that a tile sees, and multiplications that it takes."""
        return self.tile + self.taps - 1


@cache
def minimal(tile: int, taps: int) -> Transforms:
    """F(tile, taps), in double precision.

    Raises:
        ValueError: There are not as many points.
    """
    n_points = tile + taps - 2
    if not 0 < n_points <= len(_POINTS):
        raise ValueError(f"F(m, r) is for 0 < m + r - 2 <= {len(_POINTS)}, but got m = {tile} and r = {taps}.")
    points = _POINTS[:n_points]
    data, kernel = np.zeros((n_points + 1, n_points + 1)), np.zeros((n_points + 1, taps))
    result = np.zeros((tile, n_points + 1))
    for n, point in enumerate(points):
        others = [other for other in points if other != point]
        scale = np.prod([point - other for other in others])
        data[n, :-1] = np.sign(scale) * polynomial.polyfromroots(others)
        kernel[n] = point ** np.arange(taps) / abs(scale)
        result[:, n] = point ** np.arange(tile)
    data[-1], kernel[-1, -1], result[-1, -1] = polynomial.polyfromroots(points), 1, 1
    return Transforms(tile, taps, data, kernel, result)


@cache
def integral(tile: int, taps: int) -> tuple[Transforms, int]:
    """F(tile, taps) in integers, and a number: results are that many times as large along each axis. For small tiles,
    whose points are integers."""
    found = minimal(tile, taps)
    scales = np.append(np.rint(1 / found.kernel[:-1, 0]), 1).astype(int)  # of the rows: their denominators
    factor = math.lcm(*map(int, scales))
    return replace(found, kernel=found.kernel * scales[:, None], result=found.result * (factor // scales)), factor


def entry(matrix: np.ndarray, row: tirx.Expr, column: tirx.Expr, kind: str = _WIDE) -> tirx.Expr:
    """An entry of a constant matrix, of an element type: a literal, once the loops are unrolled."""
    value: tirx.Expr = tirx.const(0, kind)
    for (i, j), number in np.ndenumerate(matrix):
        if number:
            here = tirx.all(tirx.EQ(row, i), tirx.EQ(column, j))
            value = tirx.Select(here, tirx.const(number if "float" in kind else int(number), kind), value)
    return value


def wide(element: tirx.Expr, kind: str = _WIDE) -> tirx.Expr:
    """An element as one of a wider type."""
    return element if element.ty.dtype == kind else element.astype(kind)


def rounded(transformed: te.Tensor, kind: str) -> te.Tensor:
    """Transformed data in the element type that products read: rounded once, not by each of these."""
    if kind == _WIDE:
        return transformed
    apart = {"meta_schedule.inline_rule": "disable"}  # were it inlined, each product would round anew what it reads
    return te.compute(
        transformed.shape, lambda *at: transformed(*at).astype(kind), name="data_rounded", attrs=apart
    )  # fmt: skip
