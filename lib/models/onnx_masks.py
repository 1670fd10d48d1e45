"""Values that are put where a mask says so, without the places of its ones, of which nobody knows how many there are.

torch's exporter writes `x[mask] = value` and `x.masked_scatter(mask, source)` as a `ScatterND` to what `NonZero` finds:
where a text has an image, say. The first is a `Where`; of the second, the place of an element of the source is how many
ones come before it. JAX's exporter leaves out updates of `x.at[places].add(updates)` beyond `x` so: these go to a row
after the last instead.
"""

import math
from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto

from lib.models import onnx_folding
from lib.models.onnx_graph import Graph, Made, Nodes, attributes

_SAME_ELEMENTS = ("Reshape", "Expand", "Identity", "Unsqueeze", "Squeeze", "Flatten")
_OF_ONE_AXIS = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")  # leave its elements in order
_OLDEST = 12  # operator set that has extrema of integers, sums of those before, and choices


def settle(proto: onnx.ModelProto) -> None:
    """Replace such nodes, in place; others stay, and with them the `NonZero`."""
    if not {"NonZero", "ScatterND"} <= {node.op_type for node in proto.graph.node}:
        return
    graph = Graph(proto)
    made_by = {name: node for node in proto.graph.node for name in node.output}
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        is_put = node.op_type == "ScatterND"
        nodes += (is_put and (_put(node, graph, made_by) or _put_rows(node, graph, made_by))) or [node]
    graph.put(proto, nodes)
    onnx_folding.drop_unread(proto.graph)


def _put(node: onnx.NodeProto, graph: Graph, made_by: Mapping[str, onnx.NodeProto]) -> Nodes:
    x, places, updates = node.input
    mask = _mask(places, made_by)
    shape, of_mask = graph.shape(x), graph.shape(mask or "")
    if mask is None or shape is None or of_mask is None:
        return None
    if attributes(node, reduction=b"none")["reduction"] != b"none" or graph.version < _OLDEST:
        return None
    made = Made(graph)
    if graph.elem_type(mask) != TensorProto.BOOL:
        mask = made.op("Cast", mask, to=TensorProto.BOOL)
    if (value := _one_value(updates, graph, made_by)) is not None:
        for axis in range(len(of_mask), len(shape)):
            mask = made.add(graph.unsqueezed(mask, axis))
    elif (source := _source(updates, graph, made_by)) is not None and len(of_mask) == len(shape):
        value = _in_order(made, mask, shape, source)
    if value is None:
        return None
    made.op("Where", mask, value, x)
    return graph.ending(node, made.nodes)


def _put_rows(node: onnx.NodeProto, graph: Graph, made_by: Mapping[str, onnx.NodeProto]) -> Nodes:
    """Rows of places and of updates that a mask chooses: all are put, the others after the last row, and cut off."""
    x, *chosen = node.input
    found = [_chosen_rows(name, graph, made_by) for name in chosen]
    if None in found or graph.version < _OLDEST:
        return None
    (places, mask), (updates, other) = found  # type: ignore[misc]
    shape, of_places = graph.shape(x), graph.shape(places)
    if mask != other or not shape or of_places is None or len(of_places) != 2:
        return None
    made = Made(graph)
    places = made.from_start(places, *shape[: of_places[1]])  # of the tensor as it is, without that row
    there = made.op("Where", made.unsqueezed(mask, 1), places, made.axes(shape[0], *[0] * (of_places[1] - 1)))
    longer = made.op("Concat", x, made.part(x, 0, 0, 1), axis=0)
    put = made.op("ScatterND", longer, there, updates, **attributes(node))
    made.part(put, 0, 0, shape[0])
    return graph.ending(node, made.nodes)


def _chosen_rows(name: str, graph: Graph, made_by: Mapping[str, onnx.NodeProto]) -> tuple[str, str] | None:
    """A tensor, and a mask of one axis that says which of its rows these are."""
    taken = made_by.get(name)
    if taken is None or taken.op_type != "Gather" or attributes(taken, axis=0)["axis"] != 0:
        return None
    maker = made_by.get(taken.input[1])
    while maker is not None and maker.op_type in _OF_ONE_AXIS:
        maker = made_by.get(maker.input[0])
    if maker is None or maker.op_type != "NonZero":
        return None
    mask = str(maker.input[0])
    is_one = len(graph.shape(mask) or ()) == 1 and graph.elem_type(mask) == TensorProto.BOOL
    return (str(taken.input[0]), mask) if is_one else None


def _in_order(made: Made, mask: str, shape: Sequence[int], source: str) -> str | None:
    """The next element of a source for each one of a mask of a shape, and any for its zeros."""
    of_source = made.graph.shape(source)
    if of_source is None:
        return None
    flat = made.axes(-1)
    ones = made.op("Cast", made.op("Reshape", mask, flat), to=TensorProto.INT64)
    before = made.op("Sub", made.op("CumSum", ones, made.integer(0)), made.integer(1))
    places = made.within(before, math.prod(of_source))
    taken = made.op("Gather", made.op("Reshape", source, flat), places, axis=0)
    return made.op("Reshape", taken, made.axes(*shape))


def _mask(places: str, made_by: Mapping[str, onnx.NodeProto]) -> str | None:
    """Of which tensor these are the places of its ones, one in each row."""
    turned = made_by.get(places)
    if turned is None or turned.op_type != "Transpose" or list(attributes(turned, perm=[1, 0])["perm"]) != [1, 0]:
        return None
    found = made_by.get(turned.input[0])
    return str(found.input[0]) if found is not None and found.op_type == "NonZero" else None


def _one_value(updates: str, graph: Graph, made_by: Mapping[str, onnx.NodeProto]) -> str | None:
    """A tensor of one element that all updates are, if they are."""
    while (shape := graph.shape(updates)) is None or math.prod(shape) != 1:
        maker = made_by.get(updates)
        if maker is None or maker.op_type not in _SAME_ELEMENTS:
            return None
        updates = str(maker.input[0])
    return updates


def _source(updates: str, graph: Graph, made_by: Mapping[str, onnx.NodeProto]) -> str | None:
    """A tensor whose first elements the updates are, as many as there are ones."""
    part = made_by.get(updates)
    if part is None or part.op_type != "Slice" or len(part.input) > 4:  # with steps
        return None
    begin = graph.value(part.input[1])
    if begin is None or begin.tolist() != [0]:
        return None
    flat = made_by.get(part.input[0])
    return str(flat.input[0]) if flat is not None and flat.op_type == "Reshape" else None
