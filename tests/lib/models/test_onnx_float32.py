"""Files in halves, as they are computed in float32."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.models import onnx_float32, onnx_import
from tests import helpers

RNG = np.random.default_rng(0)
WEIGHTS = {"w": RNG.normal(0, 0.2, (24, 32)), "b": RNG.normal(0, 0.2, 32), "table": RNG.normal(0, 1, (50, 24))}


def halves(path, kind=np.float16):
    """Rows of a table, a product, a choice by a constant within a node, casts there and back; outputs in both types."""
    number = TensorProto.FLOAT16 if kind is np.float16 else TensorProto.BFLOAT16
    limit = numpy_helper.from_array(np.array(0.1, kind), "limit")
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Add", ["rows", "x"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Softmax", ["wide"], ["soft"], axis=-1),
        helper.make_node("Cast", ["soft"], ["again"], to=number),
        helper.make_node("MatMul", ["again", "w"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["y"]),
        helper.make_node("Constant", [], ["c"], value=limit),
        helper.make_node("Greater", ["y", "c"], ["above"]),
        helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT),
        helper.make_node("Identity", ["above"], ["is_above"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, (7,)),
         helper.make_tensor_value_info("x", number, (7, 24))],
        [helper.make_tensor_value_info("y", number, (7, 32)),
         helper.make_tensor_value_info("z", TensorProto.FLOAT, (7, 32)),
         helper.make_tensor_value_info("is_above", TensorProto.BOOL, (7, 32))],
        [numpy_helper.from_array(value.astype(kind), name) for name, value in WEIGHTS.items()],
        value_info=[helper.make_tensor_value_info("product", number, (7, 32))],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return {"ids": RNG.integers(0, 50, 7), "x": RNG.normal(size=(7, 24)).astype(kind)}


def exact(given, kind):
    weights = {name: value.astype(kind).astype(np.float64) for name, value in WEIGHTS.items()}
    total = weights["table"][given["ids"]] + given["x"].astype(np.float64)
    soft = np.exp(total - total.max(-1, keepdims=True))
    return soft / soft.sum(-1, keepdims=True) @ weights["w"] + weights["b"]


def test_a_file_in_halves_is_computed_in_float32_and_keeps_its_types_outside(tmp_path, cpu):
    given = halves(tmp_path / "model.onnx")
    model = onnx_import.load(tmp_path / "model.onnx")

    y, z, is_above = helpers.computed(model, cpu, *given.values())

    assert (y.dtype, z.dtype, is_above.dtype) == (np.float16, np.float32, np.bool_)
    expected = exact(given, np.float16)
    np.testing.assert_allclose(z, expected, rtol=0, atol=1e-6)  # nothing was rounded to halves on the way
    np.testing.assert_array_equal(y, z.astype(np.float16))
    np.testing.assert_array_equal(is_above, expected > np.float64(np.float16(0.1)))
    assert {array.dtype for array in model.weights.values()} == {np.dtype(np.float32)}


def test_what_others_are_compared_with_is_the_file_in_float32(tmp_path):
    given = halves(tmp_path / "model.onnx")

    path = onnx_float32.compared_with(tmp_path / "model.onnx", tmp_path)

    y, z, _ = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, given)
    assert y.dtype == np.float16
    np.testing.assert_allclose(z, exact(given, np.float16), rtol=0, atol=1e-6)
    rounded = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"]).run(None, given)
    assert 1e-5 < np.abs(rounded[1] - z).max() < 5e-3  # the same file, whose values are halves


def test_bfloat16_too(tmp_path, cpu):
    given = halves(tmp_path / "model.onnx", ml_dtypes.bfloat16)

    _, z, _ = helpers.computed(onnx_import.load(tmp_path / "model.onnx"), cpu, *given.values())

    np.testing.assert_allclose(z, exact(given, ml_dtypes.bfloat16), rtol=0, atol=1e-6)


def test_a_file_in_float32_is_compared_with_itself(tmp_path):
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (3,))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (3,))],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "model.onnx")

    assert onnx_float32.compared_with(tmp_path / "model.onnx", tmp_path) == tmp_path / "model.onnx"


@pytest.mark.parametrize("level", [0, 4])
def test_what_may_be_rounded_to_bytes_is_not(level):
    node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", K=32, N=16, bits=4,
                            block_size=32, accuracy_level=level)  # fmt: skip
    graph = helper.make_graph([node], "g", [], [])
    proto = helper.make_model(graph)

    assert not onnx_float32.widen(proto)
    assert onnx_float32.make_exact(proto) == (level == 4)

    assert {each.name: each.i for each in proto.graph.node[0].attribute}["accuracy_level"] == 0
