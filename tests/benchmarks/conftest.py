"""A model of one product, as a file and as stock MetaSchedule compiles it."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.helpers import ROOT

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "pool")]  # its scripts import each other so


@dataclass(frozen=True)
class Product:
    """max(x @ w, 0)."""

    onnx: Path
    weights: np.ndarray  # 64 x 32

    def reference(self, x: np.ndarray) -> np.ndarray:
        return np.maximum(x @ self.weights, 0)


def run_script(name: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run a script of benchmarks/ as a user does."""
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)]
    return subprocess.run(command, text=True, capture_output=True, timeout=240, cwd=ROOT)


@pytest.fixture(scope="session")
def product(tmp_path_factory) -> Product:
    weights = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (16, 64))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (16, 32))],
        [numpy_helper.from_array(weights, "w")],
    )
    file = tmp_path_factory.mktemp("product") / "product.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return Product(file, weights)


@pytest.fixture(scope="session")
def by_stock(product, tmp_path_factory) -> Path:
    """What stock.py leaves of it after two rounds of four trials."""
    folder = tmp_path_factory.mktemp("stock")
    rounds = ("--trials-per-subgraph", 8, "--trials-per-round", 4, "--population", 32, "--quick-imports")
    done = run_script("stock.py", "--model", product.onnx, *rounds, "--seed", 3, "--out", folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "manifest.json").read_text())["n_trials"] == 8
    return folder
