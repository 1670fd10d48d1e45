"""Weights that a file dequantises, against NumPy in the words of ONNX's definition, and against ONNX Runtime."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.graph import fusion
from lib.models import onnx_import
from lib.tir import few_bits
from tests import helpers

RNG = np.random.default_rng(0)
K, N = 288, 256
BYTES = K * N


def save(path, nodes, shape, weights, domains=(("", 23),)):
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid(*each) for each in domains]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=11), path)
    return path


def computed(path, x, cpu):
    """The result of the imported file, whether a kernel for few bits is among its kernels, and its largest weight in
    bytes."""
    model = onnx_import.load(path)
    module = fusion.fuse(model.module, cpu.tvm())
    [found] = helpers.results(module, cpu, x, *model.weights.values())
    is_kept = any(few_bits.FUNCTION in gvar.name_hint for gvar in module.get_global_vars())
    return found, is_kept, max(weight.nbytes for weight in model.weights.values())


def of_onnx_runtime(path, x):
    """As the file says: where it optimises, it rounds what such blocks are multiplied with to bytes."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def numbers(kind, shape):
    least, most = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-128, 128), "uint8": (0, 256)}[kind]
    return RNG.integers(least, most, shape).astype(getattr(ml_dtypes, kind, kind))


def spread(each, shape, axis, block):
    """Scales or zero points, one for each number."""
    each = np.asarray(each, np.float32)
    if block and each.ndim:
        index = [np.arange(n) // (block if m == axis else 1) for m, n in enumerate(shape)]
        return each[np.ix_(*index)]
    return each if each.ndim == 0 else each.reshape([-1 if n == axis else 1 for n in range(len(shape))])


# Rows, kind, shape of scales along (k, n), axis, block, zero points, how the product has it; what is read.
PRODUCTS = {
    "blocks": ((1, 1), "int4", (K // 32, N), 0, 32, False, "plain", BYTES // 2),
    "blocks with zero points": ((1, 3), "uint4", (K // 16, N), 0, 16, True, "plain", BYTES // 2),
    "a last block that is not full": ((1, 1), "uint4", (3, N), 0, 128, True, "plain", 3 * 128 * N // 2),
    "columns": ((8,), "uint4", (N,), 1, 0, True, "plain", BYTES // 2),
    "one scale": ((1,), "int4", (), 1, 0, False, "plain", BYTES // 2),
    "bytes": ((2, 2), "int8", (N,), 1, 0, False, "plain", BYTES),
    "unsigned bytes": ((1,), "uint8", (N,), 1, 0, True, "plain", BYTES),
    "transposed": ((2,), "int4", (K // 32, N), 0, 32, False, "transposed", BYTES // 2),
    "a Gemm": ((3,), "uint4", (N,), 1, 0, True, "gemm", BYTES // 2),
    "a Gemm of a transposed matrix": ((1,), "int4", (K // 32, N), 0, 32, True, "gemm transposed", BYTES // 2),
    "scales along what is summed": ((1,), "int4", (K,), 0, 0, False, "plain", None),
    "blocks along columns": ((1,), "int4", (K, N // 32), 1, 32, False, "plain", None),
    "small blocks": ((1,), "int4", (K // 8, N), 0, 8, False, "plain", None),
    "many rows": ((9,), "int4", (K // 32, N), 0, 32, False, "plain", None),
    "a Gemm in other units": ((1,), "int4", (N,), 1, 0, False, "gemm of half", None),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_few_rows_read_a_matrix_as_small_as_it_is(tmp_path, cpu, name):
    rows, kind, of_scales, axis, block, has_zeros, how, read = PRODUCTS[name]
    w = numbers(kind, (K, N))
    scales = RNG.uniform(0.01, 0.02, of_scales).astype(np.float32)
    weights = {"w": w, "s": scales}
    if has_zeros:
        weights["z"] = numbers(kind, of_scales)
    around = w.astype(np.float32) - spread(weights.get("z", 0), (K, N), axis, block)
    matrix = around * spread(scales, (K, N), axis, block)
    is_turned = "transposed" in how
    if is_turned:  # the file has (n, k)
        weights = {key: np.ascontiguousarray(value.T) for key, value in weights.items()}
        axis = 1 - axis
    given = {"block_size": block} if block else {}
    nodes = [helper.make_node("DequantizeLinear", list(weights), ["d"], axis=axis, **given)]
    if "gemm" in how:
        weights["b"] = RNG.normal(size=N).astype(np.float32)
        alpha = 0.5 if "half" in how else 1.0
        nodes.append(helper.make_node("Gemm", ["x", "d", "b"], ["y"], transB=int(is_turned), alpha=alpha))
    else:
        if is_turned:
            nodes.append(helper.make_node("Transpose", ["d"], ["t"], perm=[1, 0]))
        nodes.append(helper.make_node("MatMul", ["x", "t" if is_turned else "d"], ["y"]))
    path = save(tmp_path / "m.onnx", nodes, (*rows, K), weights)
    x = RNG.normal(size=(*rows, K)).astype(np.float32)

    found, is_kept, largest = computed(path, x, cpu)

    expected = x @ matrix * (0.5 if "half" in how else 1.0) + weights.get("b", 0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_allclose(found, of_onnx_runtime(path, x), rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert is_kept == (read is not None)
    assert largest == (read if read is not None else BYTES * 4)


@pytest.mark.parametrize("kind", ["int4", "uint4"])
def test_bytes_times_four_bits_are_a_product_of_integers(tmp_path, cpu, kind):
    w, scales = numbers(kind, (K, N)), RNG.uniform(0.01, 0.02, N).astype(np.float32)
    weights = {
        "w": w, "s": scales, "z": np.full(N, 0 if kind == "int4" else 8).astype(w.dtype),
        "xs": np.array(0.05, np.float32), "xz": np.array(130, np.uint8),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wd"], axis=1),
        helper.make_node("MatMul", ["xd", "wd"], ["y"]),
    ]
    path = save(tmp_path / "m.onnx", nodes, (2, K), weights)
    x = RNG.normal(size=(2, K)).astype(np.float32)

    found, is_kept, largest = computed(path, x, cpu)

    counted = np.clip(np.round(x / np.float32(0.05)) + 130, 0, 255) - 130
    expected = counted @ (w.astype(np.float32) - (0 if kind == "int4" else 8)) * scales * np.float32(0.05)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert not is_kept
    assert largest == BYTES  # int8


CONVOLUTIONS = {
    "four bits, a scale for each channel": ("int4", (24,), 0),
    "bytes, scales of the weight's rank but one, as NNCF has them": ("uint8", (24, 1, 1), 0),
    "blocks of channels": ("int4", (24, 2, 3, 3), 8),
    "floats of eight bits": ("float8_e4m3fn", (), 0),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_weights_of_a_convolution_count_as_the_file_says(tmp_path, cpu, name):
    kind, of_scales, block = CONVOLUTIONS[name]
    shape = (24, 16, 3, 3)
    is_float = kind.startswith("float")
    w = RNG.normal(size=shape).astype(getattr(ml_dtypes, kind)) if is_float else numbers(kind, shape)
    weights = {"w": w, "s": RNG.uniform(0.01, 0.02, of_scales).astype(np.float32)}
    if kind == "uint8":
        weights["z"] = numbers(kind, of_scales)
    axis = 1 if block else 0
    given = {"block_size": block} if block else {}
    nodes = [
        helper.make_node("DequantizeLinear", list(weights), ["d"], axis=axis, **given),
        helper.make_node("Conv", ["x", "d"], ["y"], pads=[1] * 4),
    ]
    path = save(tmp_path / "m.onnx", nodes, (1, 16, 9, 9), weights)
    x = RNG.normal(size=(1, 16, 9, 9)).astype(np.float32)
    around = w.astype(np.float32) - spread(weights.get("z", 0), shape, axis, block)
    plain = {"d": around * spread(weights["s"], shape, axis, block)}
    other = save(tmp_path / "plain.onnx", nodes[1:], (1, 16, 9, 9), plain)
    expected = of_onnx_runtime(other, x)

    found, _, _ = computed(path, x, cpu)

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_an_operator_of_onnx_runtimes_is_known_where_a_file_does_not_declare_its_domain(tmp_path, cpu):
    weights = {
        "c": np.ones(K, np.float32), "w": RNG.integers(0, 256, (N, K // 32, 16), np.uint8),
        "s": RNG.uniform(0.01, 0.02, (N, K // 32)).astype(np.float32),
    }  # fmt: skip
    nodes = [
        helper.make_node("Add", ["x", "c"], ["a"]),  # whose shape must be inferred
        helper.make_node(
            "MatMulNBits", ["a", "w", "s"], ["y"], domain="com.microsoft", K=K, N=N, bits=4, block_size=32
        ),
    ]
    undeclared = save(tmp_path / "m.onnx", nodes, (1, K), weights)
    declared = save(tmp_path / "d.onnx", nodes, (1, K), weights, domains=(("", 23), ("com.microsoft", 1)))
    x = RNG.normal(size=(1, K)).astype(np.float32)

    found, is_kept, _ = computed(undeclared, x, cpu)

    expected = of_onnx_runtime(declared, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert is_kept
