"""ONNX's Resize and Col2Im along one axis: each output is a weighted sum of a few inputs, at places known beforehand.

Follows the operator's specification (Resize-19: coordinate transformations, nearest modes, cubic coefficients, the
stretched kernels of `antialias`, `exclude_outside`), where TVM's importer follows parts of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from lib.models.onnx_graph import Graph, attributes


@dataclass(frozen=True, slots=True)
class Resize:
    """The attributes that decide the weights."""

    mode: str = "nearest"  # or "linear", "cubic"
    coordinates: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic_a: float = -0.75
    antialias: bool = False
    exclude_outside: bool = False
    outside: float = 0.0  # the value of what `tf_crop_and_resize` finds outside


@dataclass(frozen=True, slots=True)
class Taps:
    """Output n is the sum over k of `weights[k, n] * input[indices[k, n]]`, plus `constant[n]`."""

    indices: np.ndarray  # [taps, outputs], int64
    weights: np.ndarray  # [taps, outputs], float64
    constant: np.ndarray  # [outputs], float64


def windows(extent: int, count: int, size: int, stride: int, dilation: int, before: int) -> Taps:
    """Of an axis of some extent, where windows overlap (Col2Im): what they have for a pixel is added. For each tap, the
    input has those of all windows.

    Args:
        count: Windows; `size`: taps of one, so far apart as `dilation` says.
        before: Pixels of the first window that lie before the first one.
    """
    steps, rest = np.divmod(np.arange(extent) + before - dilation * np.arange(size)[:, None], stride)
    is_there = (rest == 0) & (steps >= 0) & (steps < count)
    indices = np.where(is_there, steps + count * np.arange(size)[:, None], 0)
    return Taps(indices, is_there.astype(np.float64), np.zeros(extent))


def taps(n: int, n_out: int, scale: float, resize: Resize, roi: tuple[float, float] = (0.0, 1.0)) -> Taps:
    """Of an axis.

    Args:
        n: Its extent; `n_out`: the extent that comes out.
        scale: `n_out` over `n`, or what the file says of it, which may be a fraction more.
        roi: Begin and end of the part that `tf_crop_and_resize` enlarges, as shares of the axis.
    """
    places = [_place(x, n, n_out, scale, resize.coordinates, roi) for x in range(n_out)]
    rows = [_row(place, scale, resize) for place in places]
    width = max(len(row) for row in rows)
    indices, weights = np.zeros((width, n_out), np.int64), np.zeros((width, n_out))
    constant = np.zeros(n_out)
    for x, (place, row) in enumerate(zip(places, rows, strict=True)):
        if resize.coordinates == "tf_crop_and_resize" and not 0 <= place <= n - 1:
            constant[x] = resize.outside
            continue
        if resize.exclude_outside:
            inside = {at: weight for at, weight in row.items() if 0 <= at < n}
            total = sum(inside.values())
            row = {at: weight / total for at, weight in inside.items()}
        for k, (at, weight) in enumerate(sorted(row.items())):
            indices[k, x], weights[k, x] = min(max(at, 0), n - 1), weight  # beyond the edge is the edge
    return Taps(indices, weights, constant)


def _place(x: int, n: int, n_out: int, scale: float, coordinates: str, roi: tuple[float, float]) -> float:
    """Where an output lies among the inputs."""
    length = scale * n  # of the outputs, before it was rounded
    if coordinates == "align_corners":
        return 0.0 if length == 1 else x * (n - 1) / (length - 1)
    if coordinates == "asymmetric":
        return x / scale
    if coordinates == "tf_crop_and_resize":
        begin, end = roi
        if length == 1:
            return (end - begin) * (n - 1) / 2
        return begin * (n - 1) + x * (end - begin) * (n - 1) / (length - 1)
    if coordinates == "pytorch_half_pixel" and length == 1:
        return -0.5
    place = (x + 0.5) / scale - 0.5
    if coordinates == "half_pixel_symmetric":
        place += n / 2 * (1 - n_out / length)
    return place


def _row(place: float, scale: float, resize: Resize) -> dict[int, float]:
    """Weights by index; indices may lie outside."""
    if resize.mode == "nearest":
        return {_nearest(place, resize.nearest): 1.0}
    stretch = min(scale, 1.0) if resize.antialias else 1.0
    reach = (1 if resize.mode == "linear" else 2) / stretch
    kernel: Callable[[float], float] = _linear if resize.mode == "linear" else lambda d: _cubic(d, resize.cubic_a)
    around = range(math.floor(place - reach) + 1, math.ceil(place + reach))
    found = {at: kernel((at - place) * stretch) for at in around}
    total = sum(found.values())
    return {at: weight / total for at, weight in found.items() if weight}


def _nearest(place: float, how: str) -> int:
    if how == "floor":
        return math.floor(place)
    if how == "ceil":
        return math.ceil(place)
    if how == "round_prefer_ceil":
        return math.floor(place + 0.5)
    return math.ceil(place - 0.5)


def _linear(distance: float) -> float:
    return max(0.0, 1.0 - abs(distance))


def _cubic(distance: float, a: float) -> float:
    """Keys' kernel."""
    d = abs(distance)
    if d <= 1:
        return ((a + 2) * d - (a + 3)) * d * d + 1
    return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a if d < 2 else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How a whole node is computed."""

    axes: list[tuple[int, Taps]]
    dtype_between: np.dtype[Any]  # integers are weighted as floats


def of_today(node: onnx.NodeProto, graph: Graph) -> onnx.NodeProto | None:
    """An Upsample (its scales are an attribute before version 9), or a Resize of version 10, as a Resize of later
    versions, which say where pixels are taken from. None if it is one."""
    if node.op_type == "Resize" and graph.version >= 11:
        return None
    given = attributes(node, mode=b"nearest", scales=None)
    scales = node.input[1] if len(node.input) > 1 else graph.constant(np.array(given["scales"], np.float32))
    return graph.node(
        "Resize", node.input[0], "", scales, mode=given["mode"],
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip


def plan(node: onnx.NodeProto, graph: Graph) -> Plan | None:
    """Of a Resize (version 11 on) whose sizes are constant; None if they are not, or TVM's own computes the same."""
    shape = graph.shape(node.input[0])
    assert shape is not None
    given = attributes(
        node, mode=b"nearest", coordinate_transformation_mode=b"half_pixel", nearest_mode=b"round_prefer_floor",
        cubic_coeff_a=-0.75, antialias=0, exclude_outside=0, extrapolation_value=0.0, axes=None,
        keep_aspect_ratio_policy=b"stretch",
    )  # fmt: skip
    roi, scales, sizes = _inputs(node, graph)
    if scales is None and sizes is None:
        return None
    axes = [axis % len(shape) for axis in given["axes"] or range(len(shape))]
    coordinates = given["coordinate_transformation_mode"].decode()
    resize = Resize(
        given["mode"].decode(), coordinates, given["nearest_mode"].decode(), given["cubic_coeff_a"],
        bool(given["antialias"]), bool(given["exclude_outside"]), given["extrapolation_value"],
    )  # fmt: skip
    extents = [shape[axis] for axis in axes]
    outs, factors = _extents(extents, scales, sizes, given["keep_aspect_ratio_policy"].decode())
    if _is_plain(resize, given, shape, factors, outs):
        return None
    parts = [(0.0, 1.0)] * len(axes)
    if coordinates == "tf_crop_and_resize" and roi is not None and roi.size == 2 * len(axes):
        parts = list(zip(roi[: len(axes)].tolist(), roi[len(axes) :].tolist(), strict=True))
    changed = [
        (axis, taps(n, out, factor, resize, part))
        for axis, n, out, factor, part in zip(axes, extents, outs, factors, parts, strict=True)
        if out != n or factor != 1 or coordinates == "tf_crop_and_resize"
    ]
    dtype = graph.dtype(node.input[0])
    between = dtype if resize.mode == "nearest" or dtype.kind == "f" else np.dtype(np.float32)
    return Plan(changed, between)


def _inputs(node: onnx.NodeProto, graph: Graph) -> tuple[np.ndarray | None, ...]:
    """Region, scales and sizes; empty ones count as missing."""
    names = [*node.input[1:], "", "", ""][:3]
    found = [graph.value(name) if name else None for name in names]
    return tuple(value if value is not None and value.size else None for value in found)


def _extents(
    extents: list[int], scales: np.ndarray | None, sizes: np.ndarray | None, policy: str
) -> tuple[list[int], list[float]]:
    """What comes out of each axis, and its scale."""
    if sizes is None:
        assert scales is not None
        factors = [float(scale) for scale in scales]
        return [math.floor(n * scale) for n, scale in zip(extents, factors, strict=True)], factors
    outs = [int(size) for size in sizes]
    factors = [out / n for n, out in zip(extents, outs, strict=True)]
    if policy != "stretch":
        scale = min(factors) if policy == "not_larger" else max(factors)
        outs, factors = [math.floor(n * scale + 0.5) for n in extents], [scale] * len(outs)
    return outs, factors


def _is_plain(
    resize: Resize, given: dict[str, Any], shape: tuple[int, ...], factors: list[float], outs: list[int]
) -> bool:
    """Whether TVM's importer, which knows images with whole extents, gets it right."""
    usual = given["axes"] is None and given["keep_aspect_ratio_policy"] == b"stretch" and not resize.antialias
    exact = all(n * factor == out for n, factor, out in zip(shape, factors, outs, strict=False))
    images = len(shape) == 4 and factors[:2] == [1, 1]
    modes = resize.mode != "cubic" and resize.coordinates in ("half_pixel", "asymmetric", "align_corners")
    return usual and exact and images and modes and not resize.exclude_outside
