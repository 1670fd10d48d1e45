import os
import signal
import time
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from lib.measure import file_peer
from lib.measure.file_peer import Original
from lib.measure.protocol import FileOpened
from lib.measure.runner import ModelFailed

X = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
WEIGHT = np.random.default_rng(1).normal(size=(32, 8)).astype(np.float32)


@pytest.fixture
def file(tmp_path, cpu):
    """A product with a constant, and its input."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Shape", ["y"], ["shape"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 32])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 8]),
            helper.make_tensor_value_info("shape", TensorProto.INT64, [2]),
        ],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    np.savez(tmp_path / "inputs.npz", X)
    return Original(path, cpu, is_timed=True)


def outputs(peer, file):
    folder = file.path.parent
    return peer.outputs(file, folder / "inputs.npz", folder / "outputs.npz")


def test_it_computes_and_times_what_the_file_says(file):
    with file_peer.opened(file, 60) as peer:
        (y, shape), opened = outputs(peer, file)
        latency_s = peer.latency_s(0.05)

    np.testing.assert_allclose(y, X @ WEIGHT, rtol=1e-4, atol=1e-5)
    assert shape.tolist() == [4, 8]
    assert opened == FileOpened(f"ONNX Runtime {onnxruntime.__version__}", is_timed=True)
    assert 0 < latency_s < 0.1


@pytest.mark.parametrize("given", [["x", "w", "zero", "zero_w"], ["x", "w", "zero"], ["x", "w"]])
def test_sums_of_bytes_are_exact_whatever_the_cpu(tmp_path, cpu, given):
    """Without VNNI, ONNX Runtime adds two products in 16 bits: its sums are others by up to a half here."""
    rng = np.random.default_rng(0)
    x, w = rng.choice([0, 250, 255], (4, 64)).astype(np.uint8), rng.choice([-128, 120, 127], (64, 24)).astype(np.int8)
    named = {"w": w, "zero": np.uint8(3 if "zero" in given else 0), "zero_w": np.int8(0)}
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", given, ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [4, 24])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in named.items()],
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    np.savez(tmp_path / "inputs.npz", x)

    with file_peer.opened(file := Original(path, cpu, is_timed=True), 60) as peer:
        [found], _ = outputs(peer, file)
        assert peer.latency_s(0.01) > 0

    np.testing.assert_array_equal(found, (x.astype(np.int32) - named["zero"]) @ w.astype(np.int32))


def test_what_many_values_add_to_one_place_is_their_sum(tmp_path, cpu):
    """On several threads ONNX Runtime loses some of them, other ones each time; it is timed on those."""
    rng = np.random.default_rng(0)
    values, places = rng.normal(size=(20000, 128)).astype(np.float32), rng.integers(0, 8, (20000, 1))
    graph = helper.make_graph(
        [helper.make_node("ScatterND", ["zero", "places", "x"], ["y"], reduction="add")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, values.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 128])],
        [numpy_helper.from_array(np.zeros((8, 128), np.float32), "zero"), numpy_helper.from_array(places, "places")],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    np.savez(tmp_path / "inputs.npz", values)
    expected = np.zeros((8, 128))
    np.add.at(expected, places[:, 0], values)
    file = Original(path, replace(cpu, threads=4), is_timed=True)

    with file_peer.opened(file, 60) as peer:
        for _ in range(5):
            (found,), _ = outputs(peer, file)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_what_its_optimisations_break_is_computed_without_them(tmp_path, cpu):
    """ONNX Runtime makes a product of integers of one of floats of eight bits, and finds that invalid."""
    x = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    kind, value = TensorProto.FLOAT8E4M3FN, helper.make_tensor_value_info
    weights = [
        helper.make_tensor("zero", kind, [], [0.0]), helper.make_tensor("s", TensorProto.FLOAT, [], [0.5]),
        helper.make_tensor("w", kind, [16, 8], np.linspace(-4, 4, 128)),
    ]  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "s", "zero"], ["wide"]),
        helper.make_node("MatMul", ["d", "wide"], ["y"]),
    ]
    inputs, outputs = (value(*each) for each in (("x", 1, (4, 16)), ("y", 1, (4, 8))))
    graph = helper.make_graph(nodes, "g", [inputs], [outputs], weights)
    opsets, path = [helper.make_opsetid("", 19)], tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    np.savez(tmp_path / "in.npz", x)

    with file_peer.opened(file := Original(path, cpu, is_timed=True), 60) as peer:
        [found], told = peer.outputs(file, tmp_path / "in.npz", tmp_path / "out.npz")

    [expected] = ReferenceEvaluator(str(path)).run(None, {"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert told.by.endswith("without its optimisations")
    assert not told.is_timed


@pytest.mark.usefixtures("fresh_launcher")
def test_without_onnx_runtime_the_reference_evaluator_computes(file, tmp_path, monkeypatch):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "onnxruntime.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hidden"))

    with file_peer.opened(file, 60) as peer:
        (y, _), opened = outputs(peer, file)

    np.testing.assert_allclose(y, X @ WEIGHT, rtol=1e-4, atol=1e-5)
    assert opened == FileOpened(f"the reference evaluator of onnx {onnx.__version__}", is_timed=False)


def test_a_file_that_does_not_run_is_told(file):
    file.path.write_bytes(b"no model")

    with file_peer.opened(file, 60) as peer, pytest.raises(ModelFailed, match=r"(?i)open_file: .*protobuf"):
        outputs(peer, file)


def test_what_takes_too_long_is_told_and_ended(file):
    with file_peer.opened(file, 0.01) as peer:
        with pytest.raises(ModelFailed, match=r"killed for taking too long: 0\.01 s"):
            outputs(peer, file)
        pid = peer._worker._process.pid

    assert not psutil.pid_exists(pid)


def test_a_process_that_was_killed_is_told(file):
    with file_peer.opened(file, 60) as peer:
        os.kill(peer._worker._process.pid, signal.SIGKILL)
        with pytest.raises(ModelFailed, match="worker ended with signal SIGKILL"):
            outputs(peer, file)


def test_between_its_turns_it_stands_still(file):
    with file_peer.opened(file, 60) as peer:
        outputs(peer, file)
        peer.latency_s(0.01)

        process = psutil.Process(peer._worker._process.pid)
        end = time.monotonic() + 10  # a signal is delivered some time after it is sent
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < end:
            time.sleep(0.01)
        assert process.status() == psutil.STATUS_STOPPED
