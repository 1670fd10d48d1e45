"""Arithmetic on shapes and constants, done once in an ONNX graph before it is imported.

Exporters write the shapes of reshapes, masks and paddings as graphs of `Shape`, `Gather`, `Concat` and the like;
TVM's importer keeps them, or refuses the file ("Dynamic pads are not supported"). With static input shapes all
of them are constants. Operators are evaluated by `onnx.reference`, ONNX's own definition in NumPy.
"""

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

_LARGE = 1 << 16  # elements; larger weights take no part in shape inference, which copies the whole file
_NEVER = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial",
          "If", "Loop", "Scan", "DequantizeLinear", "QuantizeLinear"}  # fmt: skip


def fold(proto: onnx.ModelProto) -> None:
    """Replace every operator by its value that depends on no input, or only on the shape of one; in place.

    Operators that `onnx.reference` cannot evaluate stay. Ends when a pass finds nothing more.
    """
    while _fold_once(proto):
        pass
    drop_unread(proto.graph)


def _fold_once(proto: onnx.ModelProto) -> bool:
    graph = proto.graph
    shapes = _static_shapes(proto)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    values: dict[str, np.ndarray] = {}
    outputs = {output.name for output in graph.output}
    kept, folded = [], False
    for node in graph.node:
        found = None if outputs & set(node.output) else _evaluate(node, proto, shapes, tensors, values)
        if found is None:
            kept.append(node)
            continue
        folded = True
        values.update(found)
    if folded:
        del graph.node[:]
        graph.node.extend(kept)
        graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
        drop_unread(graph)
    return folded


def _evaluate(
    node: onnx.NodeProto,
    proto: onnx.ModelProto,
    shapes: dict[str, tuple[int, ...]],
    tensors: dict[str, onnx.TensorProto],
    values: dict[str, np.ndarray],
) -> dict[str, np.ndarray] | None:
    """The outputs of a node by name, or None if they depend on an input's values."""
    if node.domain not in ("", "ai.onnx") or node.op_type in _NEVER:
        return None
    if node.op_type == "Shape" and node.input[0] in shapes:
        bounds = {attribute.name: attribute.i for attribute in node.attribute}
        dims = shapes[node.input[0]][bounds.get("start") : bounds.get("end")]
        return {node.output[0]: np.array(dims, np.int64)}
    if node.op_type == "Size" and node.input[0] in shapes:
        return {node.output[0]: np.array(np.prod(shapes[node.input[0]], dtype=np.int64))}
    names = [name for name in node.input if name]
    if not all(name in values or name in tensors for name in names):
        return None  # before any is copied: a large table whose rows an input chooses stays where it is
    arguments = {name: values[name] if name in values else numpy_helper.to_array(tensors[name]) for name in names}
    return evaluate(node, arguments, {opset.domain: opset.version for opset in proto.opset_import})


def evaluate(
    node: onnx.NodeProto, arguments: dict[str, np.ndarray], opsets: dict[str, int]
) -> dict[str, np.ndarray] | None:  # fmt: skip
    """The outputs of a node of ONNX's own by name, from the values of its inputs; None if `onnx.reference` finds none.

    Args:
        opsets: Versions by domain.
    """
    if node.op_type == "Unsqueeze" and node.attribute:  # axes, of before ONNX 13: `onnx.reference` 1.23 fails on them
        return {node.output[0]: np.expand_dims(arguments[node.input[0]], tuple(node.attribute[0].ints))}
    try:
        evaluator = ReferenceEvaluator(node, opsets=opsets)
        with np.errstate(all="ignore"):  # infinities and the like are results as others
            results = evaluator.run(None, arguments)
    except Exception:  # whatever one of the many operators meets; the importer may still know it
        return None
    if any(isinstance(result, (list, dict)) or result is None for result in results):
        return None  # sequences are no weights
    return {name: np.asarray(result) for name, result in zip(node.output, results, strict=False) if name}


def version(proto: onnx.ModelProto) -> int:
    """Of ONNX's own operators, that a model uses."""
    return next((opset.version for opset in proto.opset_import if opset.domain in ("", "ai.onnx")), 1)


def _static_shapes(proto: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in static_types(proto).items()}


def static_types(proto: onnx.ModelProto) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Element type and shape of all tensors whose shape is static, as far as ONNX infers them."""
    light = onnx.ModelProto()
    light.CopyFrom(without_large_weights(proto))
    try:
        inferred = onnx.shape_inference.infer_shapes(light, data_prop=True)
    except onnx.shape_inference.InferenceError:
        inferred = light
    graph = inferred.graph
    found = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        dims = [int(dim.dim_value) for dim in tensor.shape.dim]
        if tensor.HasField("shape") and all(dim > 0 for dim in dims):
            found[value.name] = (tensor.elem_type, tuple(dims))
    return found


def without_large_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with large weights as inputs of their shape: nothing above 2 GB can be handed over."""
    light = onnx.ModelProto(ir_version=max(proto.ir_version, 4), opset_import=proto.opset_import)
    graph = light.graph
    graph.name = proto.graph.name
    graph.node.extend(proto.graph.node)
    graph.input.extend(proto.graph.input)
    graph.output.extend(proto.graph.output)
    graph.value_info.extend(proto.graph.value_info)
    for tensor in proto.graph.initializer:
        if np.prod(tensor.dims, dtype=np.int64) > _LARGE:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        else:
            graph.initializer.append(tensor)
    return light


def drop_unread(graph: onnx.GraphProto) -> None:
    """Remove nodes whose outputs nobody reads, and then such weights."""
    read = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if read & set(node.output):
            kept.append(node)
            read.update(node.input)
            read.update(read_inside(node))
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(reversed(kept))
    for n in reversed(range(len(graph.initializer))):  # one by one: to put the others back would copy them
        if graph.initializer[n].name not in read:
            del graph.initializer[n]


def read_inside(node: onnx.NodeProto) -> set[str]:
    """Names that the bodies of an `If` or a `Loop` read from around them."""
    names: set[str] = set()
    for body in bodies(node):
        for inner in body.node:
            names.update(inner.input)
            names.update(read_inside(inner))
    return names


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs within an operator, as an `If` or a `Loop` has them."""
    having = [each for each in node.attribute if each.HasField("g") or each.graphs]
    return [graph for each in having for graph in ([each.g] if each.HasField("g") else []) + list(each.graphs)]
