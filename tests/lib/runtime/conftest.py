"""Bundles of small models, made by what `stages/compile.py` makes them of."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib import bundle, deploy
from lib.contracts import manifest
from lib.contracts.files import CompiledFiles
from lib.graph import fusion
from lib.measure.device_source import LocalDevice
from lib.measure.libraries import Libraries
from lib.measure.protocol import PackWeights
from lib.models import onnx_facts, onnx_import
from tests.helpers import SMALL

DIGEST = "made of"


def bundle_of(path: Path, folder: Path, cpu, inputs: list[np.ndarray]) -> CompiledFiles:
    """The bundle of an ONNX file, whose reference is what ONNX Runtime makes of it."""
    out = CompiledFiles(folder)
    folder.mkdir()
    model = onnx_import.load(path, {})
    module = fusion.fuse(model.module, cpu.tvm())
    deploy.build(module, {}, cpu.tvm(), out.library, pack=True)
    weights = folder / "weights.npz"
    np.savez(weights, **model.weights)
    Libraries(LocalDevice("llvm")).pack(PackWeights(out.library, weights, out.params))
    weights.unlink()
    out.results.write_bytes(b"")
    session = onnxruntime.InferenceSession(path)
    expected = session.run(None, dict(zip([value.name for value in session.get_inputs()], inputs, strict=True)))
    bundle.write_reference(inputs, expected, out)
    outputs = deploy.outputs(module, onnx_facts.output_names(path))
    facts = bundle.facts(out, deploy.interface(module), outputs, cpu, fusion.ENTRY, onnx_facts.licence(path))
    found = {"precision": "model", "max_error": 0.0, "tolerance": 1e-3, "compared_with": "ONNX Runtime"}
    manifest.write(out.manifest, DIGEST, {**facts, **found}, bundle.delivered(out))
    return out


def changed(out: CompiledFiles, **facts: object) -> None:
    """Write the manifest again, with other facts."""
    found = json.loads(out.manifest.read_text())
    kept = {name: value for name, value in found.items() if name not in ("inputs", "files", "seal")}
    manifest.write(out.manifest, DIGEST, {**kept, **facts}, bundle.delivered(out))


def values(seed: int = 0) -> np.ndarray:
    """An input of `small`."""
    return np.random.default_rng(seed).normal(size=(1, 8, 8, 8)).astype(np.float32)


@pytest.fixture(scope="session")
def small(cpu, tmp_path_factory) -> CompiledFiles:
    """Of a model with one input and one output."""
    return bundle_of(SMALL, tmp_path_factory.mktemp("small") / "compiled", cpu, [values()])


def _pair(path: Path) -> Path:
    """Two inputs of other types, four outputs, two of which are a weight and an input as they are; and a licence."""
    weights = {"w": np.arange(24, dtype=np.float32).reshape(8, 3), "table": np.arange(50, dtype=np.float32)}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["product"]),
            helper.make_node("Gather", ["table", "ids"], ["found"]),
            helper.make_node("Identity", ["w"], ["constant"]),
            helper.make_node("Identity", ["x"], ["same"]),
        ],
        "pair",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [5, 8]),
            helper.make_tensor_value_info("ids", TensorProto.INT64, [7]),
        ],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in (("product", [5, 3]), ("found", [7]), ("constant", [8, 3]), ("same", [5, 8]))
        ],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(made, {"license": "BSD-3-Clause"})
    onnx.save(made, path)
    return path


@pytest.fixture(scope="session")
def pair(cpu, tmp_path_factory) -> CompiledFiles:
    """Of a model with several inputs and outputs."""
    folder = tmp_path_factory.mktemp("pair")
    inputs = [np.ones((5, 8), np.float32), np.arange(7)]
    return bundle_of(_pair(folder / "pair.onnx"), folder / "compiled", cpu, inputs)
