"""Files whose nodes nobody sorted."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.models import onnx_float32, onnx_import, onnx_order
from tests import helpers

WEIGHTS = {"w": np.linspace(-1, 1, 64).reshape(8, 8), "b": np.linspace(0, 1, 8)}


def save(path, nodes, dtype=np.float32):
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (3, 8))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (3, 8))],
        [numpy_helper.from_array(value.astype(dtype), name) for name, value in WEIGHTS.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def in_halves(path):
    """Floats outside; the cast of the input is the last node, as converters to halves leave it."""
    nodes = [
        helper.make_node("MatMul", ["x_half", "w"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["y"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["x"], ["x_half"], to=TensorProto.FLOAT16),
    ]
    return save(path, nodes, np.float16)


def with_a_body(path):
    """A branch that reads what the last node around it makes."""
    body = helper.make_graph(
        [helper.make_node("Add", ["product", "b"], ["sum"]), helper.make_node("Relu", ["sum"], ["out"])], "body", [],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, (3, 8))],
    )  # fmt: skip
    nodes = [
        helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
        helper.make_node("If", ["yes"], ["y"], then_branch=body, else_branch=body),
        helper.make_node("MatMul", ["x", "w"], ["product"]),
    ]
    return save(path, nodes)


def outcome(path, x, cpu):
    [found] = helpers.computed(onnx_import.load(path), cpu, x)
    return found


@pytest.mark.parametrize("make", [in_halves, with_a_body])
def test_a_file_that_nobody_sorted_is_computed_as_onnx_runtime_does(tmp_path, cpu, make):
    path, x = make(tmp_path / "model.onnx"), np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    compared = onnx_float32.compared_with(path, tmp_path)

    [expected] = onnxruntime.InferenceSession(compared, providers=["CPUExecutionProvider"]).run(None, {"x": x})

    np.testing.assert_allclose(outcome(path, x, cpu), expected, rtol=1e-5, atol=1e-6)


def test_what_is_in_order_stays_where_it_is_and_what_is_not_moves_no_further_than_it_must():
    chain = [helper.make_node("Relu", [name], [name + "'"], name=f"of {name}") for name in ("a", "x", "a'", "x'")]
    graph = helper.make_graph(chain, "g", [], [])

    onnx_order.sort(graph)
    assert [node.name for node in graph.node] == ["of a", "of x", "of a'", "of x'"]

    graph = helper.make_graph([chain[2], *chain[:2], chain[3]], "g", [], [])
    onnx_order.sort(graph)
    assert [node.name for node in graph.node] == ["of a", "of a'", "of x", "of x'"]


def test_nodes_that_read_their_own_results_are_told(tmp_path):
    nodes = [helper.make_node("Add", ["x", "y"], ["z"]), helper.make_node("Relu", ["z"], ["y"])]

    with pytest.raises(onnx_import.ModelError, match="Add '' reads 'y', which nothing before it makes"):
        onnx_import.load(save(tmp_path / "model.onnx", nodes))


def test_bodies_within_a_node_are_sorted_as_well():
    later, first = helper.make_node("Relu", ["b"], ["c"]), helper.make_node("Relu", ["a"], ["b"])
    body = helper.make_graph([later, first], "body", [], [])
    graph = helper.make_graph([helper.make_node("If", ["yes"], ["y"], then_branch=body, else_branch=body)], "g", [], [])

    onnx_order.sort(graph)

    for attribute in graph.node[0].attribute:
        assert [node.output[0] for node in attribute.g.node] == ["b", "c"]
