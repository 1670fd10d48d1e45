"""The light ONNX models that the `onnx` package ships, with random weights.

As shipped their weights are constants (`ConstantOfShape`), every output is the same number, and a wrong graph passes
any comparison. Here each gets seeded random weights of a size that keeps activations alive, and the last softmax goes,
so that logits are compared.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = sorted(path.stem.removeprefix("light_") for path in FOLDER.glob("light_*.onnx"))


def with_random_weights(name: str, seed: int = 0) -> onnx.ModelProto:
    """A light model whose constant weights are drawn anew, equal for equal seeds."""
    proto = onnx.load(FOLDER / f"light_{name}.onnx")
    graph, rng = proto.graph, np.random.default_rng(seed)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    roles = _roles(graph)
    filled = [node for node in graph.node if node.op_type == "ConstantOfShape"]
    kept = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    weights = [
        numpy_helper.from_array(_draw(roles.get(node.output[0], ""), shapes[node.input[0]], rng), node.output[0])
        for node in filled
    ]
    if kept[-1].op_type == "Softmax":
        graph.output[0].name = kept.pop().input[0]
    read = {value for node in kept for value in node.input}
    weights += [tensor for tensor in graph.initializer if tensor.name in read]
    names = {tensor.name for tensor in weights}
    inputs = [value for value in graph.input if value.name in read and value.name not in names]
    for field, values in ((graph.node, kept), (graph.initializer, weights), (graph.input, inputs)):
        del field[:]
        field.extend(values)
    proto.ir_version = 8
    return proto


def calibrated(proto: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The model with the means and variances of its batch norms as they are for these inputs, not as drawn.

    As drawn, the norms do not normalise: over many layers activations grow to millions, or the biases drown them.
    """
    seen: dict[str, np.ndarray] = {}

    class BatchNormalization(OpRun):  # in place of onnx's own; its name says of which operator
        def _run(
            self, x: np.ndarray, scale: np.ndarray, shift: np.ndarray, *_: np.ndarray, epsilon: float, **_options: Any
        ) -> tuple[np.ndarray]:
            node = self.onnx_node
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
            seen[node.input[3]], seen[node.input[4]] = mean, variance
            slope = scale / np.sqrt(variance + epsilon)
            return (x * slope[:, None, None] + (shift - mean * slope)[:, None, None],)

    if all(node.op_type != "BatchNormalization" for node in proto.graph.node):
        return proto
    ReferenceEvaluator(proto, new_ops=[BatchNormalization]).run(None, inputs)
    for tensor in proto.graph.initializer:
        if tensor.name in seen:
            tensor.CopyFrom(numpy_helper.from_array(seen[tensor.name], tensor.name))
    return proto


def save_all(folder: Path) -> list[Path]:
    """Write all of them to a folder, those that are not there yet; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.onnx" for name in NAMES]
    for name, path in zip(NAMES, paths, strict=True):
        if not path.exists():
            onnx.save(with_random_weights(name), path)
    return paths


def _roles(graph: onnx.GraphProto) -> dict[str, str]:
    """What a value is to the operator that reads it."""
    roles: dict[str, str] = {}
    unsqueezed = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Unsqueeze"}
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            roles.update(zip(node.input[1:], ("scale", "shift", "mean", "variance"), strict=True))
        elif node.op_type in ("Conv", "Gemm"):
            roles.setdefault(node.input[1], "kernel")
        elif node.op_type == "Mul":  # the scale of a norm of Caffe, which comes after the norm's own
            roles[unsqueezed.get(node.input[1], node.input[1])] = "scale"
    return roles


def _draw(role: str, shape: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if role == "kernel":
        values = rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
    elif role in ("scale", "variance"):
        values = rng.uniform(0.5, 1.5, size=shape)
    else:
        values = rng.normal(size=shape) * 0.1
    return np.asarray(values, np.float32)
