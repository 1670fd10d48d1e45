"""Small but whole networks, tuned by the command a user types, against ONNX Runtime."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.contracts import tables
from lib.contracts.files import RunFiles
from lib.contracts.schemas import RESULTS, SUBGRAPHS
from lib.tir.numerics import random_values, relative_error
from tests.helpers import ROOT, luigi, with_runtime


class Network:
    """An ONNX file in the making, node by node, with seeded weights."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(0)

    def add(self, operator: str, *inputs: str, **attributes: object) -> str:
        """A node; the name of its only output."""
        output = f"{operator}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def constant(self, value: object) -> str:
        name = f"weight_{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weight(self, *shape: int, spread: float = 1.0) -> str:
        return self.constant((spread * self._rng.normal(size=shape)).astype(np.float32))

    def positive(self, *shape: int) -> str:
        return self.constant(self._rng.uniform(0.5, 1.5, shape).astype(np.float32))

    def save(self, path: Path, inputs: dict[str, tuple[int, list[int]]], output: str, shape: list[int]) -> Path:
        made = helper.make_graph(
            self._nodes,
            "network",
            [helper.make_tensor_value_info(name, *described) for name, described in inputs.items()],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)],
            self._weights,
        )
        model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model)
        onnx.save(model, path)
        return path


def residual_network(path: Path) -> Path:
    """A stem with a stride and a pooling, a residual block that halves the image, a depthwise one, a classifier."""
    net = Network()

    def convolution(x: str, into: int, out: int, kernel: int, stride: int = 1, group: int = 1) -> str:
        spread = (2 / (kernel * kernel * into // group)) ** 0.5
        weight = net.weight(out, into // group, kernel, kernel, spread=spread)
        y = net.add("Conv", x, weight, strides=[stride] * 2, pads=[kernel // 2] * 4, group=group)
        norm = (net.positive(out), net.weight(out, spread=0.1), net.weight(out, spread=0.1), net.positive(out))
        return net.add("BatchNormalization", y, *norm)

    x = net.add("Relu", convolution("image", 3, 16, 7, stride=2))
    x = net.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    inner = net.add("Relu", convolution(x, 16, 32, 3, stride=2))
    x = net.add("Relu", net.add("Add", convolution(inner, 32, 32, 3), convolution(x, 16, 32, 1, stride=2)))
    x = net.add("Relu", convolution(x, 32, 32, 3, group=32))
    x = net.add("Flatten", net.add("GlobalAveragePool", x))
    y = net.add("Gemm", x, net.weight(10, 32, spread=0.2), net.weight(10), transB=1)
    return net.save(path, {"image": (TensorProto.FLOAT, [1, 3, 48, 48])}, y, [1, 10])


def detector(path: Path) -> Path:
    """Boxes of which as many are kept as overlap little; how they are laid out is an input."""
    net = Network()
    x = net.add("Relu", net.add("Conv", "image", net.weight(16, 3, 3, 3, spread=0.3), pads=[1] * 4, strides=[2, 2]))
    boxes = net.add("Reshape", net.add("Conv", x, net.weight(4, 16, 1, 1)), "layout")
    scores = net.add("Reshape", net.add("Conv", x, net.weight(5, 16, 1, 1)), net.constant(np.array([1, 5, -1])))
    limits = [net.constant(value) for value in (np.array([9]), np.float32(0.5), np.float32(0.5))]
    kept = net.add("NonMaxSuppression", boxes, net.add("Sigmoid", scores), *limits)
    places = net.add("Gather", kept, net.constant(np.array(2)), axis=1)
    y = net.add("Gather", net.add("Squeeze", boxes, net.constant(np.array([0]))), places, axis=0)
    inputs = {"image": (TensorProto.FLOAT, [1, 3, 32, 32]), "layout": (TensorProto.INT64, [3])}
    return net.save(path, inputs, y, ["n", 4])


TOKENS, WIDTH, HEADS = 24, 32, 2


def transformer(path: Path) -> Path:
    """Embeddings and one layer as BERT has it: masked attention in heads, layer norms, GELU."""
    net = Network()
    eighth = WIDTH**-0.5

    def dense(x: str, into: int, out: int) -> str:
        return net.add("Add", net.add("MatMul", x, net.weight(into, out, spread=eighth)), net.weight(out, spread=0.1))

    def norm(x: str) -> str:
        return net.add("LayerNormalization", x, net.positive(WIDTH), net.weight(WIDTH, spread=0.1), axis=-1)

    def heads(x: str, *order: int) -> str:
        split = net.add("Reshape", x, net.constant(np.array([1, TOKENS, HEADS, WIDTH // HEADS])))
        return net.add("Transpose", split, perm=order)

    x = norm(net.add("Add", net.add("Gather", net.weight(100, WIDTH), "ids"), net.weight(TOKENS, WIDTH)))
    wide = net.add("Cast", net.add("Unsqueeze", "mask", net.constant(np.array([1, 2]))), to=TensorProto.FLOAT)
    hidden = net.add("Sub", net.constant(np.float32(1)), wide)
    shift = net.add("Mul", hidden, net.constant(np.finfo(np.float32).min))
    query, key, value = (dense(x, WIDTH, WIDTH) for _ in range(3))
    scores = net.add("MatMul", heads(query, 0, 2, 1, 3), heads(key, 0, 2, 3, 1))
    scores = net.add("Div", scores, net.constant(np.float32((WIDTH // HEADS) ** 0.5)))
    shares = net.add("Softmax", net.add("Add", scores, shift), axis=-1)
    read = net.add("Transpose", net.add("MatMul", shares, heads(value, 0, 2, 1, 3)), perm=[0, 2, 1, 3])
    read = net.add("Reshape", read, net.constant(np.array([1, TOKENS, WIDTH])))
    x = norm(net.add("Add", x, dense(read, WIDTH, WIDTH)))
    inner = dense(x, WIDTH, 4 * WIDTH)
    erf = net.add("Erf", net.add("Div", inner, net.constant(np.float32(2**0.5))))
    gelu = net.add("Mul", inner, net.add("Add", erf, net.constant(np.float32(1))))
    gelu = net.add("Mul", gelu, net.constant(np.float32(0.5)))
    y = norm(net.add("Add", x, dense(gelu, 4 * WIDTH, WIDTH)))
    inputs = {name: (TensorProto.INT64, [1, TOKENS]) for name in ("ids", "mask")}
    return net.save(path, inputs, y, [1, TOKENS, WIDTH])


def infer_as_the_readme_says(folder: Path, inputs: list[np.ndarray], work: Path) -> np.ndarray:
    """Load a compiled model with the README's lines, up to its input, and run it in a process of its own."""
    [lines] = re.findall(r"```python\n(.*?)^x = ", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert '"artifacts/..."' in lines
    np.savez(work / "inputs.npz", *inputs)
    code = lines.replace('"artifacts/..."', repr(str(folder))) + (
        f"import numpy as np\ninputs = np.load({str(work / 'inputs.npz')!r}).values()\n"
        f"np.save({str(work / 'y.npy')!r}, model(*inputs))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=with_runtime())
    return np.asarray(np.load(work / "y.npy"))


@pytest.mark.parametrize(
    ("make", "operators"),
    [
        (residual_network, {"conv2d", "conv2d_1x1", "depthwise_conv2d", "max_pool", "matmul"}),
        (transformer, {"matmul", "attention", "layer_norm", "gather"}),
    ],
)
def test_a_tuned_network_computes_what_onnx_runtime_computes(tmp_path, make, operators):
    file = make(tmp_path / f"{make.__name__}.onnx")

    done = luigi(tmp_path, "TuneModel", "--model", str(file), "--trials", "8")

    assert done.returncode == 0, done.stderr
    [run] = [RunFiles(folder) for folder in (tmp_path / "artifacts").glob("*/*/runs/*")]
    manifest = json.loads(run.compiled.manifest.read_text())
    [table] = (tmp_path / "artifacts").glob("*/*/subgraphs.parquet")
    core_of = {row["subgraph_id"]: row["core_operator"] for row in tables.read(table, SUBGRAPHS).to_pylist()}
    results = tables.read(run.compiled.results, RESULTS).to_pylist()
    tuned = {core_of[row["subgraph_id"]] for row in results if row["candidate_id"]}
    inputs = [
        random_values(tuple(given["shape"]), given["dtype"], given["bound"], seed=n + 7)
        for n, given in enumerate(manifest["model_inputs"])
    ]
    session = onnxruntime.InferenceSession(file)
    [expected] = session.run(None, dict(zip([value.name for value in session.get_inputs()], inputs, strict=True)))
    assert operators <= set(core_of.values())
    assert manifest["shipped"] == "tuned"
    assert manifest["onnx"]["max_error"] < 1e-4
    assert "ONNX Runtime" in (run.folder / "report.txt").read_text()
    assert tuned & {"conv2d", "matmul"}
    assert relative_error(infer_as_the_readme_says(run.compiled.folder, inputs, tmp_path), expected) < 1e-4


def test_a_detector_whose_end_depends_on_values_keeps_what_onnx_runtime_keeps(tmp_path):
    file = detector(tmp_path / "detector.onnx")
    image = np.random.default_rng(3).normal(size=(1, 3, 32, 32)).astype(np.float32)

    done = luigi(tmp_path, "TuneModel", "--model", str(file), "--fix", "layout=1,-1,4", "--trials", "8")

    assert done.returncode == 0, done.stderr
    told = "operators (0 of 3 products and convolutions) depend on values, from NonMaxSuppression on"
    assert told in done.stderr
    [run] = [RunFiles(folder) for folder in (tmp_path / "artifacts").glob("*/*/runs/*")]
    assert told in (run.folder / "report.txt").read_text()
    assert json.loads(run.compiled.manifest.read_text())["onnx"]["max_error"] < 1e-4
    [expected] = onnxruntime.InferenceSession(file).run(None, {"image": image, "layout": np.array([1, -1, 4])})
    found = infer_as_the_readme_says(run.compiled.folder, [image], tmp_path)
    assert len(expected) > 5
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
