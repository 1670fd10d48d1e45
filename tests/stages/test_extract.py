import math

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper

from lib.contracts import arrays, tables
from lib.contracts.errors import ConfigError, ModelError
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.graph.algorithms import AlgorithmConfig
from lib.machine.registers import registers
from lib.models.source import Source
from lib.tir.workload import load_module, workload_id
from stages import extract


def test_module_weights_and_subgraphs_are_written(started):
    module = tvm.ir.load_json(started.model.module.read_text())
    weights = np.load(started.model.weights)
    rows = tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()

    n_inputs = int(module["main"].attrs["num_input"])
    shapes = [tuple(int(e) for e in p.ty.shape.values) for p in module["main"].params[n_inputs:]]
    assert [weights[name].shape for name in weights.files] == shapes
    for row in rows:
        assert workload_id(load_module(row["workload"])) == row["subgraph_id"]
        assert all(name in [str(g.name_hint) for g in module.get_global_vars()] for name in row["functions"])


@pytest.mark.parametrize("model", ["resnet51", "nowhere/model.onnx"])
def test_a_model_that_cannot_be_read_leaves_nothing_behind(tmp_path, cpu, model):
    with pytest.raises(ModelError):
        extract.run(Source(model), cpu, AlgorithmConfig(), provenance=Provenance(), out=ModelFiles(tmp_path / "out"))

    assert not (tmp_path / "out").exists()


def wide(path, channels=32):
    """An ONNX file with one 3x3 convolution, large enough to gain by Winograd's way."""
    weight = np.random.default_rng(0).normal(size=(channels, 32, 3, 3)).astype(np.float32)
    value = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, n, 24, 24])
        for name, n in (("x", 32), ("y", channels))
    ]
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    made = helper.make_graph([node], "g", value[:1], value[1:], [onnx.numpy_helper.from_array(weight, "w")])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_convolution_that_is_computed_otherwise_is_kept_as_it_was(tmp_path, cpu):
    out = ModelFiles(tmp_path / "out")

    extract.run(Source(str(wide(tmp_path / "wide.onnx"))), cpu, AlgorithmConfig(), provenance=Provenance(), out=out)

    [kernel] = np.load(out.kernels).values()
    assert kernel.shape == (3, 3, 32, 32)
    assert {core for core in tables.read(out.subgraphs, SUBGRAPHS)["core_operator"].to_pylist() if "conv" in core} == {
        "winograd_conv2d"
    }
    assert [a.shape for a in np.load(out.weights).values()] == [(6, 6, 32, 32)]


def test_weights_and_what_they_were_stand_once_for_two_imports_of_a_model(tmp_path, cpu):
    first, second = ModelFiles(tmp_path / "first"), ModelFiles(tmp_path / "second")
    source = Source(str(wide(tmp_path / "wide.onnx")))
    for out, like in ((first, None), (second, first)):
        extract.run(source, cpu, AlgorithmConfig(), provenance=Provenance(), out=out, like=like)

    for name in ("weights", "kernels"):
        whole, brief = getattr(first, name), getattr(second, name)
        assert brief.stat().st_size < whole.stat().st_size / 4
        [expected], [found] = arrays.values(whole), arrays.values(brief)
        np.testing.assert_array_equal(found, expected)


def test_whoever_wants_no_wider_channels_gets_none(tmp_path, cpu):
    out, source = ModelFiles(tmp_path / "model"), Source(str(wide(tmp_path / "wide.onnx", channels=20)))
    found = {}
    for widen in ("auto", "never"):
        config = AlgorithmConfig(winograd="never", widen=widen)
        extract.run(source, cpu, config, provenance=Provenance(), out=out)
        found[widen] = {value.shape[-1] for value in np.load(out.weights).values() if value.ndim == 4}

    lanes = registers(cpu.tvm()).lanes
    assert found == {"auto": {math.ceil(20 / lanes) * lanes}, "never": {20}}


def test_whoever_wants_no_winograd_gets_none(tmp_path, cpu):
    source, out = Source(str(wide(tmp_path / "wide.onnx"))), ModelFiles(tmp_path / "out")
    extract.run(source, cpu, AlgorithmConfig(), provenance=Provenance(), out=out)

    extract.run(source, cpu, AlgorithmConfig(winograd="never"), provenance=Provenance(), out=out)

    assert "conv2d" in tables.read(out.subgraphs, SUBGRAPHS)["core_operator"].to_pylist()
    assert not out.kernels.exists()
    assert not out.reference.exists()


def test_a_setting_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="winograd must be `auto` or `never`, but got 'always'"):
        AlgorithmConfig(winograd="always")
