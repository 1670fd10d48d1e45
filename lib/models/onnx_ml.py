"""Operators of classical machine learning (`ai.onnx.ml`) as those of ONNX, where they are arithmetic: linear models and
what stands before a network in a pipeline of scikit-learn. Trees, support vectors, strings and maps stay as they are;
what comes before these is compiled (`lib.models.onnx_rest`).

Source: `onnx.reference.ops.aionnxml`.
"""

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto

from lib.models.onnx_graph import Graph, Made, Nodes, attributes

DOMAIN = "ai.onnx.ml"


def put_in_place(proto: onnx.ModelProto) -> None:
    """Replace such operators, in place."""
    if not any(node.domain == DOMAIN for node in proto.graph.node):
        return
    graph, nodes = Graph(proto), list[onnx.NodeProto]()
    for node in proto.graph.node:
        rule = _RULES.get(node.op_type) if node.domain == DOMAIN else None
        nodes += (rule(node, graph) if rule else None) or [node]
    graph.put(proto, nodes)


def _scaler(node: onnx.NodeProto, graph: Graph) -> Nodes:
    made, given = Made(graph), attributes(node, offset=[0.0], scale=[1.0])
    moved = made.op("Sub", _floats(made, node.input[0]), _row(graph, given["offset"]))
    return made.ending(node, made.op("Mul", moved, _row(graph, given["scale"])))


def _features(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Columns; of a vector they are a matrix of one row."""
    made, (x, places) = Made(graph), node.input
    value = graph.value(x)
    if value is not None and value.ndim == 1:
        if value.dtype.kind not in "fiub":
            return None  # names of classes
        x = graph.constant(value[None])
    return made.ending(node, made.op("Gather", x, made.op("Reshape", places, made.axes(-1)), axis=-1))


def _joined(node: onnx.NodeProto, graph: Graph) -> Nodes:
    made = Made(graph)
    return made.ending(node, made.op("Concat", *(_floats(made, name) for name in node.input), axis=1))


def _binarizer(node: onnx.NodeProto, graph: Graph) -> Nodes:
    made = Made(graph)
    above = made.op("Greater", _floats(made, node.input[0]), made.number(attributes(node, threshold=0.0)["threshold"]))
    return made.ending(node, _floats(made, above))


def _imputer(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Of floats: a value for each column, or one for all, where one is missing."""
    given = attributes(node, imputed_value_floats=[], replaced_value_float=0.0)
    if not given["imputed_value_floats"]:
        return None
    made, x, missing = Made(graph), node.input[0], given["replaced_value_float"]
    is_missing = made.op("IsNaN", x) if np.isnan(missing) else made.op("Equal", x, made.number(missing))
    return made.ending(node, made.op("Where", is_missing, _row(graph, given["imputed_value_floats"]), x))


def _normalizer(node: onnx.NodeProto, graph: Graph) -> Nodes:
    made, kind = Made(graph), attributes(node, norm=b"MAX")["norm"]
    x = _floats(made, node.input[0])
    if kind == b"L2":
        norm = made.op("Sqrt", made.sum(made.op("Mul", x, x)))
    elif kind == b"L1":
        norm = made.sum(made.op("Abs", x))
    else:
        norm = made.largest(x)  # the magnitude, to `onnx.reference`; ONNX Runtime and ONNX's text say the largest
    is_zero = made.op("Equal", norm, made.number(0.0))
    return made.ending(node, made.op("Div", x, made.op("Where", is_zero, made.number(1.0), norm)))


def _regressor(node: onnx.NodeProto, graph: Graph) -> Nodes:
    given = attributes(node, coefficients=[], intercepts=[], targets=1, post_transform=b"NONE")
    if given["post_transform"] != b"NONE":
        return None
    made = Made(graph)
    return made.ending(node, _linear(made, node.input[0], given["coefficients"], given["intercepts"], given["targets"]))


def _classifier(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """The class, a number, and a score for each. One row for two classes stays: ONNX Runtime takes its score for a
    probability, ONNX does not."""
    given = attributes(node, coefficients=[], intercepts=[], classlabels_ints=[], post_transform=b"NONE")
    labels, after = given["classlabels_ints"], given["post_transform"]
    rows = len(given["intercepts"])
    if not labels or rows != len(labels) or after not in (b"NONE", b"LOGISTIC", b"SOFTMAX"):
        return None
    made = Made(graph)
    scores = _linear(made, node.input[0], given["coefficients"], given["intercepts"], rows)
    if after != b"NONE":
        scores = made.op("Sigmoid", scores) if after == b"LOGISTIC" else made.op("Softmax", scores, axis=1)
    best = made.op("ArgMax", scores, axis=1, keepdims=0)
    made.rename(made.op("Gather", graph.constant(np.array(labels, np.int64)), best), node.output[0])
    return made.ending(node, scores, 1)


def _linear(made: Made, x: str, coefficients: list[float], intercepts: list[float], targets: int) -> str:
    matrix = np.array(coefficients, np.float32).reshape(targets, -1).T
    product = made.op("MatMul", _floats(made, x), made.graph.constant(matrix))
    return made.op("Add", product, _row(made.graph, intercepts)) if intercepts else product


def _floats(made: Made, name: str) -> str:
    return made.op("Cast", name, to=TensorProto.FLOAT)


def _row(graph: Graph, values: list[float]) -> str:
    """One for each column, or one for all."""
    return graph.constant(np.array(values, np.float32))


_RULES: dict[str, Callable[[onnx.NodeProto, Graph], Nodes]] = {
    "Scaler": _scaler,
    "ArrayFeatureExtractor": _features,
    "FeatureVectorizer": _joined,
    "Binarizer": _binarizer,
    "Imputer": _imputer,
    "Normalizer": _normalizer,
    "LinearRegressor": _regressor,
    "LinearClassifier": _classifier,
}
