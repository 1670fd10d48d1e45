"""The bytes between the layers of a quantised network, beside those of ONNX Runtime."""

import numpy as np
import onnx
import pytest
import quanta
from onnx import TensorProto, helper, numpy_helper

from lib.models import onnx_quantization

SHAPE = (1, 8, 16, 16)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Convolutions, one of them depthwise, a residual sum, a pooling, a dense layer: quantised by ONNX Runtime."""
    folder, rng = tmp_path_factory.mktemp("net"), np.random.default_rng(0)
    weights = {"a": (16, 8, 3, 3), "d": (16, 1, 3, 3), "p": (16, 16, 1, 1), "w": (256, 10), "b": (10,)}
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Conv", ["r", "d"], ["e"], pads=[1, 1, 1, 1], group=16),
        helper.make_node("Conv", ["e", "p"], ["f"]), helper.make_node("Add", ["f", "r"], ["s"]),
        helper.make_node("MaxPool", ["s"], ["m"], kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node("Flatten", ["m"], ["g"]), helper.make_node("Gemm", ["g", "w", "b"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])],
        [numpy_helper.from_array((0.2 * rng.normal(size=s)).astype(np.float32), n) for n, s in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "net.onnx")
    np.savez(folder / "samples.npz", x=rng.normal(size=(3, *SHAPE)).astype(np.float32))
    return onnx_quantization.quantized(folder / "net.onnx", folder / "samples.npz", folder / "out")


def test_nearly_all_bytes_of_each_layer_are_onnx_runtimes_or_their_neighbours(network):
    rows = quanta.compared(network)

    assert len(rows) >= 6
    assert rows["within one"].min() >= 0.999
    assert rows["equal"].min() >= 0.99


def test_a_layer_that_is_off_is_seen(network, monkeypatch):
    found = quanta.ours
    monkeypatch.setattr(quanta, "ours", lambda file, inputs: [layer ^ 8 for layer in found(file, inputs)])

    rows = quanta.compared(network)

    assert rows["equal"].max() < 0.1
    assert rows["largest"].min() >= 7
