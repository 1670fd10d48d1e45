import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from lib import graph, host, onnx_import, structure, workloads, zoo
from tests.helpers import gather, matmul


def cores(model, cpu):
    return {s.core_operator for s in workloads.extract(graph.fuse(model.module, cpu.tvm()))}


def conv_model(tmp_path, groups, kernel, n_in=8, n_out=8):
    """One convolution; its kind is known from the ONNX attributes."""
    weight = np.ones((n_out, n_in // groups, kernel, kernel), np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=groups, pads=[kernel // 2] * 4, strides=[1, 1])
    made = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, n_in, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, n_out, 8, 8])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path / "conv.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return onnx_import.load(path)


@pytest.mark.parametrize(
    ("groups", "kernel", "expected"),
    [(1, 3, "conv2d"), (1, 1, "conv2d_1x1"), (8, 3, "depthwise_conv2d"), (2, 3, "group_conv2d")],
)
def test_convolutions_are_told_apart_by_their_indices(tmp_path, cpu, groups, kernel, expected):
    assert expected in cores(conv_model(tmp_path, groups, kernel), cpu)


def test_a_transformers_operators_are_named(cpu: host.CpuTarget):
    found = cores(zoo.load("tiny_transformer"), cpu)

    assert found >= {"matmul", "batch_matmul", "softmax", "normalization", "gather", "data_movement"}


def test_a_product_is_a_product_whatever_its_names():
    assert structure.operators(matmul()) == ["matmul"]


def test_the_bound_of_token_ids_is_the_height_of_the_table():
    assert structure.index_bounds(gather(rows=50)["main"]) == {1: 50}


def test_floats_have_no_bound():
    assert structure.index_bounds(matmul()["main"]) == {}
