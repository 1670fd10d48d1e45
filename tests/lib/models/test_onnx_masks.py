"""Values put by masks, as torch's exporter writes them, against ONNX Runtime."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.contracts.errors import ModelError
from lib.models import onnx_import
from tests.helpers import computed

SHAPE = (2, 3, 4)


def file(path, updates, mask_rank=3, reduction="none", mask_type=TensorProto.BOOL):
    """x, less than zero: `ScatterND` to the places of what is so, of updates from what `updates` makes."""
    constants = {
        "zero": np.array(0, np.float32), "seven": np.array(7.5, np.float32), "flat": np.array([-1]),
        "first": np.array([0]), "second": np.array([1]), "axes": np.array([1, 2][mask_rank - 1 :]),
    }  # fmt: skip
    least = helper.make_node("ReduceMin", ["x", "axes"], ["least"], keepdims=0)
    nodes = [
        *([least] if mask_rank < 3 else []),
        helper.make_node("Less", ["least" if mask_rank < 3 else "x", "zero"], ["mask"]),
        helper.make_node("Cast", ["mask"], ["ones"], to=mask_type),
        helper.make_node("NonZero", ["ones"], ["found"]),
        helper.make_node("Transpose", ["found"], ["places"], perm=[1, 0]),
        helper.make_node("Shape", ["places"], ["size"]),
        helper.make_node("Slice", ["size", "first", "second"], ["count"]),
        *updates,
        helper.make_node("ScatterND", ["x", "places", "updates"], ["put"], reduction=reduction),
        helper.make_node("Mul", ["put", "seven"], ["y"]),
    ]  # fmt: skip
    read = {name for node in nodes for name in node.input}
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, of) for name, of in (("x", SHAPE), ("s", (5, 5)))
             if name in read]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", given, [helper.make_tensor_value_info("y", TensorProto.FLOAT, SHAPE)],
        [numpy_helper.from_array(value, name) for name, value in constants.items() if name in read],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


ONE_VALUE = [
    helper.make_node("Expand", ["seven", "count"], ["spread"]),
    helper.make_node("Reshape", ["spread", "flat"], ["updates"]),
]  # fmt: skip
IN_ORDER = [
    helper.make_node("Reshape", ["s", "flat"], ["elements"]),
    helper.make_node("Slice", ["elements", "first", "count"], ["updates"]),
]
OTHERS = [helper.make_node("GatherND", ["s", "places"], ["updates"])]
LATER = [
    helper.make_node("Reshape", ["s", "flat"], ["elements"]), helper.make_node("Add", ["count", "second"], ["end"]),
    helper.make_node("Slice", ["elements", "second", "end"], ["updates"]),
]  # fmt: skip


@pytest.mark.parametrize("mask_type", [TensorProto.BOOL, TensorProto.INT64], ids=["booleans", "numbers"])
@pytest.mark.parametrize("updates", [ONE_VALUE, IN_ORDER], ids=["one value", "elements in their order"])
def test_values_are_put_where_the_mask_says(tmp_path, cpu, updates, mask_type):
    onnxruntime = pytest.importorskip("onnxruntime")
    path = file(tmp_path / "m.onnx", updates, mask_type=mask_type)
    rng = np.random.default_rng(0)
    for x in (rng.normal(size=SHAPE), np.ones(SHAPE), -np.ones(SHAPE)):
        arrays = [x.astype(np.float32), rng.normal(size=(5, 5)).astype(np.float32)][: 1 + (updates is IN_ORDER)]
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        [expected] = session.run(None, dict(zip("xs", arrays, strict=False)))

        [found] = computed(onnx_import.load(path), cpu, *arrays)

        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_mask_of_fewer_axes_is_one_of_the_first(tmp_path, cpu, rank):
    onnxruntime = pytest.importorskip("onnxruntime")
    updates = [
        helper.make_node("Expand", ["seven", "whole"], ["spread"]),
        helper.make_node("Reshape", ["spread", "as_they_are"], ["updates"]),
    ]
    parts = [
        helper.make_node("Concat", ["count", *(f"extent_{n}" for n in range(rank, 3))], ["whole"], axis=0),
        helper.make_node("Identity", ["whole"], ["as_they_are"]),
    ]
    extents = [helper.make_node("Constant", [], [f"extent_{n}"], value_ints=[SHAPE[n]]) for n in range(rank, 3)]
    path = file(tmp_path / "m.onnx", [*extents, *parts, *updates], rank)
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32) + 1
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    [expected] = session.run(None, {"x": x})

    [found] = computed(onnx_import.load(path), cpu, x)

    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.any(found != 7.5 * x)


@pytest.mark.parametrize(
    ("updates", "reduction"),
    [(OTHERS, "none"), (LATER, "none"), (ONE_VALUE, "add")],
    ids=["others", "from the second on", "added"],
)
def test_others_are_refused(tmp_path, updates, reduction):
    with pytest.raises(ModelError, match="uses NonZero"):
        onnx_import.load(file(tmp_path / "m.onnx", updates, reduction=reduction))


@pytest.mark.parametrize("least", [0, -SHAPE[0]], ids=["from the first", "from the end, too"])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_rows_that_a_mask_chooses_are_put_and_the_others_are_not(tmp_path, cpu, reduction, least):
    """As JAX's exporter leaves out updates beyond the tensor; two of them are for the same row."""
    onnxruntime = pytest.importorskip("onnxruntime")
    nodes = [
        helper.make_node("Squeeze", ["places", "one"], ["rows"]),
        helper.make_node("GreaterOrEqual", ["rows", "least"], ["not_before"]),
        helper.make_node("Less", ["rows", "two"], ["not_after"]),
        helper.make_node("And", ["not_before", "not_after"], ["within"]),
        helper.make_node("NonZero", ["within"], ["found"]),
        helper.make_node("Transpose", ["found"], ["turned"], perm=[1, 0]),
        helper.make_node("Squeeze", ["turned", "one"], ["kept"]),
        helper.make_node("Gather", ["places", "kept"], ["those"], axis=0),
        helper.make_node("Gather", ["s", "kept"], ["updates"], axis=0),
        helper.make_node("ScatterND", ["x", "those", "updates"], ["y"], reduction=reduction),
    ]
    constants = {"one": np.array([1]), "least": np.array(least), "two": np.array(SHAPE[0])}
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE), helper.make_tensor_value_info("places",
         TensorProto.INT64, (4, 1)), helper.make_tensor_value_info("s", TensorProto.FLOAT, (4, *SHAPE[1:]))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, SHAPE)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    rng = np.random.default_rng(0)
    x, updates = (rng.normal(size=shape).astype(np.float32) for shape in (SHAPE, (4, *SHAPE[1:])))
    updates[3] = updates[1]  # which of two is put is open
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    model = onnx_import.load(path)
    for rows in ([2, 1, -2, 1], [0, 1, 5, 1], [2, 3, 4, -1]):
        places = np.array(rows)[:, None]
        [expected] = session.run(None, {"x": x, "places": places, "s": updates})

        [found] = computed(model, cpu, x, places, updates)

        np.testing.assert_allclose(found, expected, rtol=1e-6)
