"""Models whose end depends on values: the library, then ONNX Runtime; against ONNX Runtime alone on the whole file."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib import bundle
from lib.contracts.files import CompiledFiles
from lib.models import onnx_rest
from lib.runtime.family_tuner_runtime import BundleError, Model
from lib.runtime.family_tuner_runtime.__main__ import check, info
from tests.lib.runtime.conftest import bundle_of, changed

X, LEAST = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32), np.array([0.5], np.float32)


def _file(path: Path) -> Path:
    """Where products are above an input, and the products, too."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["product"]),
            helper.make_node("Greater", ["product", "least"], ["is_above"]),
            helper.make_node("NonZero", ["is_above"], ["places"]),
        ],
        "g",
        [
            helper.make_tensor_value_info("least", TensorProto.FLOAT, [1]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 8]),
        ],
        [
            helper.make_tensor_value_info("places", TensorProto.INT64, [2, "n"]),
            helper.make_tensor_value_info("product", TensorProto.FLOAT, [6, 5]),
        ],
        [numpy_helper.from_array(np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32), "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return _file(tmp_path_factory.mktemp("whole") / "whole.onnx")


@pytest.fixture(scope="module")
def compiled(cpu, file, tmp_path_factory) -> CompiledFiles:
    folder = tmp_path_factory.mktemp("rest")
    head = onnx_rest.split(file, "", folder / "split")
    rest, out = onnx_rest.of(head), bundle_of(head, folder / "compiled", cpu, [LEAST, X])
    changed(out, **bundle.with_rest(rest.file, rest.outputs, rest.told, out))
    return out


def expected(file: Path) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(file).run(None, {"x": X, "least": LEAST})


def test_a_model_with_its_rest_computes_what_its_file_does(compiled, file):
    model, (places, product) = Model(compiled.folder), expected(file)

    found = [model(LEAST, X), model(x=X, least=LEAST), model.session(threads=1)({"x": X, "least": LEAST})]

    assert [str(value) for value in model.inputs] == ["least: float32[1]", "x: float32[6, 8]"]
    assert [str(value) for value in model.outputs] == ["places: int64[2, n]", "product: float32[6, 5]"]
    assert places.shape[1] > 3
    for each in found:
        assert list(each) == ["places", "product"]
        np.testing.assert_array_equal(each["places"], places)
        np.testing.assert_allclose(each["product"], product, rtol=1e-5, atol=1e-6)


def test_without_it_the_outputs_are_the_librarys(compiled, file):
    model = Model(compiled.folder, rest=False)

    assert [value.name for value in model.outputs] == ["product"]
    np.testing.assert_allclose(model(LEAST, X), expected(file)[1], rtol=1e-5, atol=1e-6)


def test_what_is_missing_is_told(compiled, monkeypatch, tmp_path):
    bundle.pack(compiled.folder, tmp_path / "copy")
    (tmp_path / "copy" / "rest.onnx").unlink()
    with pytest.raises(BundleError, match=r"rest\.onnx is missing"):
        Model(tmp_path / "copy")

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BundleError, match=r"pip install onnxruntime\. Without: Model\(folder, rest=False\)"):
        Model(compiled.folder)
    assert Model(compiled.folder, rest=False)(LEAST, X).shape == (6, 5)


def test_what_onnx_runtime_cannot_run_is_told(compiled, tmp_path):
    copy = CompiledFiles(bundle.pack(compiled.folder, tmp_path / "copy"))
    copy.results.write_bytes(b"")
    copy.rest.write_bytes(b"no model")
    changed(copy)

    with pytest.raises(BundleError, match=r"ONNX Runtime .* cannot run .*rest\.onnx"):
        Model(copy.folder)


def test_a_packed_bundle_has_it_and_the_commands_know_it(compiled, file, tmp_path):
    folder = bundle.pack(compiled.folder, tmp_path / "copy")

    assert "rest.onnx" in json.loads((folder / "manifest.json").read_text())["files"]
    assert "its outputs differ from the reference by" in check(folder)
    assert "places: int64[2, n]; product: float32[6, 5]" in info(folder)
    assert "computed by ONNX Runtime, of product: float32[6, 5]" in info(folder)
    np.testing.assert_array_equal(Model(folder)(LEAST, X)["places"], expected(file)[0])
