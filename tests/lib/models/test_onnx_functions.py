"""Files that bring functions of their own, as exporters write modules."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.contracts.errors import ModelError
from lib.models import onnx_float32, onnx_import
from tests.helpers import computed

HALF = np.float32(0.5)
X = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)


def function(domain, name, inputs, outputs, nodes, attributes=(), versions=(("", 17),)):
    opsets = [helper.make_opsetid(*each) for each in versions]
    return helper.make_function(domain, name, inputs, outputs, nodes, opsets, list(attributes))


def constant(name, value):
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value)))


def scaled(factor=HALF):
    """x * 0.5, and its softmax along an axis that a call names."""
    softmax = helper.make_node("Softmax", ["half"], ["y"])
    softmax.attribute.append(onnx.AttributeProto(name="axis", ref_attr_name="axis", type=onnx.AttributeProto.INT))
    nodes = [constant("factor", factor), helper.make_node("Mul", ["x", "factor"], ["half"]), softmax]
    return function("net.Scaled", "Scaled", ["x"], ["y"], nodes, ["axis"])


def block(versions, elements=TensorProto.FLOAT):
    """Two calls of that, of which the second is in a branch, and reads a weight."""
    branch = helper.make_graph(
        [helper.make_node("Scaled", ["w"], ["chosen"], domain="net.Scaled", axis=1)], "then", [],
        [helper.make_tensor_value_info("chosen", elements, None)],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Neg", ["w"], ["negated"])], "else", [],
        [helper.make_tensor_value_info("negated", elements, None)],
    )  # fmt: skip
    nodes = [
        helper.make_node("Scaled", ["x"], ["first"], domain="net.Scaled", axis=-1),
        constant("yes", True),
        helper.make_node("If", ["yes"], ["second"], then_branch=branch, else_branch=other),
        helper.make_node("Add", ["first", "second"], ["y"]),
    ]
    return function("net.Block", "Block", ["x", "w"], ["y"], nodes, versions=versions)


def save(path, functions, kind=np.float32, versions=(("", 17), ("net.Scaled", 1), ("net.Block", 1))):
    elements = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    weight = np.random.default_rng(1).normal(size=(3, 8)).astype(kind)
    graph = helper.make_graph(
        [helper.make_node("Block", ["x", "w"], ["h"], domain="net.Block"),
         helper.make_node("Block", ["h", "w"], ["y"], domain="net.Block")],
        "g", [helper.make_tensor_value_info("x", elements, X.shape)],
        [helper.make_tensor_value_info("y", elements, X.shape)], [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    opsets = [helper.make_opsetid(*each) for each in versions]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions), path)
    return path


@pytest.mark.parametrize(
    "versions",
    [
        (("", 17), ("net.Scaled", 1)),
        (("", 17), ("net.Scaled", 17)),  # of another version than the model says, as JAX's exporter writes it
    ],
)
def test_functions_within_functions_and_branches_compute_what_onnx_runtime_computes(tmp_path, cpu, versions):
    path = save(tmp_path / "m.onnx", [scaled(), block(versions)])
    [expected] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": X})

    [found] = computed(onnx_import.load(path), cpu, X)

    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.ptp(expected) > 0.1


def test_a_domain_that_the_model_does_not_list_is_found(tmp_path, cpu):
    versions = (("", 17), ("net.Scaled", 1))
    listed, unlisted = (
        save(tmp_path / f"{n}.onnx", [scaled(), block(versions)], versions=each)
        for n, each in enumerate([(*versions, ("net.Block", 1)), (("", 17), ("net.Block", 1))])
    )

    [found], [expected] = (computed(onnx_import.load(path), cpu, X) for path in (unlisted, listed))

    np.testing.assert_array_equal(found, expected)


def test_a_function_of_an_older_version_means_what_it_meant(tmp_path, cpu):
    """A Squeeze had axes for an attribute, where a model of now hands them over."""
    nodes = [helper.make_node("Unsqueeze", ["x"], ["y"], axes=[0])]
    old = function("net.Old", "Old", ["x"], ["y"], nodes, versions=[("", 11)])
    graph = helper.make_graph(
        [helper.make_node("Old", ["x"], ["h"], domain="net.Old"), helper.make_node("Exp", ["h"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, *X.shape))],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("net.Old", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=[old]), tmp_path / "m.onnx")

    [found] = computed(onnx_import.load(tmp_path / "m.onnx"), cpu, X)

    np.testing.assert_allclose(found, np.exp(X[None]), rtol=1e-6)


def test_functions_in_halves_are_compared_with_the_file_in_float32(tmp_path):
    halves = block((("", 17), ("net.Scaled", 1)), TensorProto.FLOAT16)
    path = save(tmp_path / "m.onnx", [scaled(np.float16(0.5)), halves], np.float16)
    x = X.astype(np.float16)

    compared = onnx_float32.compared_with(path, tmp_path)

    assert compared != path
    rounded, [exact] = (
        onnxruntime.InferenceSession(each, providers=["CPUExecutionProvider"]).run(None, {"x": x})
        for each in (path, compared)
    )
    np.testing.assert_allclose(rounded[0].astype(np.float32), exact.astype(np.float32), rtol=0, atol=2e-2)
    assert not any(node.domain.startswith("net.") for node in onnx.load(compared).graph.node)


def test_a_function_that_calls_itself_is_refused_by_name(tmp_path):
    nodes = [helper.make_node("Block", ["x", "w"], ["y"], domain="net.Block")]
    endless = function("net.Block", "Block", ["x", "w"], ["y"], nodes, versions=[("", 17), ("net.Block", 1)])
    path = save(tmp_path / "m.onnx", [endless])

    with pytest.raises(ModelError, match=r"m\.onnx .*Block"):
        onnx_import.load(path)
