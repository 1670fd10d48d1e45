"""Files as hubs have them: that the tools make them, and that they are read as what they are."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import published
from lib.models import onnx_import
from tests import helpers

SMALL = {"layers": 1, "width": 64, "heads": 4, "groups": 2, "hidden": 96, "words": 100}


def computed(path, given, cpu):
    return helpers.computed(onnx_import.load(path), cpu, *given.values())


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize(("seq", "past"), [(1, 7), (5, 0)])
def test_a_chat_computes_what_onnx_runtime_computes(tmp_path, cpu, seq, past, is_half):
    """But for what that rounds to bytes, as the file allows."""
    path = tmp_path / "chat.onnx"
    given = published.Chat(seq=seq, past=past, is_half=is_half, **SMALL).save(path)
    given["input_ids"] %= SMALL["words"]

    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, given)

    for mine, theirs in zip(computed(path, given, cpu), expected, strict=True):
        assert mine.shape == theirs.shape
        assert np.abs(mine.astype(np.float64) - theirs).max() < 0.03 * np.abs(theirs).max()


def base(folder, _pt2):
    """A convolution and a product."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(0, 0.2, (16, 8, 3, 3)), "m": rng.normal(0, 0.2, (16, 12))}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]), helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "m"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 8, 9, 9))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 12))],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )  # fmt: skip
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), folder / "squeezenet.onnx"
    )


@pytest.mark.parametrize(("kind", "operators", "error"), [("bytes", "ConvInteger", 1e-3), ("half", "Conv", 5e-3)])
def test_files_are_made_by_onnx_runtimes_tools(tmp_path, cpu, kind, operators, error):
    path = tmp_path / "model.onnx"
    given = published.makers({"squeezenet": base})[f"squeezenet_{kind}"](path)

    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, given)

    assert operators in {node.op_type for node in onnx.load(path).graph.node}
    for mine, theirs in zip(computed(path, given, cpu), expected, strict=True):
        assert np.abs(mine.astype(np.float64) - theirs).max() < error * np.abs(theirs).max()
