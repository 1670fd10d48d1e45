"""Parts of a tensor that begin where values say, and are of an extent that is known: JAX's `dynamic_slice`, a window of
a cache.

ONNX has a `Slice` for them, whose end is its beginning and a constant; TVM imports slices with constant bounds alone.
They are gathered: from the beginning on, which is kept within the tensor, as JAX does.
"""

from collections.abc import Mapping

import numpy as np
import onnx

from lib.models import onnx_folding
from lib.models.onnx_graph import Graph, Made, Nodes


def settle(proto: onnx.ModelProto) -> None:
    """Replace such nodes, in place; others stay."""
    if not any(node.op_type == "Slice" and len(node.input) > 2 for node in proto.graph.node):
        return
    graph = Graph(proto)
    made_by = {name: node for node in proto.graph.node for name in node.output}
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        nodes += (_gathered(node, graph, made_by) if node.op_type == "Slice" else None) or [node]
    graph.put(proto, nodes)
    onnx_folding.drop_unread(proto.graph)


def _gathered(node: onnx.NodeProto, graph: Graph, made_by: Mapping[str, onnx.NodeProto]) -> Nodes:
    x, begin, end, axes, steps = (*node.input, "", "")[:5]
    shape, sizes = graph.shape(x), _sizes(begin, made_by.get(end), graph)
    if shape is None or sizes is None or (steps and not np.all(graph.value(steps) == 1)):
        return None
    along = graph.value(axes) if axes else np.arange(len(sizes))
    if along is None or any(size < 1 or size > shape[axis] for axis, size in zip(along, sizes, strict=True)):
        return None
    made = Made(graph)
    for n, (axis, size) in enumerate(zip(along.tolist(), sizes.tolist(), strict=True)):
        first = made.op("Cast", made.part(begin, 0, n, n + 1), to=onnx.TensorProto.INT64)
        first = made.within(made.from_start(first, shape[axis]), shape[axis] - size + 1)
        x = made.op("Gather", x, made.op("Add", first, made.axes(*range(size))), axis=axis)
    return made.ending(node, x)


def _sizes(begin: str, end: onnx.NodeProto | None, graph: Graph) -> np.ndarray | None:
    """How much comes after each beginning, if that is known and the beginnings are not."""
    if graph.value(begin) is not None or end is None or end.op_type != "Add" or begin not in end.input:
        return None
    [more] = [name for name in end.input if name != begin] or [begin]
    return graph.value(more)
