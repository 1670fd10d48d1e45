"""Bundles of small models, made by what `stages/compile.py` makes them of."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib import bundle, deploy, packing, sharing
from lib.contracts import manifest
from lib.contracts.files import CompiledFiles
from lib.graph import fusion
from lib.models import file_facts, onnx_import
from tests import range_files
from tests.helpers import SMALL

DIGEST = "made of"


def bundle_of(path: Path, folder: Path, cpu, inputs: list[np.ndarray]) -> CompiledFiles:
    """The bundle of an ONNX file, whose reference is what ONNX Runtime makes of it."""
    out = CompiledFiles(folder)
    folder.mkdir()
    model = onnx_import.load(path, {})
    module = fusion.fuse(model.module, cpu.tvm())
    weights, packs = folder / "weights.npz", folder / "packing.json"
    deploy.build(module, {}, cpu.tvm(), out.library, packs)
    np.savez(weights, **model.weights)
    packing.write(out.params, [packs], [weights], cpu.tvm(), None)
    weights.unlink()
    packs.unlink()
    out.results.write_bytes(b"")
    session = onnxruntime.InferenceSession(path)
    expected = session.run(None, dict(zip([value.name for value in session.get_inputs()], inputs, strict=True)))
    bundle.write_reference(inputs, expected, out)
    outputs = deploy.outputs(module, file_facts.of(path).outputs)
    facts = bundle.facts(out, deploy.interface(module), outputs, cpu, fusion.ENTRY, file_facts.of(path).licence)
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


def range_of(path: Path, folder: Path, cpu, buckets: list[dict[str, int]]) -> CompiledFiles:
    """The bundle of a file that `range_files` made, for a range of shapes: as `stages/compile_range.py` makes it, but
    untuned."""
    out = CompiledFiles(folder)
    folder.mkdir()
    packings, weights, libraries, interface, outputs = [], [], [], [], []
    for n, extents in enumerate(buckets):
        model = onnx_import.load(path, {name: (extent,) for name, extent in extents.items()})
        module = fusion.fuse(model.module, cpu.tvm())
        libraries.append(out.library_of(str(n)))
        packings.append(folder / f"{n}.json")
        weights.append(folder / f"{n}.npz")
        deploy.build(module, {}, cpu.tvm(), libraries[-1], packings[-1])
        np.savez(weights[-1], **model.weights)
        interface, outputs = deploy.interface(module), deploy.outputs(module, file_facts.of(path).outputs)
    listed = folder / "together.json"
    packing.write(out.params, packings, weights, cpu.tvm(), listed)
    together = sharing.read_together(listed)
    for file in (*packings, *weights, listed):
        file.unlink()
    axes = file_facts.of(path).axes
    inputs = [
        {**each, "shape": [name or n for name, n in zip(axes[each["name"]], each["shape"], strict=True)]}
        for each in interface
    ]
    names = {extent: name for name, extent in buckets[-1].items()}
    shown = [{**each, "shape": [names.get(extent, extent) for extent in each["shape"]]} for each in outputs]
    described = [
        {"extents": extents, "library": library.name, "weights": named, "latency_s": 0.001, "max_error": 0.0}
        for extents, library, named in zip(buckets, libraries, together.of_each, strict=True)
    ]
    limits = {name: (1, max(extents[name] for extents in buckets)) for name in buckets[0]}
    bundle.write_reference(*_reference(path), out)
    facts = bundle.of_range(bundle.facts(out, inputs, shown, cpu, fusion.ENTRY, ""), limits, described)
    found = {"precision": "model", "max_error": 0.0, "tolerance": 1e-3, "compared_with": "ONNX Runtime"}
    manifest.write(out.manifest, DIGEST, {**facts, **found}, [*libraries, out.params, out.reference])
    return out


def _reference(path: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    inputs = texts(1, 3)
    return inputs, onnxruntime.InferenceSession(path).run(None, dict(zip(("ids", "mask"), inputs, strict=True)))


def texts(batch: int, sequence: int, seed: int = 0) -> list[np.ndarray]:
    """Ids and a mask for `ranged`."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, range_files.VOCABULARY, (batch, sequence))
    mask = rng.integers(0, 2, (batch, sequence))
    mask[:, 0] = 1
    return [ids, mask]


BUCKETS = [{"batch": batch, "sequence": sequence} for batch in (1, 4) for sequence in (5, 16)]


@pytest.fixture(scope="session")
def ranged_file(tmp_path_factory) -> Path:
    return range_files.attention(tmp_path_factory.mktemp("ranged") / "mask.onnx", "mask")


@pytest.fixture(scope="session")
def ranged(cpu, tmp_path_factory, ranged_file) -> CompiledFiles:
    """Of a layer of a transformer with a mask, for one to four texts of one to sixteen tokens."""
    return range_of(ranged_file, tmp_path_factory.mktemp("ranged") / "compiled", cpu, BUCKETS)
