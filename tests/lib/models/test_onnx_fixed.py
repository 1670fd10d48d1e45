"""Inputs that become constants, against ONNX Runtime, which is given their values."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.contracts.errors import ModelError
from lib.models import onnx_fixed, onnx_import

X = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)


def value(name, kind=TensorProto.FLOAT, shape=None):
    return helper.make_tensor_value_info(name, kind, shape)


def save(path, nodes, inputs, weights=()):
    graph = helper.make_graph(nodes, "g", [value("x", shape=[2, 3]), *inputs], [value("y")], list(weights))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def branch(operator):
    return helper.make_graph([helper.make_node(operator, ["x"], ["b"])], operator, [], [value("b")])


@pytest.fixture
def merged(tmp_path):
    """As exporters merge a decoder's first step with the later ones."""
    node = helper.make_node("If", ["use_cache"], ["y"], then_branch=branch("Exp"), else_branch=branch("Neg"))
    return save(tmp_path / "merged.onnx", [node], [value("use_cache", TensorProto.BOOL, [1])])


@pytest.fixture
def scaled(tmp_path):
    """As a segmenter's masks are scaled to the size of an image that is an input."""
    node = helper.make_node("Expand", ["x", "size"], ["y"])
    return save(tmp_path / "scaled.onnx", [node], [value("size", TensorProto.INT64, [3])])


@pytest.fixture
def offset(tmp_path):
    """Adds an input whose shape is open."""
    node = helper.make_node("Add", ["x", "offset"], ["y"])
    return save(tmp_path / "offset.onnx", [node], [value("offset", TensorProto.FLOAT, ["n"])])


def run(path, **inputs):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)[0]


def check(path, text, tmp_path, **inputs):
    """The file with fixed inputs is what ONNX Runtime makes of the one with these inputs, and can be imported."""
    found = onnx_fixed.fixed(path, text, tmp_path / "fixed")
    assert [value.name for value in onnx.load(found).graph.input] == ["x"]
    np.testing.assert_array_equal(run(found, x=X), run(path, x=X, **inputs))
    assert [list(shape) for shape in shapes(onnx_import.load(found))] == [list(run(found, x=X).shape)]


def shapes(model):
    outputs = model.module["main"].ret_ty
    return [[int(extent) for extent in outputs.shape]]


@pytest.mark.parametrize("chosen", [True, False])
def test_a_branch_that_an_input_chooses_is_taken(tmp_path, merged, chosen):
    check(merged, f"use_cache={str(chosen).lower()}", tmp_path, use_cache=np.array([chosen]))


def test_a_shape_that_is_an_input_is_the_outputs(tmp_path, scaled):
    check(scaled, "size=4,2,3", tmp_path, size=np.array([4, 2, 3]))


@pytest.mark.parametrize(("text", "array"), [("0.5", [0.5]), ("1,-2e3,3", [1, -2e3, 3])])
def test_numbers_fill_an_open_dimension(tmp_path, offset, text, array):
    check(offset, f"offset={text}", tmp_path, offset=np.array(array, np.float32))


def test_an_array_comes_from_a_file_and_another_one_in_it_makes_another_model(tmp_path, offset):
    array, path = np.array([1, 2, 3], np.float32), tmp_path / "offset.npy"
    np.save(path, array)
    check(offset, f"offset={path}", tmp_path, offset=array)
    first = onnx_fixed.fixed(offset, f"offset={path}", tmp_path / "fixed")

    np.save(path, array + 1)

    assert onnx_fixed.fixed(offset, f"offset={path}", tmp_path / "fixed") != first
    check(offset, f"offset={path}", tmp_path, offset=array + 1)


def test_one_number_fills_a_shape_that_is_known(tmp_path, scaled):
    found = onnx_fixed.fixed(scaled, "size=3", tmp_path / "fixed")
    [size] = onnx.load(found).graph.initializer
    assert numpy_helper.to_array(size).tolist() == [3, 3, 3]


def test_the_same_values_make_one_file_and_others_another(tmp_path, merged):
    folder = tmp_path / "fixed"
    first = onnx_fixed.fixed(merged, "use_cache=true", folder)
    date = first.stat().st_mtime_ns

    again, other = (onnx_fixed.fixed(merged, f"use_cache={each}", folder) for each in ("true", "false"))

    assert (again, again.stat().st_mtime_ns) == (first, date)
    assert other != first
    assert first.name == other.name == "merged.onnx"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cache=true", r"--fix cache=true: .*merged\.onnx has the inputs use_cache, x\."),
        ("use_cache", "expected NAME=VALUE"),
        ("use_cache=true use_cache=false", "each input once"),
        ("use_cache=yes", r"has bool\[1\] there; expected NAME=VALUE"),
        ("use_cache=2", r"has bool\[1\] there, which does not hold that value"),
        ("use_cache=true,false", r"has bool\[1\] there, and 2 numbers were given"),
        ("use_cache=nowhere.npy", r"--fix nowhere\.npy: there is no such file"),
    ],
)
def test_what_an_input_does_not_take_is_refused(tmp_path, merged, text, told):
    with pytest.raises(ModelError, match=told):
        onnx_fixed.fixed(merged, text, tmp_path / "fixed")


@pytest.mark.parametrize(
    ("array", "has"), [([1, 2, 3], r"int64\[3\]"), (np.zeros((2, 3), np.float32), r"float32\[2, 3\]")]
)
def test_an_array_of_another_type_or_rank_is_refused(tmp_path, offset, array, has):
    np.save(tmp_path / "a.npy", array)

    with pytest.raises(ModelError, match=rf"has float32\[\?\] there, and the file has {has}"):
        onnx_fixed.fixed(offset, f"offset={tmp_path / 'a.npy'}", tmp_path / "fixed")


def test_integers_are_not_cut(tmp_path, scaled):
    with pytest.raises(ModelError, match="does not hold that value"):
        onnx_fixed.fixed(scaled, "size=1.5,2,3", tmp_path / "fixed")
