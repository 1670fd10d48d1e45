"""Small ONNX files that leave dimensions open: attention with a mask, causal, and with neither; and convolutions."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH, HEADS, VOCABULARY, LONGEST = 32, 2, 50, 64


def attention(path: Path, kind: str) -> Path:
    """A layer of a transformer over `ids` (batch, sequence), and `mask` if the kind is `mask`.

    Args:
        kind: `mask`, `causal`, or `open`: every position sees all others, those of padding too.
    """
    rng = np.random.default_rng(0)
    weights = {
        "table": rng.normal(size=(VOCABULARY, WIDTH)), "ones": np.ones(WIDTH), "zeros": np.zeros(WIDTH),
        **{name: rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5 for name in ("wq", "wk", "wv", "wo")},
        "up": rng.normal(size=(WIDTH, 2 * WIDTH)) / WIDTH**0.5, "down": rng.normal(size=(2 * WIDTH, WIDTH)) / 8,
        "positions": rng.normal(size=(LONGEST, WIDTH)), "scale": np.array(WIDTH**-0.5), "one": np.array(1.0),
        "hidden": np.array(-1e9),
    }  # fmt: skip
    constants = {name: numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in weights.items()}
    integers = {"heads": [0, 0, HEADS, WIDTH // HEADS], "joined": [0, 0, WIDTH], "axes": [1, 2], "rows": [1],
                "columns": [0], "axis": 1, "from": 0, "step": 1, "first": [0], "second": [1], "after": [2]}  # fmt: skip
    constants |= {name: numpy_helper.from_array(np.asarray(value, np.int64), name) for name, value in integers.items()}
    nodes = [helper.make_node("Gather", ["table", "ids"], ["words"]), *_places()]
    for name in "qkv":
        nodes += [
            helper.make_node("MatMul", ["x", f"w{name}"], [f"{name}0"]),
            helper.make_node("Reshape", [f"{name}0", "heads"], [f"{name}1"]),
            helper.make_node("Transpose", [f"{name}1"], [name], perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]),
        ]
    nodes += [helper.make_node("MatMul", ["q", "k"], ["s0"]), helper.make_node("Mul", ["s0", "scale"], ["s1"])]
    nodes += _hiding(kind)
    nodes += [
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["c0"]),
        helper.make_node("Transpose", ["c0"], ["c1"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["c1", "joined"], ["c2"]),
        helper.make_node("MatMul", ["c2", "wo"], ["c3"]),
        helper.make_node("Add", ["x", "c3"], ["y0"]),
        helper.make_node("LayerNormalization", ["y0", "ones", "zeros"], ["y1"]),
        helper.make_node("MatMul", ["y1", "up"], ["f0"]),
        helper.make_node("Relu", ["f0"], ["f1"]),
        helper.make_node("MatMul", ["f1", "down"], ["f2"]),
        helper.make_node("Add", ["y1", "f2"], ["states"]),
    ]
    names = ["ids", "mask"] if kind == "mask" else ["ids"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in names]
    outputs = [helper.make_tensor_value_info("states", TensorProto.FLOAT, ["batch", "sequence", WIDTH])]
    return _saved(path, nodes, inputs, outputs, list(constants.values()))


def _places() -> list[onnx.NodeProto]:
    """From `words` to `x`, with the row of its place added to each."""
    return [
        helper.make_node("Shape", ["ids"], ["extents"]),
        helper.make_node("Slice", ["extents", "second", "after"], ["length"]),
        helper.make_node("Slice", ["positions", "first", "length", "first"], ["places_of"]),
        helper.make_node("Add", ["words", "places_of"], ["x"]),
    ]


def _hiding(kind: str) -> list[onnx.NodeProto]:
    """From scores `s1` to those whose hidden positions count nothing."""
    if kind == "mask":
        return [
            helper.make_node("Unsqueeze", ["mask", "axes"], ["m0"]),
            helper.make_node("Cast", ["m0"], ["m1"], to=TensorProto.FLOAT),
            helper.make_node("Sub", ["one", "m1"], ["m2"]),
            helper.make_node("Mul", ["m2", "hidden"], ["m3"]),
            helper.make_node("Add", ["s1", "m3"], ["s"]),
        ]
    if kind == "causal":
        return [
            helper.make_node("Shape", ["ids"], ["shape"]),
            helper.make_node("Gather", ["shape", "axis"], ["n"]),
            helper.make_node("Range", ["from", "n", "step"], ["places"]),
            helper.make_node("Unsqueeze", ["places", "rows"], ["queries"]),
            helper.make_node("Unsqueeze", ["places", "columns"], ["keys"]),
            helper.make_node("LessOrEqual", ["keys", "queries"], ["seen"]),
            helper.make_node("Where", ["seen", "s1", "hidden"], ["s"]),
        ]
    return [helper.make_node("Identity", ["s1"], ["s"])]


def program(torch: ModuleType, path: Path) -> Path:
    """A layer of attention over `ids` and `mask`, whose length is open, exported by torch: two outputs."""
    nn = torch.nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, ids: Any, mask: Any) -> Any:
            x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
            heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            seen = nn.functional.scaled_dot_product_attention(heads, heads, heads, mask[:, None, None].bool())
            states = nn.functional.layer_norm(x + seen.transpose(1, 2).flatten(2), (WIDTH,))
            return self.head(states), states

    torch.manual_seed(0)
    ids = torch.zeros(1, 12, dtype=torch.int64)
    length = torch.export.Dim("length", min=2, max=LONGEST)
    shapes = ({1: length}, {1: length})
    torch.export.save(torch.export.export(Attention().eval(), (ids, torch.ones_like(ids)), dynamic_shapes=shapes), path)
    return path


def convolution(path: Path) -> Path:
    """Images `x` (batch, 3, 8, 8) to ten numbers each."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(32, 3, 3, 3)) / 5, "b": rng.normal(size=32), "last": rng.normal(size=(32, 16)) / 6}
    constants = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "last"], ["scores"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 16])]
    return _saved(path, nodes, inputs, outputs, constants)


def _saved(path, nodes, inputs, outputs, constants) -> Path:
    graph = helper.make_graph(nodes, "model", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
