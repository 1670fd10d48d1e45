"""Parts of a tensor from a computed place on, against ONNX Runtime."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.contracts.errors import ModelError
from lib.models import onnx_import
from tests.helpers import computed

X = np.random.default_rng(0).normal(size=(6, 5, 4)).astype(np.float32)


def file(path, sizes, axes, kind=TensorProto.INT64, steps=None, factor=None):
    """A Slice of x that begins where the input says; of sizes, or with ends that are some times that."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    constants = {"sizes": np.array(sizes, dtype), "axes": np.array(axes, dtype)}
    constants |= {} if steps is None else {"steps": np.array(steps, dtype)}
    constants |= {} if factor is None else {"factor": np.array(factor, dtype)}
    end = helper.make_node("Add", ["begin", "sizes"], ["end"])
    if factor is not None:
        end = helper.make_node("Mul", ["begin", "factor"], ["end"])
    nodes = [end, helper.make_node("Slice", ["x", "begin", "end", "axes", *(["steps"] if steps else [])], ["part"]),
             helper.make_node("Exp", ["part"], ["y"])]  # fmt: skip
    read = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape),
         helper.make_tensor_value_info("begin", kind, [len(axes)])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items() if name in read],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.parametrize("kind", [TensorProto.INT64, TensorProto.INT32], ids=["int64", "int32"])
@pytest.mark.parametrize(
    ("sizes", "axes", "begins"),
    [([2], [1], ([0], [3], [-4])), ([3, 4], [0, 2], ([0, 0], [2, 0], [3, 0])), ([1, 2], [-1, 1], ([2, 1], [-2, 0]))],
)
def test_they_are_what_onnx_runtime_takes(tmp_path, cpu, sizes, axes, begins, kind):
    path = file(tmp_path / "m.onnx", sizes, axes, kind)
    session, model = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]), onnx_import.load(path)
    for begin in begins:
        given = np.array(begin, helper.tensor_dtype_to_np_dtype(kind))
        [expected] = session.run(None, {"x": X, "begin": given})

        [found] = computed(model, cpu, X, given)

        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(("begin", "taken"), [(4, 3), (99, 3), (-9, 0)])
def test_those_that_would_leave_the_tensor_stay_within_it(tmp_path, cpu, begin, taken):
    path = file(tmp_path / "m.onnx", [2], [1])

    [found] = computed(onnx_import.load(path), cpu, X, np.array([begin]))

    np.testing.assert_allclose(found, np.exp(X[:, taken : taken + 2]), rtol=1e-6)


@pytest.mark.parametrize("given", [{"steps": [2]}, {"factor": 2}, {"sizes": [7]}], ids=str)
def test_those_of_other_extents_are_refused(tmp_path, given):
    path = file(tmp_path / "m.onnx", **{"sizes": [2], "axes": [1], **given})

    with pytest.raises(ModelError, match=r"m\.onnx uses Slice \('part'\), whose extent depends on the values"):
        onnx_import.load(path)
