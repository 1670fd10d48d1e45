"""Spectra, turned sequences and caches beyond what ONNX's own tests have (`test_onnx_backend`)."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.contracts.errors import ModelError
from lib.models import onnx_import
from lib.tir.numerics import relative_error
from tests.helpers import computed


def save(path, node, inputs, weights, version=18):
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=9), path)
    return path


def of_onnx_runtime(path, **given):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, given)[0]


@pytest.mark.parametrize(
    ("shape", "step", "length", "has_window", "onesided"),
    [((2, 400, 1), 40, 100, True, 1), ((1, 333, 1), 64, 64, True, 0), ((2, 200, 1), 33, 80, False, 1)],
)
def test_spectra_are_those_of_onnx_runtime(tmp_path, cpu, shape, step, length, has_window, onesided):
    weights = {"step": np.array(step), "length": np.array(length)}
    weights |= {"window": np.hanning(length).astype(np.float32)} if has_window else {}
    node = helper.make_node(
        "STFT", ["x", "step", "window" if has_window else "", "length"], ["y"], onesided=onesided
    )  # fmt: skip
    path = save(tmp_path / "m.onnx", node, {"x": (TensorProto.FLOAT, shape)}, weights)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    [found] = computed(onnx_import.load(path), cpu, x)

    expected = of_onnx_runtime(path, x=x)
    assert found.shape == expected.shape
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("shape", "axis", "length"),
    [((2, 9, 3, 2), 1, None), ((2, 3, 8, 2), 2, 15), ((6, 2), 0, 12), ((9, 2), 0, 12), ((4, 2), 0, 12)],
)
def test_halves_of_spectra_become_the_real_signals_that_they_are_of(tmp_path, cpu, shape, axis, length):
    weights = {"axis": np.array(axis)} | ({"length": np.array(length)} if length else {})
    node = helper.make_node("DFT", ["x", "length" if length else "", "axis"], ["y"], inverse=1, onesided=1)
    path = save(tmp_path / "m.onnx", node, {"x": (TensorProto.FLOAT, shape)}, weights, version=20)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    [found] = computed(onnx_import.load(path), cpu, x)

    expected = np.fft.irfft(x[..., 0] + 1j * x[..., 1], length, axis)[..., None]
    assert found.shape == expected.shape
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("depth", [np.array([5]), np.array(5.0, np.float32)])
@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_places_are_told_by_an_axis_of_their_own(tmp_path, cpu, depth, axis):
    ends = np.array([-0.5, 2.0], np.float32)
    node = helper.make_node("OneHot", ["x", "depth", "ends"], ["y"], axis=axis)
    path = save(tmp_path / "m.onnx", node, {"x": (TensorProto.INT64, (2, 4))}, {"depth": depth, "ends": ends})
    x = np.array([[0, 4, -1, 5], [-5, 2, -6, 3]])  # two are of no place

    [found] = computed(onnx_import.load(path), cpu, x)

    np.testing.assert_array_equal(found, of_onnx_runtime(path, x=x))


def test_spectra_of_complex_signals_are_refused(tmp_path):
    node = helper.make_node("STFT", ["x", "step", "", "length"], ["y"], onesided=0)
    weights = {"step": np.array(8), "length": np.array(16)}
    path = save(tmp_path / "m.onnx", node, {"x": (TensorProto.FLOAT, (1, 64, 2))}, weights)

    with pytest.raises(ModelError, match="cannot be imported: STFT"):
        onnx_import.load(path)


@pytest.mark.parametrize("batch_axis", [0, 1])
def test_sequences_with_features_are_turned_round(tmp_path, cpu, batch_axis):
    shape = (3, 5, 4)
    node = helper.make_node("ReverseSequence", ["x", "ends"], ["y"], batch_axis=batch_axis, time_axis=1 - batch_axis)
    inputs = {"x": (TensorProto.FLOAT, shape), "ends": (TensorProto.INT64, (shape[batch_axis],))}
    path = save(tmp_path / "m.onnx", node, inputs, {})
    x, ends = (
        np.random.default_rng(0).normal(size=shape).astype(np.float32),
        np.array([3, 1, 2, 3, 2][: shape[batch_axis]]),
    )

    [found] = computed(onnx_import.load(path), cpu, x, ends)

    np.testing.assert_array_equal(found, of_onnx_runtime(path, x=x, ends=ends))
