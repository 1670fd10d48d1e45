"""Operators as earlier versions of ONNX have them, with attributes where there are inputs now, against ONNX Runtime."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.models import onnx_import
from tests.helpers import computed

X = np.random.default_rng(0).normal(size=(2, 4, 6, 5)).astype(np.float32)


@pytest.mark.parametrize(
    ("version", "operator", "given"),
    [
        (1, "Slice", {"starts": [0, 1], "ends": [1, 3]}),
        (9, "Slice", {"axes": [2, -1], "starts": [-3, 1], "ends": [np.iinfo(np.int64).max, -1]}),
        (1, "Reshape", {"shape": [2, -1]}),
        (7, "Upsample", {"scales": [1.0, 1.0, 2.0, 3.0], "mode": "nearest"}),
        (7, "Upsample", {"scales": [1.0, 1.0, 2.0, 2.0], "mode": "linear"}),
        (9, "Upsample", {"input": np.array([1, 1, 2, 3], np.float32), "mode": "nearest"}),
        (9, "Upsample", {"input": np.array([1, 1, 2.5, 2], np.float32), "mode": "linear"}),
        (10, "Resize", {"input": np.array([1, 1, 2, 3], np.float32), "mode": "nearest"}),
        (10, "Resize", {"input": np.array([1, 1, 0.5, 2], np.float32), "mode": "linear"}),
        (2, "Pad", {"pads": [0, 0, 1, 1, 0, 0, 2, 2], "mode": "reflect"}),
        (9, "Pad", {"pads": [0, 0, 1, 1, 0, 0, 2, 2], "value": 1.5}),
        (6, "Clip", {"min": -0.5, "max": 0.5}),
        (9, "Unsqueeze", {"axes": [0, 3]}),
        (9, "ReduceSum", {"axes": [1, 2], "keepdims": 0}),
        (9, "Softmax", {"axis": 1}),
        (11, "LogSoftmax", {}),
        (9, "TopK", {"k": 3, "axis": 1}),
        (2, "Split", {"axis": 1, "split": [1, 3]}),
    ],
)
def test_operators_of_earlier_versions_agree_with_onnx_runtime(tmp_path, cpu, version, operator, given):
    outputs = ["y", "z"] if operator in ("TopK", "Split") else ["y"]
    attributes = dict(given)
    weights = [numpy_helper.from_array(attributes.pop("input"), "w")] if "input" in given else []
    node = helper.make_node(operator, ["x", *(each.name for each in weights)], outputs, **attributes)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [onnx.ValueInfoProto(name=name) for name in outputs], weights,
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=4)
    path = tmp_path / "m.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(proto), path)

    found = computed(onnx_import.load(path), cpu, X)

    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": X})
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-4, 1e-5)
