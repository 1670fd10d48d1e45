"""ResNet-18 for images of 32 x 32: all its kinds of subgraphs, at a fiftieth of the work."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

STAGES = ((16, 1), (32, 2), (64, 2), (128, 2))  # channels, a quarter of the original's; stride of the first block


class _Graph:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(0)

    def add(self, operator: str, *inputs: str, **attributes: object) -> str:
        name = f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def weight(self, *shape: int) -> str:
        values = self._rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def convolution(self, x: str, channels: tuple[int, int], kernel: int, stride: int) -> str:
        weight, bias = self.weight(channels[1], channels[0], kernel, kernel), self.weight(channels[1])
        return self.add("Conv", x, weight, bias, pads=[kernel // 2] * 4, strides=[stride] * 2)

    def block(self, x: str, channels: tuple[int, int], stride: int) -> str:
        y = self.add("Relu", self.convolution(x, channels, 3, stride))
        y = self.convolution(y, (channels[1], channels[1]), 3, 1)
        if channels[0] != channels[1]:
            x = self.convolution(x, channels, 1, stride)
        return self.add("Relu", self.add("Add", y, x))


def small_resnet18(path: Path) -> Path:
    """Write it as an ONNX file with random weights."""
    graph = _Graph()
    x = graph.add("Relu", graph.convolution("x", (3, 16), 7, 2))
    x = graph.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    before = 16
    for channels, stride in STAGES:
        x = graph.block(x, (before, channels), stride)
        x = graph.block(x, (channels, channels), 1)
        before = channels
    x = graph.add("Flatten", graph.add("GlobalAveragePool", x))
    x = graph.add("Gemm", x, graph.weight(before, 100), graph.weight(100))
    made = helper.make_graph(
        graph.nodes, "resnet18", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 32, 32])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, 100])], graph.weights,
    )  # fmt: skip
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
