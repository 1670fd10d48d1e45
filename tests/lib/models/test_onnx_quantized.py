"""Quantised files in integers: against ONNX's own definition of each operator; and what became integers of them."""

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tvm import relax

from lib.graph import fusion
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.graph.subgraphs import extract_subgraphs
from lib.machine import targets
from lib.machine.registers import registers
from lib.models import onnx_import
from lib.search.spaces import contraction
from lib.search.spaces.roles import contraction_roles
from lib.tir import analysis
from lib.tir.workload import load_module
from tests import helpers

IMAGE = (1, 6, 9, 9)
RNG = np.random.default_rng(0)
KERNEL = RNG.integers(-127, 128, (16, 6, 3, 3)).astype(np.int8)
DEPTHWISE = RNG.integers(-127, 128, (6, 1, 3, 3)).astype(np.int8)
MATRIX = RNG.integers(-127, 128, (10, 20)).astype(np.int8)
SCALES = RNG.uniform(0.002, 0.01, 16).astype(np.float32)
BIAS = RNG.integers(-3000, 3000, 16).astype(np.int32)


def dequantized(name, scale="sx", zero="zx", **attrs):
    return helper.make_node("DequantizeLinear", [name, scale, zero], [f"{name}_f"], **attrs)


def quantized(name, out, scale="sx", zero="zx"):
    return helper.make_node("QuantizeLinear", [name, scale, zero], [out])


def file(path, nodes, shape, weights, outputs=(("y", TensorProto.FLOAT),), domains=()):
    """An ONNX file with one input `x` in floats, quantised with the scale 0.03 around 120 as `x_q`."""
    given = {"sx": np.array(0.03, np.float32), "zx": np.array(120, np.uint8), "zw": np.zeros(16, np.int8),
             "sw": SCALES, "sb": (np.float32(0.03) * SCALES).astype(np.float32), "zb": np.zeros(16, np.int32),
             "s1": np.array(0.004, np.float32), "z1": np.array(0, np.int8), **weights}  # fmt: skip
    read = {name for node in nodes for name in node.input} | {"sx", "zx"}
    made = helper.make_graph(
        [quantized("x", "x_q"), *nodes], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs],
        [numpy_helper.from_array(value, name) for name, value in given.items() if name in read],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 19), *(helper.make_opsetid(domain, 1) for domain in domains)]
    onnx.save(helper.make_model(made, opset_imports=opsets, ir_version=9), path)
    return path


def x86(mcpu):
    return targets.cpu_target(f'{{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "{mcpu}"}}')


OF_BYTES, IN_PAIRS, IN_FLOATS = map(x86, ("icelake-server", "haswell", "sandybridge"))  # what these multiply
OF_SMALL = x86("skylake-avx512")  # bytes with small weights, else floats


def in_pairs(operators):
    """What operators of bytes are where pairs are multiplied."""
    return {"depthwise_conv2d" if "depthwise" in each else each.replace("_int8", "_int16") for each in operators}


def found_in(path, x, cpu, made_for=OF_BYTES):
    """The results of the imported file, run without schedules, and the core operators of its kernels.

    Args:
        made_for: The target whose instructions decide how bytes are multiplied; this CPU runs them all.
    """
    model = choose_algorithms(onnx_import.load(path), made_for, AlgorithmConfig())
    module = fusion.fuse(model.module, cpu.tvm())
    found = helpers.results(module, cpu, x, *model.weights.values())
    return found, {s.core_operator for s in extract_subgraphs(module)}


def image(shape=IMAGE):
    return np.random.default_rng(1).normal(0, 1.5, shape).astype(np.float32)


CONVOLUTION = [
    dequantized("x_q"), dequantized("w", "sw", "zw", axis=0), dequantized("b", "sb", "zb", axis=0),
]  # fmt: skip
CONV = ["x_q_f", "w_f", "b_f"]
LAST = [quantized("c", "y_q", "s9", "z9"), helper.make_node("DequantizeLinear", ["y_q", "s9", "z9"], ["y"])]
S9 = {"s9": np.array(0.05, np.float32), "z9": np.array(131, np.uint8)}


def convolved(**attrs):
    return [*CONVOLUTION, helper.make_node("Conv", CONV, ["c"], **attrs), *LAST]


TWO = [
    dequantized("x_q"), helper.make_node("Transpose", ["x_q_f"], ["t"], perm=[0, 2, 1]),
    helper.make_node("MatMul", ["x_q_f", "t"], ["c"]), *LAST,
]  # fmt: skip

CASES = {
    "conv": (convolved(pads=[1, 1, 1, 1]), IMAGE, {"w": KERNEL, "b": BIAS, **S9}, {"conv2d_int8"}),
    "strides": (
        convolved(pads=[1, 0, 2, 1], strides=[2, 2], dilations=[2, 1]), IMAGE, {"w": KERNEL, "b": BIAS, **S9},
        {"conv2d_int8"},
    ),
    "one scale": (
        [dequantized("x_q"), dequantized("w", "s1", "z1"), helper.make_node("Conv", CONV[:2], ["c"]), *LAST],
        IMAGE, {"w": KERNEL, **S9}, {"conv2d_int8"},
    ),
    "unsigned weights around 128": (
        [dequantized("x_q"), dequantized("w", "s1", "z128"), helper.make_node("Conv", CONV[:2], ["c"]), *LAST],
        IMAGE, {"w": (KERNEL.astype(np.int16) + 128).astype(np.uint8), "z128": np.array(128, np.uint8), **S9},
        {"conv2d_int8"},
    ),
    "depthwise": (
        [dequantized("x_q"), dequantized("w", "s1", "z1"),
         helper.make_node("Conv", CONV[:2], ["c"], group=6, pads=[1, 1, 1, 1]), *LAST],
        IMAGE, {"w": DEPTHWISE, **S9}, {"depthwise_conv2d_int8"},
    ),
    "groups, with zero points around the image": (
        [dequantized("x_q"), dequantized("w", "s1", "z1"),
         helper.make_node("Conv", CONV[:2], ["c"], group=3, pads=[1, 1, 1, 1]), *LAST],
        IMAGE, {"w": RNG.integers(-127, 128, (12, 2, 3, 3)).astype(np.int8), **S9}, {"group_conv2d_int8"},
    ),
    "relu and pool": (
        [*CONVOLUTION, helper.make_node("Conv", CONV, ["a"]), helper.make_node("Relu", ["a"], ["r"]),
         quantized("r", "r_q", "s9", "z0"), dequantized("r_q", "s9", "z0"),
         helper.make_node("MaxPool", ["r_q_f"], ["p"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
         quantized("p", "p_q", "s9", "z0"), helper.make_node("DequantizeLinear", ["p_q", "s9", "z0"], ["y"])],
        IMAGE, {"w": KERNEL, "b": BIAS, **S9, "z0": np.array(0, np.uint8)}, {"conv2d_int8", "max_pool"},
    ),
    "residual": (
        [dequantized("x_q"), dequantized("w", "s1", "z1"),
         helper.make_node("Conv", CONV[:2], ["a"], pads=[1, 1, 1, 1], group=6), quantized("a", "a_q", "s9", "z9"),
         dequantized("a_q", "s9", "z9"), helper.make_node("Add", ["a_q_f", "x_q_f"], ["c"]), *LAST],
        IMAGE, {"w": DEPTHWISE, **S9}, {"depthwise_conv2d_int8"},
    ),
    "two contractions": (
        [dequantized("x_q"), dequantized("w", "s1", "z1"), dequantized("v", "s1", "z1"),
         helper.make_node("Conv", CONV[:2], ["a"], pads=[1, 1, 1, 1]), quantized("a", "a_q", "s9", "z9"),
         dequantized("a_q", "s9", "z9"), helper.make_node("Conv", ["x_q_f", "v_f"], ["b"]),
         quantized("b", "b_q", "s8", "z8"), dequantized("b_q", "s8", "z8"),
         helper.make_node("Add", ["a_q_f", "b_q_f"], ["c"]), *LAST],
        IMAGE, {"w": KERNEL, "v": RNG.integers(-127, 128, (16, 6, 1, 1)).astype(np.int8),
                "s8": np.array(0.0613, np.float32), "z8": np.array(126, np.uint8), **S9},
        {"conv2d_int8", "conv2d_1x1_int8"},
    ),
    "the same, joined twice in other units": (
        [dequantized("x_q"), dequantized("w", "sw", "zw", axis=0),
         helper.make_node("Conv", CONV[:2], ["a"], pads=[1, 1, 1, 1]),
         quantized("a", "a_q", "s9", "z9"), dequantized("a_q", "s9", "z9"),
         helper.make_node("Concat", ["a_q_f", "x_q_f"], ["i"], axis=1), quantized("i", "i_q", "s8", "z8"),
         helper.make_node("Concat", ["x_q_f", "a_q_f"], ["j"], axis=1), quantized("j", "j_q", "s7", "z7"),
         dequantized("i_q", "s8", "z8"), dequantized("j_q", "s7", "z7"), dequantized("v", "s1", "z1"),
         helper.make_node("Conv", ["i_q_f", "v_f"], ["d"]), helper.make_node("Conv", ["j_q_f", "v_f"], ["e"]),
         helper.make_node("Add", ["d", "e"], ["c"]), *LAST],
        IMAGE, {"w": KERNEL, "v": RNG.integers(-127, 128, (8, 22, 1, 1)).astype(np.int8),
                "s8": np.array(0.0613, np.float32), "z8": np.array(126, np.uint8),
                "s7": np.array(0.0537, np.float32), "z7": np.array(117, np.uint8), **S9},
        {"conv2d_int8", "conv2d_1x1_int8"},
    ),
    "concatenation": (
        [dequantized("x_q"), dequantized("w", "s1", "z1"), helper.make_node("Conv", CONV[:2], ["a"]),
         quantized("a", "a_q", "s9", "z9"), dequantized("a_q", "s9", "z9"),
         helper.make_node("MaxPool", ["x_q_f"], ["m"], kernel_shape=[3, 3]),
         helper.make_node("Concat", ["a_q_f", "m"], ["c"], axis=1), quantized("c", "c_q", "s8", "z8"),
         dequantized("c_q", "s8", "z8"), dequantized("v", "s1", "z1"),
         helper.make_node("Conv", ["c_q_f", "v_f"], ["d"]),
         quantized("d", "y_q", "s9", "z9"), helper.make_node("DequantizeLinear", ["y_q", "s9", "z9"], ["y"])],
        IMAGE, {"w": KERNEL, "v": RNG.integers(-127, 128, (8, 22, 1, 1)).astype(np.int8),
                "s8": np.array(0.0613, np.float32), "z8": np.array(126, np.uint8), **S9},
        {"conv2d_int8", "conv2d_1x1_int8", "max_pool"},
    ),
    "depthwise with strides, and zero points around the image": (
        [dequantized("x_q"), dequantized("w", "s1", "z1"),
         helper.make_node("Conv", CONV[:2], ["c"], group=6, pads=[0, 1, 1, 2], strides=[2, 2]), *LAST],
        IMAGE, {"w": DEPTHWISE, **S9}, {"depthwise_conv2d_int8"},
    ),
    "signed activations": (
        [helper.make_node("QuantizeLinear", ["x", "sx", "z8"], ["s_q"]), dequantized("s_q", "sx", "z8"),
         dequantized("w", "s1", "z1"), helper.make_node("Conv", ["s_q_f", "w_f"], ["c"], pads=[1, 1, 1, 1]), *LAST],
        IMAGE, {"w": KERNEL, "z8": np.array(-7, np.int8), **S9}, {"conv2d_int8"},
    ),
    "product": (
        [dequantized("x_q"), dequantized("w", "s1", "z1"), helper.make_node("MatMul", CONV[:2], ["c"]), *LAST],
        (2, 5, 10), {"w": MATRIX, **S9}, {"matmul_int8"},
    ),
    "dense layer with transposed weights": (
        [dequantized("x_q"), dequantized("w", "s20", "z20", axis=0),
         helper.make_node("Gemm", CONV[:2], ["c"], transB=1), *LAST],
        (5, 10), {"w": np.ascontiguousarray(MATRIX.T), "s20": np.resize(SCALES, 20), "z20": np.zeros(20, np.int8),
                  **S9}, {"matmul_int8"},
    ),
    "weights of another zero point": (
        [dequantized("x_q"), dequantized("w", "s1", "z3"), helper.make_node("MatMul", CONV[:2], ["c"]), *LAST],
        (5, 10), {"w": MATRIX, "z3": np.array(3, np.int8), **S9}, {"matmul_int8"},
    ),
    "weights of a zero point for each channel": (
        [*CONVOLUTION, helper.make_node("Conv", CONV, ["c"], pads=[1, 2, 1, 0], strides=[2, 1]), *LAST],
        IMAGE, {"w": KERNEL, "b": BIAS, "zw": np.arange(-8, 8).astype(np.int8), **S9},
        {"conv2d_int8", "conv2d"},  # the latter sums windows of one channel
    ),
    "groups whose weights have another zero point stay in floats": (
        [dequantized("x_q"), dequantized("w", "s1", "z3"), helper.make_node("Conv", CONV[:2], ["c"], group=3), *LAST],
        IMAGE, {"w": RNG.integers(-127, 128, (12, 2, 3, 3)).astype(np.int8), "z3": np.array(3, np.int8), **S9},
        {"group_conv2d"},
    ),
    "two activations": (TWO, (2, 8, 10), S9, {"batch_matmul_int8"}),
    "two activations around zero": (
        [helper.make_node("QuantizeLinear", ["x", "sx", "z8"], ["s_q"]), dequantized("s_q", "sx", "z8"),
         helper.make_node("Transpose", ["s_q_f"], ["t"], perm=[0, 2, 1]),
         helper.make_node("MatMul", ["s_q_f", "t"], ["c"]), *LAST],
        (2, 16, 12), {"z8": np.array(0, np.int8), **S9}, {"batch_matmul_int8"},
    ),
    "two activations whose columns fill no vectors stay in floats": (TWO, (2, 5, 10), S9, {"batch_matmul"}),
    "QLinearConv": (
        [helper.make_node("QLinearConv", ["x_q", "sx", "zx", "w", "sw", "zw", "s9", "z9", "b"], ["y_q"],
                          pads=[1, 1, 1, 1]), helper.make_node("DequantizeLinear", ["y_q", "s9", "z9"], ["y"])],
        IMAGE, {"w": KERNEL, "b": BIAS, **S9}, {"conv2d_int8"},
    ),
    "QLinearMatMul": (
        [helper.make_node("QLinearMatMul", ["x_q", "sx", "zx", "w", "s1", "z1", "s9", "z9"], ["y_q"]),
         helper.make_node("DequantizeLinear", ["y_q", "s9", "z9"], ["y"])],
        (5, 10), {"w": MATRIX, **S9}, {"matmul_int8"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_within_a_quantum_of_its_definition_and_its_contractions_are_of_bytes(tmp_path, cpu, name):
    nodes, shape, weights, operators = CASES[name]
    path, x = file(tmp_path / "q.onnx", nodes, shape, weights), image(shape)
    [expected] = ReferenceEvaluator(str(path)).run(None, {"x": x})

    [found], kernels = found_in(path, x, cpu)

    off = np.abs(found.astype(np.float64) - expected) / 0.05
    assert off.max() < 1.01
    assert np.mean(off > 0.01) <= 2e-3
    assert np.ptp(expected) > 1
    assert operators <= kernels
    assert not {kernel for kernel in kernels if ("conv" in kernel or "matmul" in kernel) and kernel not in operators}


@pytest.mark.parametrize("made_for", [IN_FLOATS, OF_SMALL], ids=["AVX", "AVX-512"])
@pytest.mark.parametrize("name", ["conv", "depthwise", "product", "two activations"])
def test_without_an_instruction_for_bytes_contractions_are_of_floats_and_compute_the_same(
    tmp_path, cpu, name, made_for
):
    nodes, shape, weights, _ = CASES[name]
    path, x = file(tmp_path / "q.onnx", nodes, shape, weights), image(shape)
    [expected] = ReferenceEvaluator(str(path)).run(None, {"x": x})

    [found], kernels = found_in(path, x, cpu, made_for)

    assert np.mean(np.abs(found - expected) > 1e-3) <= 2e-3
    assert not any(kernel.endswith(("_int8", "_int16")) for kernel in kernels)


@pytest.mark.parametrize("name", CASES)
def test_with_an_instruction_for_pairs_they_are_of_these_and_compute_the_same(tmp_path, cpu, name):
    nodes, shape, weights, operators = CASES[name]
    path, x = file(tmp_path / "q.onnx", nodes, shape, weights), image(shape)
    [expected], _ = found_in(path, x, cpu)

    [found], kernels = found_in(path, x, cpu, IN_PAIRS)

    np.testing.assert_array_equal(found, expected)
    assert in_pairs(operators) <= kernels
    assert not any(kernel.endswith("_int8") for kernel in kernels)


@pytest.mark.parametrize("made_for", [IN_PAIRS, OF_SMALL], ids=["AVX2", "AVX-512"])
@pytest.mark.parametrize("share", [2, 4])
@pytest.mark.parametrize("name", ["conv", "strides", "one scale", "concatenation", "product"])
def test_of_seven_bits_they_stay_bytes_and_compute_the_same(tmp_path, cpu, name, share, made_for):
    nodes, shape, weights, operators = CASES[name]
    smaller = {each: (values // share if values.dtype == np.int8 and values.ndim > 1 else values)
              for each, values in weights.items()}  # fmt: skip
    path, x = file(tmp_path / "q.onnx", nodes, shape, smaller), image(shape)
    [expected], _ = found_in(path, x, cpu)

    [found], kernels = found_in(path, x, cpu, made_for)

    np.testing.assert_array_equal(found, expected)
    assert operators <= kernels
    assert not any(kernel.endswith("_int16") for kernel in kernels)


def test_one_pair_of_weights_that_is_too_large_makes_pairs_or_floats_of_a_layer(tmp_path, cpu):
    nodes, shape, weights, operators = CASES["strides"]
    kernel = KERNEL // 2
    kernel[3, 2:4, 1, 1] = 64, 65
    path = file(tmp_path / "q.onnx", nodes, shape, {**weights, "w": kernel})

    _, kernels = found_in(path, image(shape), cpu, IN_PAIRS)
    _, others = found_in(path, image(shape), cpu, OF_SMALL)

    assert in_pairs(operators) <= kernels
    assert "conv2d" in others


def test_convolutions_of_small_weights_are_of_floats_where_winograds_way_is_faster(tmp_path, cpu):
    """Of 96 channels less than a third of the multiplications is left; of 8, transforms take more than they save."""
    for channels, operator in ((96, "winograd_conv2d"), (8, "conv2d_int8")):
        kernel = RNG.integers(-63, 64, (channels, channels, 3, 3)).astype(np.int8)
        nodes = [dequantized("x_q"), dequantized("w", "s1", "z1"), helper.make_node("Conv", CONV[:2], ["c"]), *LAST]
        shape = (1, channels, 26, 26)
        path, x = file(tmp_path / "q.onnx", nodes, shape, {"w": kernel, **S9}), image(shape)
        [expected], _ = found_in(path, x, cpu)

        [found], kernels = found_in(path, x, cpu, OF_SMALL)

        assert operator in kernels
        assert np.mean(np.abs(found - expected) > 1e-3) <= 2e-3  # a rounding to the other side


def test_bytes_that_all_readers_widen_are_stored_so_by_who_makes_them(tmp_path):
    """As around a residual block, whose sum reads floats of what its convolution reads pairs of."""
    nodes = [
        dequantized("x_q"), dequantized("w", "s1", "z1"), dequantized("v", "s1", "z1"),
        helper.make_node("Conv", CONV[:2], ["a"], pads=[1, 1, 1, 1]), quantized("a", "a_q", "s9", "z9"),
        dequantized("a_q", "s9", "z9"), helper.make_node("Conv", ["a_q_f", "v_f"], ["b"]),
        helper.make_node("Add", ["b", "a_q_f"], ["c"]), *LAST,
    ]  # fmt: skip
    weights = {"w": KERNEL, "v": RNG.integers(-127, 128, (16, 16, 1, 1)).astype(np.int8), **S9}
    path = file(tmp_path / "q.onnx", nodes, IMAGE, weights)
    model = choose_algorithms(onnx_import.load(path), IN_PAIRS, AlgorithmConfig())

    subgraphs = extract_subgraphs(fusion.fuse(model.module, IN_PAIRS.tvm()))

    read = [[str(param.ty.dtype) for param in tvm.ir.load_json(each.workload)["main"].params] for each in subgraphs]
    assert sum(each.core_operator.endswith("_int16") for each in subgraphs) == 2
    assert not any("uint8" in kinds for kinds in read)


# Their instructions multiply signed bytes by signed ones: one that adds them, and three for what another one adds.
PI, OLD_PI = (targets.cpu_target(f"raspberry-pi/{name}") for name in ("5", "4b-aarch64"))


@pytest.mark.parametrize("board", [PI, OLD_PI], ids=["5", "4"])
@pytest.mark.parametrize(
    "name",
    ["conv", "strides", "groups, with zero points around the image", "relu and pool", "concatenation", "product"],
)
def test_where_an_instruction_takes_signed_bytes_alone_contractions_are_of_these_and_compute_the_same(
    tmp_path, cpu, name, board
):
    nodes, shape, weights, operators = CASES[name]
    path, x = file(tmp_path / "q.onnx", nodes, shape, weights), image(shape)

    [found], kernels = found_in(path, x, cpu, board)

    [expected], _ = found_in(path, x, cpu)
    np.testing.assert_array_equal(found, expected)
    if board is OLD_PI:  # groups have two channels, which fill no word
        operators = {each.replace("group_conv2d_int8", "group_conv2d") for each in operators}
    assert operators <= kernels


@pytest.mark.parametrize(("board", "instruction"), [(PI, "sdot"), (OLD_PI, "smull")], ids=["5", "4"])
@pytest.mark.parametrize("name", ["conv", "product", "concatenation"])
def test_and_no_unsigned_ones_are_left_for_these_to_read(tmp_path, name, board, instruction):
    nodes, shape, weights, _ = CASES[name]
    path = file(tmp_path / "q.onnx", nodes, shape, weights)

    model = choose_algorithms(onnx_import.load(path), board, AlgorithmConfig())

    subgraphs = extract_subgraphs(fusion.fuse(model.module, board.tvm()))
    mains = [tvm.ir.load_json(each.workload)["main"] for each in subgraphs if each.core_operator.endswith("_int8")]
    assert mains
    for main in mains:
        assert [str(param.ty.dtype) for param in main.params[:2]] == ["int8", "int8"]
        found = [_instruction(main, block, board) for block in analysis.leaf_blocks(main)]
        assert [dot.name for dot in found if dot is not None] == [instruction]


def _instruction(main, block, board):
    roles = contraction_roles(block)
    return contraction.instruction(main, block, roles, registers(board.tvm())) if roles else None


def test_two_neighbours_that_are_minus_128_make_floats_of_a_layer_where_sums_of_products_have_16_bits(tmp_path, cpu):
    nodes, shape, weights, operators = CASES["strides"]
    for least, expected in ((-127, operators), (-128, {"conv2d"})):
        kernel = KERNEL.copy()
        kernel[3, 2:4, 1, 1] = -128, least
        path = file(tmp_path / "q.onnx", nodes, shape, {**weights, "w": kernel})

        _, kernels = found_in(path, image(shape), cpu, OLD_PI)

        assert expected <= kernels


def test_two_activations_are_multiplied_in_floats_there(tmp_path, cpu):
    nodes, shape, weights, _ = CASES["two activations"]
    path, x = file(tmp_path / "q.onnx", nodes, shape, weights), image(shape)
    [expected], _ = found_in(path, x, cpu)

    [found], kernels = found_in(path, x, cpu, PI)

    np.testing.assert_allclose(found, expected, atol=0.051)
    assert "batch_matmul" in kernels


INTEGERS = {
    "ConvInteger": (IMAGE, KERNEL, "zx", {}),
    "ConvInteger with padding": (IMAGE, KERNEL, "zx", {"pads": [1, 1, 1, 1]}),
    "MatMulInteger": ((5, 10), MATRIX, "zx", {}),
    "MatMulInteger of an even older kind": ((5, 10), MATRIX, "", {}),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_sums_of_integers_are_exact(tmp_path, cpu, name):
    shape, weight, zero, attrs = INTEGERS[name]
    node = helper.make_node(name.split()[0], ["x_q", "w", *([zero] if zero else [])], ["y"], **attrs)
    path, x = file(tmp_path / "q.onnx", [node], shape, {"w": weight}, [("y", TensorProto.INT32)]), image(shape)
    [expected] = ReferenceEvaluator(str(path)).run(None, {"x": x})

    for made_for in (OF_BYTES, IN_PAIRS, PI, OLD_PI):
        [found], kernels = found_in(path, x, cpu, made_for)

        np.testing.assert_array_equal(found, expected)
        assert any(kernel.endswith("_int16" if made_for is IN_PAIRS else "_int8") for kernel in kernels)


PIXEL = RNG.integers(0, 256, (16, 6, 1, 1)).astype(np.uint8)
UNSIGNED, CHANNELS = RNG.integers(0, 256, (16, 6, 3, 3)).astype(np.uint8), RNG.integers(0, 256, (6, 1, 3, 3))
COLUMNS = RNG.integers(90, 160, 20).astype(np.uint8)
DYNAMIC = {
    "a product": ((5, 10), MATRIX, np.zeros((), np.int8), {}, {"matmul_int8"}),
    "a product with zero points of columns": (
        (5, 10), (MATRIX.astype(np.int16) + 128).astype(np.uint8), COLUMNS, {}, {"matmul_int8"},
    ),
    "a convolution": (IMAGE, UNSIGNED, np.array(131, np.uint8), {}, {"conv2d_int8"}),
    "a convolution with padding and strides": (
        IMAGE, UNSIGNED, np.array(120, np.uint8), {"pads": [1, 1, 2, 0], "strides": [2, 1]}, {"conv2d_int8"},
    ),
    "of pixels": (IMAGE, PIXEL, np.array(131, np.uint8), {}, {"conv2d_1x1_int8"}),
    "of every other pixel": (IMAGE, PIXEL, np.array(131, np.uint8), {"strides": [2, 2]}, {"conv2d_1x1_int8"}),
    "depthwise": (
        IMAGE, CHANNELS.astype(np.uint8), np.array(140, np.uint8), {"pads": [1, 1, 1, 1], "group": 6},
        {"depthwise_conv2d_int8"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DYNAMIC)
def test_what_is_quantised_when_it_is_known_is_multiplied_in_bytes(tmp_path, cpu, name):
    """Against float64: sums of bytes are exact."""
    shape, weight, zero, attrs, kernels = DYNAMIC[name]
    kind = "MatMul" if weight.ndim == 2 else "Conv"
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["d", "ds", "dz"]),
        helper.make_node(f"{kind}Integer", ["d", "w", "dz", "z"], ["i"], **attrs),
        helper.make_node("Cast", ["i"], ["f"], to=1), helper.make_node("Mul", ["f", "ds"], ["y"]),
    ]  # fmt: skip
    x = image(shape) + 0.3
    path = file(tmp_path / "q.onnx", nodes, shape, {"w": weight, "z": zero})
    least, most = min(x.min(), 0), max(x.max(), 0)
    scale = np.float32((most - least) / np.float32(255))
    zero_x = np.rint(np.clip(-least / scale, 0, 255))
    centred = np.clip(np.rint(x / scale) + zero_x, 0, 255) - zero_x
    plain = helper.make_node(kind, ["a", "b"], ["y"], **attrs)
    of_floats = helper.make_graph(
        [plain], "g", [helper.make_tensor_value_info(n, TensorProto.DOUBLE, None) for n in "ab"],
        [helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)],
    )  # fmt: skip
    around = zero.astype(np.int64) if kind == "MatMul" else zero.astype(np.int64).reshape(())
    [expected] = ReferenceEvaluator(helper.make_model(of_floats, opset_imports=[helper.make_opsetid("", 18)])).run(
        None, {"a": centred.astype(np.float64), "b": (weight.astype(np.int64) - around).astype(np.float64)}
    )

    for made_for in (OF_BYTES, IN_PAIRS, PI, OLD_PI):
        [found], operators = found_in(path, x, cpu, made_for)

        np.testing.assert_allclose(found, expected * scale, rtol=1e-5, atol=1e-5 * np.abs(expected).max() * scale)
        assert made_for in (PI, OLD_PI) or (in_pairs(kernels) if made_for is IN_PAIRS else kernels) <= operators


def test_scales_that_differ_make_no_subgraph_of_their_own(tmp_path, cpu):
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["d", "ds", "dz"])]
    for n, scale in enumerate(("sa", "sb")):
        nodes += [
            helper.make_node("MatMulInteger", ["d", "w", "dz"], [f"i{n}"]),
            helper.make_node("Cast", [f"i{n}"], [f"f{n}"], to=1),
            helper.make_node("Mul", ["ds", scale], [f"s{n}"]), helper.make_node("Mul", [f"f{n}", f"s{n}"], [f"y{n}"]),
        ]  # fmt: skip
    scales = {"sa": np.array(0.01, np.float32), "sb": np.array(0.02, np.float32)}
    outputs = [("y0", TensorProto.FLOAT), ("y1", TensorProto.FLOAT)]
    path = file(tmp_path / "q.onnx", nodes, (5, 10), {"w": MATRIX, **scales}, outputs)
    module = fusion.fuse(choose_algorithms(onnx_import.load(path), OF_BYTES, AlgorithmConfig()).module, cpu.tvm())

    products = [each for each in extract_subgraphs(module) if each.core_operator == "matmul_int8"]

    assert len(products) == 1


def test_files_of_onnx_runtimes_own_operators_compute_what_it_computes(tmp_path, cpu):
    onnxruntime = pytest.importorskip("onnxruntime")
    nodes = [
        helper.make_node("QLinearConv", ["x_q", "sx", "zx", "w", "sw", "zw", "s9", "z9", "b"], ["c_q"]),
        helper.make_node("QLinearAdd", ["c_q", "s9", "z9", "c_q", "s9", "z9", "sx", "zx"], ["a_q"],
                         domain="com.microsoft"),
        helper.make_node("QLinearGlobalAveragePool", ["a_q", "sx", "zx", "s9", "z9"], ["p_q"], domain="com.microsoft"),
        helper.make_node("Flatten", ["p_q"], ["f_q"]),
        helper.make_node("QGemm", ["f_q", "s9", "z9", "m", "s1", "z1", "mb"], ["y"], domain="com.microsoft"),
    ]  # fmt: skip
    weights = {"w": KERNEL, "b": BIAS, "m": np.resize(MATRIX, (16, 20)), "mb": np.resize(BIAS, 20), **S9}
    path = file(tmp_path / "q.onnx", nodes, IMAGE, weights, domains=["com.microsoft"])
    x = image()
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # else sums of two may not fit 16 bits
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    [expected] = session.run(None, {"x": x})

    [found], kernels = found_in(path, x, cpu)

    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
    assert {"conv2d_int8", "matmul_int8"} <= kernels


SCALED = ["sx", "zx", "s9", "z9"]  # of data, and of what is made of it
QLINEAR = {
    "sigmoid": ("QLinearSigmoid", ["x_q", "sx", "zx", "s8", "z8"], {}),
    "leaky": ("QLinearLeakyRelu", ["x_q", *SCALED], {"alpha": 0.2}),
    "softmax": ("QLinearSoftmax", ["x_q", "sx", "zx", "s8", "z8"], {"axis": -1, "opset": 13}),
    "pool": ("QLinearAveragePool", ["x_q", *SCALED], {"kernel_shape": [3, 3], "strides": [2, 2]}),
    "concat": ("QLinearConcat", ["s9", "z9", "x_q", "sx", "zx", "x_q", "s8", "z8"], {"axis": 1}),
    "where": ("QLinearWhere", ["w", "x_q", "sx", "zx", "x_q", "s8", "z8", "s9", "z9"], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", QLINEAR)
def test_onnx_runtimes_other_operators_on_bytes(tmp_path, cpu, name):
    onnxruntime = pytest.importorskip("onnxruntime")
    operator, names, attrs = QLINEAR[name]
    scale = ["s8", "z8"] if "s8" in names[3:5] and name != "concat" else ["s9", "z9"]
    nodes = [helper.make_node(operator, names, ["o_q"], domain="com.microsoft", **attrs),
             helper.make_node("DequantizeLinear", ["o_q", *scale], ["y"])]  # fmt: skip
    weights = {**S9, "s8": np.array(0.004, np.float32), "z8": np.array(3, np.uint8), "w": KERNEL[:1, :, :1, :1] > 0}
    path = file(tmp_path / "q.onnx", nodes, IMAGE, weights, domains=["com.microsoft"])
    x = image()
    [expected] = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})

    [found], _ = found_in(path, x, cpu)

    quantum = 0.004 if scale[0] == "s8" else 0.05
    off = np.abs(found - expected) / quantum
    assert off.max() < 1.01
    # Others round half of a quantum to the other side; its softmax is of a table of rounded exponentials.
    assert np.mean(off > 0.01) <= (0.2 if name == "softmax" else 0.02)
    if name == "softmax":
        data = np.float32(0.03) * (np.clip(np.rint(x / np.float32(0.03)) + 120, 0, 255) - 120)
        exact = np.exp(data) / np.exp(data).sum(-1, keepdims=True)
        assert np.mean(np.abs(found - 0.004 * (np.clip(np.rint(exact / 0.004) + 3, 0, 255) - 3)) > 1e-5) <= 2e-3
    assert np.ptp(expected) > 2 * quantum


def kernels_of(path, cpu):
    """The operators of each kernel that takes time, and what it returns."""
    model = choose_algorithms(onnx_import.load(path), OF_BYTES, AlgorithmConfig())
    module = fusion.fuse(model.module, cpu.tvm())
    found = [s for s in extract_subgraphs(module) if s.tunable]
    return [(list(s.operators), str(load_module(s.workload)["main"].params[-1].ty.dtype)) for s in found]


def test_padding_with_zero_points_is_a_part_of_depthwise_convolutions_whatever_comes_before(tmp_path, cpu):
    nodes = [
        dequantized("x_q"), helper.make_node("Sigmoid", ["x_q_f"], ["g"]),
        helper.make_node("Mul", ["x_q_f", "g"], ["m"]),
        quantized("m", "m_q"), dequantized("m_q"), dequantized("w", "s1", "z1"),
        helper.make_node("Conv", ["m_q_f", "w_f"], ["c"], group=6, pads=[1, 1, 1, 1]), *LAST,
    ]  # fmt: skip
    path = file(tmp_path / "q.onnx", nodes, IMAGE, {"w": DEPTHWISE, **S9})

    [convolution] = [names for names, _ in kernels_of(path, cpu) if "depthwise_conv2d_int8" in names]
    assert convolution[0] == "pad"


def test_a_product_of_joined_axes_rounds_what_follows_it_in_its_own_kernel(tmp_path, cpu):
    nodes = [
        dequantized("x_q"), dequantized("w", "s1", "z1"), helper.make_node("MatMul", CONV[:2], ["p"]),
        quantized("p", "p_q", "s9", "z9"), dequantized("p_q", "s9", "z9"), helper.make_node("Erf", ["p_q_f"], ["e"]),
        quantized("e", "y_q", "s8", "z8"), helper.make_node("DequantizeLinear", ["y_q", "s8", "z8"], ["y"]),
    ]  # fmt: skip
    weights = {"w": MATRIX, **S9, "s8": np.array(0.008, np.float32), "z8": np.array(127, np.uint8)}
    path = file(tmp_path / "q.onnx", nodes, (2, 5, 10), weights)

    [(product, _)] = [kernel for kernel in kernels_of(path, cpu) if "matmul_int8" in kernel[0]]
    # Roundings, before and after the error function; or one before a table of both.
    assert product.count("elementwise") + product.count("lookup") == 2


def test_what_is_moved_before_it_is_quantised_is_moved_as_bytes(tmp_path, cpu):
    nodes = [
        dequantized("x_q"), helper.make_node("Softmax", ["x_q_f"], ["s"]),
        helper.make_node("Transpose", ["s"], ["t"], perm=[1, 0, 2]), quantized("t", "t_q", "s8", "z8"),
        dequantized("t_q", "s8", "z8"), dequantized("w", "s1", "z1"),
        helper.make_node("MatMul", ["t_q_f", "w_f"], ["c"]), *LAST,
    ]  # fmt: skip
    weights = {"w": MATRIX, **S9, "s8": np.array(0.004, np.float32), "z8": np.array(0, np.uint8)}
    path = file(tmp_path / "q.onnx", nodes, (4, 5, 10), weights)

    assert [kind for names, kind in kernels_of(path, cpu) if "transpose" in names] == ["uint8"]


def test_a_concatenation_moves_bytes(tmp_path, cpu):
    nodes, shape, weights, _ = CASES["concatenation"]
    path = file(tmp_path / "q.onnx", nodes, shape, weights)

    model = choose_algorithms(onnx_import.load(path), OF_BYTES, AlgorithmConfig())

    made = [binding.value for block in fusion.fuse(model.module, cpu.tvm())["main"].body.blocks
            for binding in block.bindings if isinstance(binding.value, relax.Call)]  # fmt: skip
    *before, convolution, transposed = [str(call.ty.dtype) for call in made]
    assert set(before) == {"uint8"}
    assert convolution == transposed == "float32"  # what the file returns


def test_what_several_concatenations_join_is_joined_as_it_is(tmp_path, cpu):
    nodes, shape, weights, _ = CASES["the same, joined twice in other units"]
    path = file(tmp_path / "q.onnx", nodes, shape, weights)

    module = choose_algorithms(onnx_import.load(path), OF_BYTES, AlgorithmConfig()).module

    calls = [b.value for block in module["main"].body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]
    values = {b.var: b.value for block in module["main"].body.blocks for b in block.bindings}
    joined = [call.args[0] for call in calls if call.op.name == "relax.concat"]
    parts = [values[part] for each in joined for part in getattr(values.get(each, each), "fields", [])]
    assert len(parts) == 4
    looked_up = [call for call in parts if getattr(call.op, "name", "") == "relax.take"]
    assert not looked_up  # in other units


def test_what_is_quantised_only_to_be_added_is_rounded_but_stays_a_float(tmp_path, cpu):
    nodes, shape, weights, _ = CASES["residual"]
    path = file(tmp_path / "q.onnx", nodes, shape, weights)
    module = fusion.fuse(choose_algorithms(onnx_import.load(path), OF_BYTES, AlgorithmConfig()).module, cpu.tvm())

    [kernel] = [s for s in extract_subgraphs(module) if "depthwise" in s.core_operator]

    body = load_module(kernel.workload)["main"].body
    to_bytes = [cast for cast in analysis.walk(body, tvm.tirx.Cast) if str(cast.ty.dtype) == "uint8"]
    roundings = [call for call in analysis.walk(body, tvm.ir.Call) if analysis.is_rounded(call)]
    assert (len(to_bytes), len(roundings)) == (1, 2)  # the sum, and what was added
