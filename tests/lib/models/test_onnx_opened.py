"""Extents that a file fixes and a user gives otherwise, against NumPy and ONNX Runtime."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.contracts.errors import ModelError
from lib.models import onnx_import, onnx_opened
from tests.helpers import luigi

KERNEL = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)


def value(name, shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


@pytest.fixture
def detector(tmp_path):
    """Of images of any size, as it was exported for ten of 32 pixels."""
    nodes = [
        helper.make_node("Conv", ["image", "kernel"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    return save(tmp_path / "detector.onnx", nodes, [10, 3, 32, 32], [10, 4, 16, 16])


@pytest.fixture
def classifier(tmp_path):
    """Whose operators take the extents of its export alone."""
    nodes = [
        helper.make_node("Reshape", ["image", "flat"], ["f"]),
        helper.make_node("MatMul", ["f", "dense"], ["y"]),
    ]
    return save(tmp_path / "classifier.onnx", nodes, [1, 3, 4, 4], [1, 2])


def save(path, nodes, given, made):
    weights = {"kernel": KERNEL, "flat": np.array([1, -1]), "dense": np.ones((48, 2), np.float32)}
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes, "g", [value("image", given)], [value("y", made)],
        [numpy_helper.from_array(array, name) for name, array in weights.items() if name in used],
        value_info=[value("c", made)],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_extents_that_a_file_fixes_are_others_if_its_operators_take_them(detector, tmp_path):
    shape = (2, 3, 20, 24)
    found = onnx_opened.opened(detector, {"image": shape}, tmp_path / "opened")

    [results] = onnxruntime.InferenceSession(found, providers=["CPUExecutionProvider"]).run(
        None, {"image": np.ones(shape, np.float32)}
    )
    assert results.shape == (2, 4, 10, 12)
    np.testing.assert_allclose(results[:, :, 3, 3], np.broadcast_to(KERNEL.sum((1, 2, 3)).clip(0), (2, 4)), rtol=1e-5)
    image = onnx_import.load(found, {"image": shape}).module["main"].params[0]
    assert tuple(map(int, image.ty.shape)) == shape


def test_a_file_is_left_as_it_is_where_nothing_else_is_asked_for(detector, tmp_path):
    for shapes in ({}, {"image": (10, 3, 32, 32)}, {"image": (3, 32, 32)}, {"other": (1,)}):
        assert onnx_opened.opened(detector, shapes, tmp_path / "opened") == detector
    assert (
        onnx_opened.opened(tmp_path / "absent.onnx", {"image": (1,)}, tmp_path / "opened") == tmp_path / "absent.onnx"
    )
    assert not (tmp_path / "opened").exists()


def test_operators_that_take_the_extents_of_the_export_alone_are_named(classifier, tmp_path):
    found = onnx_opened.opened(classifier, {"image": (1, 3, 8, 8)}, tmp_path / "opened")

    with pytest.raises(ModelError, match=r"operator MatMul"):
        onnx_import.load(found, {"image": (1, 3, 8, 8)})


def test_a_user_gets_a_library_for_other_extents_verified_beside_onnx_runtime(detector, tmp_path):
    done = luigi(tmp_path, "TuneModel", "--model", str(detector), "--shape", "image=2,3,20,24", "--trials", "4")

    assert done.returncode == 0, done.stderr
    [manifest] = (tmp_path / "artifacts").rglob("compiled/manifest.json")
    told = json.loads(manifest.read_text())
    assert [each["shape"] for each in told["model_inputs"]] == [[2, 3, 20, 24]]
    assert told["compared_with"].startswith("ONNX Runtime")
    assert told["max_error"] < 1e-5
