"""Deformable convolutions (Dai et al., ICCV 2017; with a mask: Zhu et al., CVPR 2019), which TVM's importer lacks: the
pixels that each tap reads, between others, then a product with the weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from lib.models.onnx_graph import Graph, Made, Nodes, attributes


def deform_conv(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Samples of all taps side by side in one image, as `GridSample` takes them; beyond the image are zeros."""
    x, weight, offset, bias, mask = (*node.input, "", "")[:5]
    shapes = [graph.shape(name) for name in (x, weight, offset)]
    if any(shape is None or len(shape) != 4 for shape in shapes):
        return None
    (batch, channels, *image), (out_channels, _, *kernel), (_, _, *out) = shapes  # type: ignore[misc]
    given = attributes(node, dilations=[1, 1], strides=[1, 1], pads=[0] * 4, group=1, offset_group=1)
    apart, groups, taps, pixels = batch * given["offset_group"], given["group"], kernel[0] * kernel[1], out[0] * out[1]
    made = Made(graph)
    moved = made.op("Reshape", offset, made.axes(apart, taps, 2, *out))
    places = [made.unsqueezed(_places(made, moved, (apart, *out), axis, image, kernel, given), 4) for axis in (1, 0)]
    grid = made.op("Reshape", made.op("Concat", *places, axis=4), made.axes(apart, taps * out[0], out[1], 2))
    samples = made.op(
        "GridSample", made.op("Reshape", x, made.axes(apart, -1, *image)), grid,
        mode="linear" if graph.version >= 20 else "bilinear", padding_mode="zeros", align_corners=0,
    )  # fmt: skip
    if mask:
        samples = made.op("Reshape", samples, made.axes(apart, -1, taps, pixels))
        samples = made.op("Mul", samples, made.op("Reshape", mask, made.axes(apart, 1, taps, pixels)))
    columns = made.op("Reshape", samples, made.axes(batch, groups, channels // groups * taps, pixels))
    rows = made.op("Reshape", weight, made.axes(1, groups, out_channels // groups, channels // groups * taps))
    found = made.op("Reshape", made.op("MatMul", rows, columns), made.axes(batch, out_channels, *out))
    if bias:
        made.op("Add", found, made.op("Reshape", bias, made.axes(1, out_channels, 1, 1)))
    return graph.ending(node, made.nodes)


def _places(
    made: Made, moved: str, shape: Sequence[int], axis: int, image: Sequence[int], kernel: Sequence[int],
    given: Mapping[str, Any],
) -> str:  # fmt: skip
    """Where along an axis the taps read, of a shape (images, lines, columns): from -1 to 1, the edges of the image."""
    images, *out = shape
    n_taps, extent, kind = kernel[0] * kernel[1], image[axis], np.float32
    taps = np.unravel_index(np.arange(n_taps), kernel)[axis] * given["dilations"][axis]
    first = np.arange(out[axis]) * given["strides"][axis] - given["pads"][axis]
    still = (taps[:, None] + first).reshape(1, n_taps, *(n if a == axis else 1 for a, n in enumerate(out)))
    by = made.op("Reshape", made.part(moved, 2, axis, axis + 1), made.axes(images, n_taps, *out))
    to_edges = made.op("Mul", by, made.graph.constant(np.array(2 / extent, kind)))
    return made.op("Add", to_edges, made.graph.constant(((2 * still + 1) / extent - 1).astype(kind)))
