"""Floats of eight bits: rounded as ONNX defines them, whatever computes with them."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.contracts.errors import ModelError
from lib.models import onnx_import
from lib.tir.numerics import relative_error
from tests.helpers import computed

KINDS = {TensorProto.FLOAT8E4M3FN: "float8_e4m3fn", TensorProto.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
         TensorProto.FLOAT8E5M2: "float8_e5m2", TensorProto.FLOAT8E5M2FNUZ: "float8_e5m2fnuz"}  # fmt: skip
RNG = np.random.default_rng(0)


def save(path, nodes, shape, weights=(), version=21):
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], list(weights),
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10), path)
    return path


def constant(name, values, kind=TensorProto.FLOAT):
    if kind == TensorProto.FLOAT:
        return numpy_helper.from_array(np.asarray(values, np.float32), name)
    narrow = np.asarray(values, np.float32).astype(getattr(ml_dtypes, KINDS[kind]))
    return helper.make_tensor(name, kind, narrow.shape, narrow.tobytes(), raw=True)


def of_onnx_runtime(path, x):
    """Without its optimisations, which make products of integers of those of such floats, and find them invalid."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


@pytest.mark.parametrize("kind", KINDS, ids=KINDS.values())
def test_a_cast_gives_the_nearest_number_that_there_is(tmp_path, cpu, kind):
    exact = getattr(ml_dtypes, KINDS[kind])
    most, least = (float(getattr(ml_dtypes.finfo(exact), name)) for name in ("max", "smallest_subnormal"))
    ties = np.arange(-2048, 2048) * least / 2  # every second one lies between two numbers
    x = np.concatenate([ties, RNG.normal(size=4096) * 10, RNG.uniform(-most, most, 4096), [0, most, -most]])
    x = x.astype(np.float32)
    nodes = [helper.make_node("Cast", ["x"], ["n"], to=kind), helper.make_node("Cast", ["n"], ["y"], to=1)]

    [found] = computed(onnx_import.load(save(tmp_path / "m.onnx", nodes, x.shape)), cpu, np.append(x[1:], x[:1]))

    np.testing.assert_array_equal(found, np.append(x[1:], x[:1]).astype(exact).astype(np.float32))


def test_what_exceeds_the_largest_number_is_that(tmp_path, cpu):
    x = np.array([449, 470, 1e9, -465, -1e30, np.inf], np.float32)
    nodes = [helper.make_node("Cast", ["x"], ["n"], to=TensorProto.FLOAT8E4M3FN),
             helper.make_node("Cast", ["n"], ["y"], to=1)]  # fmt: skip
    path = save(tmp_path / "m.onnx", nodes, x.shape)

    [found] = computed(onnx_import.load(path), cpu, x)

    np.testing.assert_array_equal(found, of_onnx_runtime(path, x))
    np.testing.assert_array_equal(found, [448, 448, 448, -448, -448, 448])


@pytest.mark.parametrize("kind", [TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2])
def test_a_quantised_product_is_that_of_onnx_runtime(tmp_path, cpu, kind):
    """A scale for each column of the weight, one for what it is multiplied with."""
    scales = RNG.uniform(0.001, 0.01, 12)
    weights = [
        constant("zero", 0.0, kind), constant("zeros", np.zeros(12), kind), constant("s", 0.02),
        constant("w", RNG.normal(size=(16, 12)) / scales / 8, kind), constant("ws", scales),
    ]  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "zeros"], ["wide"], axis=1),
        helper.make_node("MatMul", ["d", "wide"], ["y"]),
    ]
    x = RNG.normal(size=(8, 16)).astype(np.float32)
    path = save(tmp_path / "m.onnx", nodes, x.shape, weights, version=19)

    [found] = computed(onnx_import.load(path), cpu, x)

    assert relative_error(found, of_onnx_runtime(path, x)) < 1e-5
    rounded = (x / np.float32(0.02)).astype(getattr(ml_dtypes, KINDS[kind])).astype(np.float32) * np.float32(0.02)
    assert 0.01 < relative_error(x, rounded) < 0.1  # so that rounding is told from none


def test_numbers_without_a_largest_one_are_refused_by_name(tmp_path):
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "zero"], ["q"], saturate=0),
             helper.make_node("DequantizeLinear", ["q", "s", "zero"], ["y"])]  # fmt: skip
    weights = [constant("zero", 0.0, TensorProto.FLOAT8E5M2), constant("s", 0.02)]

    with pytest.raises(ModelError, match="QuantizeLinear"):
        onnx_import.load(save(tmp_path / "m.onnx", nodes, (8,), weights))
