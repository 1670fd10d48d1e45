import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def files(monkeypatch):
    """The script as a module; it imports its neighbours by their bare names."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("files")


def run(*options):
    command = [sys.executable, str(BENCHMARKS / "files.py"), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True)


def affine(path, slope, shift):
    """x * slope + shift as an ONNX file, and inputs for it."""
    made = helper.make_graph(
        [helper.make_node("Mul", ["x", "slope"], ["m"]), helper.make_node("Add", ["m", "shift"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64])],
        [numpy_helper.from_array(np.float32(value), name) for name, value in (("slope", slope), ("shift", shift))],
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path, {"x": np.arange(64, dtype=np.float32)}


def test_a_light_model_is_made_equal_each_time_and_runs(tmp_path):
    for folder in ("a", "b"):
        done = run("--out", tmp_path / folder, "--only", "squeezenet")
        assert done.returncode == 0, done.stderr
    assert "| squeezenet | 4.9 | data_0 float32[1, 3, 224, 224] |" in done.stdout
    made = tmp_path / "a" / "squeezenet.onnx"
    assert made.read_bytes() == (tmp_path / "b" / "squeezenet.onnx").read_bytes()
    session = onnxruntime.InferenceSession(str(made))
    [output] = session.run(None, {"data_0": np.ones((1, 3, 224, 224), np.float32)})
    assert output.std() > 0


def test_an_unknown_name_is_told_before_anything_is_made(tmp_path):
    done = run("--out", tmp_path / "new", "--only", "squeezenet", "squeezenot")
    assert done.returncode == 2
    assert "squeezenot: not among" in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_file_that_fails_is_named_leaves_nothing_and_does_not_stop_the_others(files, tmp_path, monkeypatch, capsys):
    def bad(folder, _pt2):
        with files.whole(folder / "bad.onnx") as path:
            path.write_text("half")
            raise RuntimeError("no such operator")

    def good(folder, _pt2):
        with files.whole(folder / "good.onnx") as path:
            path.write_text("all")

    monkeypatch.setattr(files, "makers", lambda: {"bad": bad, "good": good})
    monkeypatch.setattr(sys, "argv", ["files.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="not made: bad"):
        files.main()
    assert "bad: RuntimeError: no such operator" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["good.onnx"]


def test_a_file_that_computes_something_passes(files, tmp_path):
    path, inputs = affine(tmp_path / "m.onnx", slope=2, shift=1)
    assert files.checked("m", path, inputs).startswith("| m | 0.0 | x float32[64] | 127 |")


@pytest.mark.parametrize(
    ("slope", "shift", "message"),
    [
        (0, 1, "other inputs change the outputs by 0 "),
        (1e-6, 0, "the largest output is 6.3e-05"),
        (np.nan, 0, "the largest output is nan"),
        (1e30, 0, r"the largest output is 6.3e\+31"),
    ],
)
def test_a_file_whose_outputs_a_wrong_graph_could_give_is_refused(files, tmp_path, slope, shift, message):
    path, inputs = affine(tmp_path / "m.onnx", slope, shift)
    with pytest.raises(ValueError, match=message):
        files.checked("m", path, inputs)


def test_calibrated_batch_norms_normalise(files):
    rng = np.random.default_rng(0)
    weights = {name: rng.uniform(0.5, 1.5, 3).astype(np.float32) for name in ("mean", "variance")}
    weights |= {"scale": np.ones(3, np.float32), "shift": np.zeros(3, np.float32)}
    made = helper.make_graph(
        [helper.make_node("BatchNormalization", ["x", "scale", "shift", "mean", "variance"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3, 8, 8])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 9)], ir_version=8)
    inputs = {"x": rng.normal(40, 7, (1, 3, 8, 8)).astype(np.float32)}
    proto = files.light.calibrated(proto, inputs)
    [output] = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, inputs)
    np.testing.assert_allclose(output.mean((0, 2, 3)), 0, atol=1e-4)
    np.testing.assert_allclose(output.std((0, 2, 3)), 1, rtol=1e-4)


def test_a_model_of_torch_is_made_also_as_an_exported_program(tmp_path):
    for package in ("torch", "transformers", "onnxscript"):
        pytest.importorskip(package)
    done = run("--out", tmp_path, "--only", "mobilenet_v2", "--pt2")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mobilenet_v2.onnx", "mobilenet_v2.pt2"]
    assert "pixel_values float32[1, 3, 224, 224]" in done.stdout
