"""Operators of classical machine learning, against ONNX Runtime."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.contracts.errors import ModelError
from lib.models import onnx_import
from tests.helpers import computed

RNG = np.random.default_rng(0)
ROWS, COLUMNS = 5, 6
ROW = [float(n) for n in RNG.normal(size=COLUMNS)]


def ml(operator, inputs, outputs, **given):
    return helper.make_node(operator, inputs, outputs, domain="ai.onnx.ml", **given)


def linear(n_classes, rows, after, **given):
    coefficients = [float(n) for n in RNG.normal(size=rows * COLUMNS)]
    return ml("LinearClassifier", ["x"], ["label", "y"], coefficients=coefficients, post_transform=after,
              intercepts=[0.1 * n for n in range(rows)], classlabels_ints=[3 * n + 2 for n in range(n_classes)],
              **given)  # fmt: skip


CASES = {
    "Scaler": ([ml("Scaler", ["x"], ["y"], offset=ROW, scale=[1.0 + n for n in range(COLUMNS)])], ["y"]),
    "Scaler of one number": ([ml("Scaler", ["x"], ["y"], offset=[0.5], scale=[2.0])], ["y"]),
    "ArrayFeatureExtractor": ([ml("ArrayFeatureExtractor", ["x", "places"], ["y"])], ["y"]),
    "ArrayFeatureExtractor of a vector": (
        [helper.make_node("ArgMax", ["x"], ["best"], axis=1, keepdims=0),
         ml("ArrayFeatureExtractor", ["vector", "best"], ["y"])], ["y"]),
    "FeatureVectorizer": (
        [ml("FeatureVectorizer", ["x", "x"], ["y"], inputdimensions=[COLUMNS, COLUMNS])], ["y"]),
    "Binarizer": ([ml("Binarizer", ["x"], ["y"], threshold=0.3)], ["y"]),
    "Imputer of NaN": ([helper.make_node("Sqrt", ["x"], ["r"]), ml(
        "Imputer", ["r"], ["y"], imputed_value_floats=ROW, replaced_value_float=float("nan"))], ["y"]),
    "Imputer of a number": ([helper.make_node("Round", ["x"], ["r"]), ml(
        "Imputer", ["r"], ["y"], imputed_value_floats=[7.0], replaced_value_float=1.0)], ["y"]),
    **{f"Normalizer {norm}": ([ml("Normalizer", ["x"], ["y"], norm=norm)], ["y"]) for norm in ("L1", "L2", "MAX")},
    "LinearRegressor": ([ml("LinearRegressor", ["x"], ["y"], coefficients=ROW, intercepts=[0.5])], ["y"]),
    "LinearRegressor of two": (
        [ml("LinearRegressor", ["x"], ["y"], coefficients=[*ROW, *ROW[::-1]], targets=2)], ["y"]),
    "LinearClassifier": ([linear(3, 3, "NONE")], ["label", "y"]),
    "LinearClassifier, softmax": ([linear(3, 3, "SOFTMAX")], ["label", "y"]),
    "LinearClassifier, logistic": ([linear(3, 3, "LOGISTIC")], ["label", "y"]),
    "LinearClassifier of two by two": ([linear(2, 2, "NONE", multi_class=1)], ["label", "y"]),
}  # fmt: skip


def save(path, nodes, outputs):
    kinds = {"label": TensorProto.INT64}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, COLUMNS])],
        [helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), None) for name in outputs],
        [numpy_helper.from_array(np.array([4, 1, 1]), "places"),
         numpy_helper.from_array(np.linspace(0, 1, COLUMNS, dtype=np.float32), "vector")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@pytest.mark.parametrize("name", CASES)
def test_what_is_arithmetic_is_computed(tmp_path, cpu, name):
    path = save(tmp_path / "m.onnx", *CASES[name])
    x = RNG.normal(size=(ROWS, COLUMNS)).astype(np.float32)

    found = computed(onnx_import.load(path), cpu, x)

    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_one_row_for_two_classes_is_left_to_onnx_runtime(tmp_path):
    path = save(tmp_path / "m.onnx", [linear(2, 1, "LOGISTIC")], ["label", "y"])

    with pytest.raises(ModelError, match="cannot be imported: LinearClassifier"):
        onnx_import.load(path)


def test_names_of_classes_are_left_to_onnx_runtime(tmp_path):
    node = linear(3, 3, "NONE")
    [labels] = [n for n, each in enumerate(node.attribute) if each.name == "classlabels_ints"]
    del node.attribute[labels]
    node.attribute.append(helper.make_attribute("classlabels_strings", ["a", "b", "c"]))
    path = save(tmp_path / "m.onnx", [node], ["y"])

    with pytest.raises(ModelError, match="cannot be imported: LinearClassifier"):
        onnx_import.load(path)
