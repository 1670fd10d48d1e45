"""Matrices and tables of few bits, against NumPy in the words of their definitions, and against ONNX Runtime."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.machine import targets
from lib.machine.dots import INT8
from lib.models import onnx_import
from lib.tir import few_bits, few_bits_rows, halves
from tests import helpers

RNG = np.random.default_rng(0)
N, K = 50, 64


def packed(numbers, bits):
    """Along the last axis, the first in the lowest bits of a byte."""
    per_byte = 8 // bits
    filled = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % per_byte)])
    apart = filled.reshape(*numbers.shape[:-1], -1, per_byte).astype(np.uint8)
    return np.bitwise_or.reduce(apart << (np.arange(per_byte) * bits).astype(np.uint8), axis=-1)


def save(path, node, shape, weights, kind=TensorProto.FLOAT):
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def computed(path, x, cpu, instruction="", lanes=8):
    """The result of the imported file, the names of its kernels, and its weights."""
    model = onnx_import.load(path, instruction=instruction, lanes=lanes)
    module = fusion.fuse(model.module, cpu.tvm())
    [found] = helpers.results(module, cpu, x, *model.weights.values())
    return found, {gvar.name_hint for gvar in module.get_global_vars()}, list(model.weights.values())


def of_onnx_runtime(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


PRODUCTS = {
    "a token": ((1, 1, K), 4, 16, "none", False),
    "a token, with a bias": ((1, K), 4, 32, "none", True),
    "zero points": ((2, 1, K), 4, 32, "packed", False),
    "eight tokens": ((8, K), 4, 16, "packed", False),
    "more tokens": ((9, K), 4, 16, "packed", False),
    "scales that halves have as well": ((1, K), 4, 32, "packed", False),
    "bytes": ((3, K), 8, 32, "none", False),
    "bytes with zero points": ((1, K), 8, 16, "packed", False),
    "zero points that are floats": ((2, K), 4, 32, "floats", False),
    "a block that is not full": ((2, K - 10), 4, 32, "packed", False),
}


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_matrices_of_few_bits(tmp_path, cpu, name, lanes):
    shape, bits, block, zeros, has_bias = PRODUCTS[name]
    k = shape[-1]
    blocks = -(-k // block)
    numbers = RNG.integers(0, 1 << bits, (N, blocks, block))
    around = RNG.integers(0, 1 << bits, (N, blocks)) if zeros != "none" else np.full((N, blocks), 1 << (bits - 1))
    weights = {"b": packed(numbers, bits), "s": RNG.uniform(0.01, 0.02, (N, blocks)).astype(np.float32)}
    if "halves" in name:
        weights["s"] = weights["s"].astype(np.float16).astype(np.float32)
    names = ["x", "b", "s"]
    if zeros != "none":
        weights["z"] = packed(around, bits) if zeros == "packed" else around.astype(np.float32)
    if has_bias:
        weights["c"] = RNG.normal(size=N).astype(np.float32)
        names = ["x", "b", "s", "", "", "c"]
    elif zeros != "none":
        names.append("z")
    node = helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", K=k, N=N, bits=bits, block_size=block)
    path, x = save(tmp_path / "m.onnx", node, shape, weights), RNG.normal(size=shape).astype(np.float32)

    found, kernels, kept = computed(path, x, cpu, lanes=lanes)

    matrix = ((numbers - around[..., None]) * weights["s"][..., None].astype(np.float64)).reshape(N, -1)[:, :k]
    expected = x.astype(np.float64) @ matrix.T + weights.get("c", 0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_allclose(of_onnx_runtime(path, x), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    stays_small = np.prod(shape[:-1]) <= 8 and zeros != "floats"
    assert any(few_bits.FUNCTION in kernel for kernel in kernels) == stays_small
    assert (max(array.nbytes for array in kept) < 4 * N * k) == stays_small
    assert any(array.dtype == np.float16 for array in kept) == ("halves" in name)


ROWS = {
    "a prompt": (64, K, 32, False), "rows of the last tile": (9, K, 16, True), "whole tiles": (12, K, 32, True),
    "a block that is not full": (17, K - 10, 32, True), "one block": (10, 16, 16, False),
}  # fmt: skip


@pytest.mark.parametrize("has_instruction", [True, False])
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_rounded_to_bytes_where_a_file_allows_it(tmp_path, cpu, name, has_instruction):
    """With loops that say the same, where a CPU lacks the instruction."""
    rows, k, block, has_zeros = ROWS[name]
    blocks = -(-k // block)
    numbers = RNG.integers(0, 16, (N, blocks, block))
    around = RNG.integers(0, 16, (N, blocks)) if has_zeros else np.full((N, blocks), 8)
    weights = {"b": packed(numbers, 4), "s": RNG.uniform(0.01, 0.02, (N, blocks)).astype(np.float32)}
    if has_zeros:
        weights["z"] = packed(around, 4)
    node = helper.make_node("MatMulNBits", ["x", "b", "s", *(["z"] if has_zeros else [])], ["y"], K=k, N=N, bits=4,
                            domain="com.microsoft", block_size=block, accuracy_level=4)  # fmt: skip
    path, x = save(tmp_path / "m.onnx", node, (rows, k), weights), RNG.normal(size=(rows, k)).astype(np.float32)
    x[3] = 0

    found, kernels, kept = computed(path, x, cpu, INT8.name if has_instruction else "none")

    in_blocks = np.pad(x, [(0, 0), (0, blocks * block - k)]).reshape(rows, blocks, block)
    largest = np.maximum(np.abs(in_blocks).max(-1, keepdims=True), np.float32(1e-30))
    units = np.rint(in_blocks * (np.float32(127) / largest)).astype(np.float64)
    scaled = np.einsum("mbk,nbk->mnb", units, (numbers - around[..., None]).astype(np.float64))
    expected = (scaled * weights["s"] * largest[:, None, :, 0] / 127).sum(-1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    matrix = ((numbers - around[..., None]) * weights["s"][..., None].astype(np.float64)).reshape(N, -1)[:, :k]
    assert np.abs(found - x @ matrix.T).max() < 0.02 * np.abs(expected).max()
    assert any(few_bits_rows.FUNCTION in kernel for kernel in kernels)
    assert max(array.nbytes for array in kept) < 4 * N * k


def test_rows_are_rounded_only_where_a_file_allows_it(tmp_path, cpu):
    numbers = RNG.integers(0, 16, (N, 2, 32))
    weights = {"b": packed(numbers, 4), "s": np.full((N, 2), 0.1, np.float32)}
    node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], K=K, N=N, bits=4, domain="com.microsoft",
                            block_size=32, accuracy_level=1)  # fmt: skip
    path, x = save(tmp_path / "m.onnx", node, (20, K), weights), RNG.normal(size=(20, K)).astype(np.float32)

    found, kernels, _ = computed(path, x, cpu, INT8.name)

    assert not any(few_bits.FUNCTION in kernel for kernel in kernels)
    np.testing.assert_allclose(found, x @ (0.1 * (numbers - 8)).reshape(N, -1).T, rtol=0, atol=1e-4)


def test_what_is_rounded_counts_as_quantised(tmp_path, cpu):
    """So that it may be as far from what it is compared with as bytes are."""
    weights = {"b": packed(RNG.integers(0, 16, (N, 2, 32)), 4), "s": np.full((N, 2), 0.1, np.float32)}
    node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], K=K, N=N, bits=4, domain="com.microsoft",
                            block_size=32, accuracy_level=4)  # fmt: skip
    for rows, expected in ((20, "few_bits_int8"), (2, "few_bits")):
        path = save(tmp_path / "m.onnx", node, (rows, K), weights)
        module = fusion.fuse(onnx_import.load(path, instruction=INT8.name).module, cpu.tvm())
        assert expected in {each.core_operator for each in extract_subgraphs(module)}


@pytest.mark.parametrize(
    ("target", "expected"),
    [('{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "cascadelake"}', INT8.name),
     ('{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512"}', ""),
     ('{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "alderlake"}', "")],
)  # fmt: skip
def test_the_instruction_is_one_of_the_cpu_for_vectors_of_sixteen(target, expected):
    assert few_bits_rows.instruction(targets.cpu_target(target).tvm()) == expected


def test_on_gpus_such_a_matrix_is_widened(tmp_path):
    weights = {"b": packed(RNG.integers(0, 16, (N, 2, 32)), 4), "s": np.full((N, 2), 0.1, np.float32)}
    node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", K=K, N=N, bits=4,
                            block_size=32)  # fmt: skip
    path = save(tmp_path / "m.onnx", node, (1, K), weights)

    model = onnx_import.load(path, has_loops=False)

    assert [array.shape for array in model.weights.values()] == [(K, N)]


@pytest.mark.parametrize("kind", [0, 1])
def test_products_with_floats_of_four_bits(tmp_path, cpu, kind):
    n, block = 24, 16
    weights = {"b": RNG.integers(0, 256, n * K // 2).astype(np.uint8),
               "s": RNG.uniform(0.1, 0.2, n * K // block).astype(np.float32)}  # fmt: skip
    node = helper.make_node("MatMulBnb4", ["x", "b", "s"], ["y"], domain="com.microsoft", K=K, N=n, block_size=block,
                            quant_type=kind)  # fmt: skip
    path, x = save(tmp_path / "m.onnx", node, (3, K), weights), RNG.normal(size=(3, K)).astype(np.float32)

    found, _, _ = computed(path, x, cpu)

    np.testing.assert_allclose(found, of_onnx_runtime(path, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("bits", "has_zeros"), [(4, False), (4, True), (8, False), (8, True)])
def test_rows_of_a_table_of_few_bits(tmp_path, cpu, bits, has_zeros):
    rows, blocks, block = 30, 4, 16
    numbers = RNG.integers(0, 1 << bits, (rows, blocks * block))
    around = RNG.integers(0, 1 << bits, (rows, blocks)) if has_zeros else np.full((rows, blocks), 1 << (bits - 1))
    weights = {"t": packed(numbers, bits), "s": RNG.uniform(0.1, 0.2, (rows, blocks)).astype(np.float32)}
    if has_zeros:
        weights["z"] = packed(around, bits)
    node = helper.make_node("GatherBlockQuantized", ["t", "x", "s", *(["z"] if has_zeros else [])], ["y"],
                            domain="com.microsoft", bits=bits, block_size=block,
                            gather_axis=0, quantize_axis=1)  # fmt: skip
    path = save(tmp_path / "m.onnx", node, (2, 5), weights, TensorProto.INT64)
    x = RNG.integers(0, rows, (2, 5))

    found, _, kept = computed(path, x, cpu)

    table = (numbers.reshape(rows, blocks, block) - around[..., None]) * weights["s"][..., None].astype(np.float64)
    np.testing.assert_allclose(found, table.reshape(rows, -1)[x], rtol=0, atol=1e-5)
    assert max(array.nbytes for array in kept) < 4 * numbers.size


HALVES = {
    "a token": ("MatMul", (1, 1, 256), 320, {}, True),
    "columns that fill no vectors": ("MatMul", (1, 252), 300, {}, True),
    "a number of rows that is odd": ("MatMul", (3, 251), 320, {}, True),
    "eight rows, transposed, and a bias": ("Gemm", (8, 256), 272, {"transB": 1}, True),
    "more rows": ("MatMul", (9, 256), 320, {}, False),
    "a small matrix": ("MatMul", (1, 64), 64, {}, False),
    "a product that is scaled": ("Gemm", (1, 256), 320, {"alpha": 0.5}, False),
}


@pytest.mark.parametrize(("kind", "lanes"), [(np.float16, 8), (np.float16, 16), (ml_dtypes.bfloat16, 8)])
@pytest.mark.parametrize("name", HALVES)
def test_few_rows_times_matrices_in_halves_read_them_as_they_are(tmp_path, cpu, name, kind, lanes):
    operator, shape, n, attrs, stays_small = HALVES[name]
    matrix = RNG.normal(0, 0.1, (n, shape[-1]) if attrs.get("transB") else (shape[-1], n)).astype(kind)
    matrix.flat[0] = 1e-7  # which float16 has not as bfloat16 has it
    weights = {"w": matrix} | ({"b": RNG.normal(size=n).astype(kind)} if operator == "Gemm" else {})
    narrow = TensorProto.FLOAT16 if kind == np.float16 else TensorProto.BFLOAT16
    nodes = [helper.make_node("Cast", ["x"], ["h"], to=narrow),
             helper.make_node(operator, ["h", *weights], ["p"], **attrs),
             helper.make_node("Cast", ["p"], ["y"], to=TensorProto.FLOAT)]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, key) for key, value in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    x = RNG.normal(size=shape).astype(np.float32)

    found, kernels, kept = computed(tmp_path / "m.onnx", x, cpu, lanes=lanes)

    wide = matrix.astype(np.float64)
    expected = attrs.get("alpha", 1) * (x @ (wide.T if attrs.get("transB") else wide)) + weights.get("b", np.zeros(1))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert any(halves.FUNCTION in kernel for kernel in kernels) == stays_small
    assert any(array.dtype == kind for array in kept) == stays_small
