"""Products and convolutions in bf16: which, and what is rounded where; run untuned, so on any CPU."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from lib.contracts.errors import ConfigError, TargetError
from lib.graph import fusion, precision
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.graph.fusion import Model
from lib.machine import targets
from lib.machine.dots import AMX_BF16, AMX_INT8
from tests.helpers import computed

IMAGE, KERNEL, SHIFT = (1, 6, 6, 8), (3, 3, 8, 8), (8,)


def model(shapes, build, n_inputs=1):
    """What `build` makes of parameters of these shapes, the first of which are inputs."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{n}", relax.TensorType(shape, "float32")) for n, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(build(builder, *params))
        builder.emit_func_output(result)
    module = builder.get()
    main = module["main"].with_attr("num_input", n_inputs)
    rng = np.random.default_rng(0)
    weights = {f"p{n}": rng.standard_normal(shape).astype(np.float32) for n, shape in enumerate(shapes)}
    return Model(tvm.IRModule({"main": main}), {name: weights[name] for name in list(weights)[n_inputs:]})


def of_bytes(image, kernel, build):
    """What `build` makes of unsigned bytes `x` and a weight `w` of signed ones, with values for both."""
    rng, builder = np.random.default_rng(0), relax.BlockBuilder()
    params = [relax.Var("x", relax.TensorType(image, "uint8")), relax.Var("w", relax.TensorType(kernel, "int8"))]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(build(builder, *params))
        builder.emit_func_output(result)
    x, w = rng.integers(0, 256, image).astype(np.uint8), rng.integers(-128, 128, kernel).astype(np.int8)
    return Model(tvm.IRModule({"main": builder.get()["main"].with_attr("num_input", 1)}), {"w": w}), x, w


def convolution(x, w, **attrs):
    return op.nn.conv2d(x, w, padding=1, data_layout="NHWC", kernel_layout="HWIO", **attrs)


def run(found, inputs, cpu):
    """Its result, compiled without schedules."""
    return computed(found, cpu, *inputs)[0]


def rounded(array):
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def functions(found, cpu):
    """The operators that are called, with the element types of what they read and, last, make."""
    module = fusion.fuse(found.module, cpu.tvm())
    calls = [b.value for block in module["main"].body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]
    return [
        (str(call.args[0].name_hint), [str(arg.ty.dtype) for arg in call.args[1].fields] + [str(call.ty.dtype)])
        for call in calls
    ]


def test_a_product_reads_bf16_and_its_sums_are_those_of_float32(cpu):
    plain = model([(5, 8), (8, 16)], lambda _builder, x, w: op.matmul(x, w))
    x = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)

    narrow = precision.in_bf16(plain, 16)

    found = run(narrow, [x], cpu)
    assert narrow.weights["p1"].dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(found, rounded(x) @ rounded(plain.weights["p1"]), rtol=1e-5, atol=1e-5)


def test_what_a_convolution_reads_is_stored_in_bf16_for_all_that_read_it(cpu):
    def residual(builder, x, w, v, b):
        first = builder.emit(op.nn.relu(op.add(convolution(x, w), b)))
        return op.add(convolution(first, v), first)

    narrow = precision.in_bf16(model([IMAGE, KERNEL, KERNEL, SHIFT], residual), 16)

    called = functions(narrow, cpu)
    assert [types[-1] for _, types in called] == ["bfloat16", "bfloat16", "float32"]  # the input, first, the sum
    assert called[-1][1] == ["bfloat16", "bfloat16", "float32"]  # data, weight; what is added is the data again


def test_a_residual_is_that_of_rounded_values(cpu):
    def residual(builder, x, w, v):
        first = builder.emit(op.nn.relu(op.matmul(x, w)))
        return op.add(op.matmul(first, v), first)

    plain = model([(5, 8), (8, 8), (8, 8)], residual)
    x = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    w, v = (rounded(plain.weights[name]) for name in ("p1", "p2"))
    first = rounded(np.maximum(rounded(x) @ w, 0))

    found = run(precision.in_bf16(plain, 16), [x], cpu)

    np.testing.assert_allclose(found, first @ v + first, rtol=1e-4, atol=1e-4)


def test_what_a_norm_makes_is_not_rounded_for_the_sum_that_it_begins(cpu):
    def block(builder, x, scale, shift, w):
        norm = builder.emit(op.nn.layer_norm(x, scale, shift, [-1], 1e-5))
        return op.add(op.matmul(norm, w), norm)

    plain = model([(5, 8), (8,), (8,), (8, 8)], block)
    x = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    scale, shift, w = plain.weights.values()
    norm = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + shift

    found = run(precision.in_bf16(plain, 16), [x], cpu)

    np.testing.assert_allclose(found, rounded(norm) @ rounded(w) + norm, rtol=1e-3, atol=1e-3)


def test_what_is_squared_is_not_rounded_for_its_square(cpu):
    def machine(builder, x, w):  # (sum of rows)^2 - sum of rows^2, as factorization machines have it
        rows = builder.emit(op.tanh(op.add(x, x)))
        product = builder.emit(op.sum(op.matmul(rows, w), axis=[0]))
        total = builder.emit(op.sum(rows, axis=[0]))
        difference = op.subtract(op.multiply(total, total), op.sum(op.multiply(rows, rows), axis=[0]))
        return op.add(product, builder.emit(difference))

    plain = model([(5, 8), (8, 8)], machine)
    x = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    rows, w = np.tanh(2 * x), plain.weights["p1"]
    exact = rows.sum(0) ** 2 - (rows**2).sum(0)

    found = run(precision.in_bf16(plain, 16), [x], cpu)

    np.testing.assert_allclose(found - (rounded(rows) @ rounded(w)).sum(0), exact, rtol=1e-4, atol=1e-4)


def test_parts_of_a_concatenation_are_stored_in_bf16(cpu):
    def build(builder, x, w, v, u):
        parts = [builder.emit(convolution(x, each)) for each in (w, v)]
        return convolution(builder.emit(op.concat(parts, 3)), u)

    narrow = precision.in_bf16(model([IMAGE, KERNEL, KERNEL, (3, 3, 16, 8)], build), 16)

    assert [types[-1] for _, types in functions(narrow, cpu)][-2:] == ["bfloat16", "float32"]


def test_what_the_model_returns_is_not_rounded(cpu):
    narrow = precision.in_bf16(model([(5, 8), (8, 8)], lambda builder, x, w: op.nn.relu(op.matmul(x, w))), 16)

    assert functions(narrow, cpu)[-1][1][-1] == "float32"


def test_odd_channels_are_padded_with_zeros(cpu):
    plain = model([(1, 6, 6, 3), (3, 3, 3, 8)], lambda _builder, x, w: convolution(x, w))
    x = np.random.default_rng(1).standard_normal((1, 6, 6, 3)).astype(np.float32)
    padded = np.pad(rounded(x), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))

    narrow = precision.in_bf16(plain, 16)

    found = run(narrow, [x], cpu)
    assert narrow.weights["p1"].shape == (3, 3, 4, 8)
    assert not narrow.weights["p1"][:, :, 3].any()
    expected = np.einsum("nyxcab,abco->nyxo", windows, rounded(plain.weights["p1"]))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_convolution_in_groups_reads_bf16_too(cpu):
    plain = model([IMAGE, (3, 3, 4, 8)], lambda _builder, x, w: convolution(x, w, groups=2))
    x = np.random.default_rng(1).standard_normal(IMAGE).astype(np.float32)
    padded = np.pad(rounded(x), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))

    narrow = precision.in_bf16(plain, 16)

    weight = rounded(plain.weights["p1"])
    parts = [np.einsum("nyxcab,abco->nyxo", windows[:, :, :, at : at + 4], weight[..., at : at + 4]) for at in (0, 4)]
    assert narrow.weights["p1"].dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(run(narrow, [x], cpu), np.concatenate(parts, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shapes", "build", "n_inputs"),
    [
        ([IMAGE, (3, 3, 1, 8)], lambda _b, x, w: convolution(x, w, groups=8), 1),
        ([(4, 5, 8), (4, 8, 5)], lambda _b, x, y: op.matmul(x, y), 2),
        ([IMAGE], lambda _b, x: op.nn.relu(x), 1),
    ],
    ids=["depthwise", "of two activations", "no product"],
)
def test_other_operators_stay_in_float32(shapes, build, n_inputs):
    plain = model(shapes, build, n_inputs)

    assert precision.in_bf16(plain, 16) is plain


def test_a_cpu_without_bf16_is_refused_with_what_to_do():
    old = targets.cpu_target('{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell"}')
    plain = model([(5, 8), (8, 16)], lambda _builder, x, w: op.matmul(x, w))

    with pytest.raises(TargetError, match=r"--precision bf16: llvm-haswell.* no instruction.*Leave the option out"):
        choose_algorithms(plain, old, AlgorithmConfig(precision="bf16"))


def test_a_precision_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="--precision must be one of model, bf16"):
        AlgorithmConfig(precision="fp4")


def test_another_precision_has_files_of_its_own():
    assert AlgorithmConfig(precision="bf16").suffix == "-precision_bf16"
    assert AlgorithmConfig().suffix == ""


@pytest.mark.parametrize(
    ("channels", "columns", "groups", "padded"),
    [
        (184, 32, 1, 192),  # 92 pairs are 23 times four, 96 are six times sixteen
        (58, 32, 1, 60),  # 29 pairs are 29 times one, 30 are twice fifteen
        (68, 32, 4, 72),  # of each group
        (17, 48, 3, 18),
        (24, 32, 2, 24),  # twelve at once, and no product less with more
        (40, 16, 1, 40),  # two products of ten would be as many of twelve
        (68, 16, 1, 72),
        (2, 16, 4, 2),  # most would be zeros
    ],
)
def test_input_channels_are_padded_where_an_instruction_for_matrices_takes_more_at_once(
    cpu, channels, columns, groups, padded
):
    def build(_builder, x, w):
        return op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO", groups=groups)

    plain = model([(1, 4, 5, groups * channels), (1, 1, channels, groups * columns)], build)
    x = np.random.default_rng(1).standard_normal((1, 4, 5, groups * channels)).astype(np.float32)

    narrow = precision.in_bf16(plain, 16, AMX_BF16)

    [kernel] = narrow.weights.values()
    assert kernel.shape == (1, 1, padded, groups * columns)
    apart = rounded(plain.weights["p1"]).reshape(channels, groups, columns)
    expected = np.einsum("yxgc,cgk->yxgk", rounded(x).reshape(4, 5, groups, channels), apart)
    np.testing.assert_allclose(run(narrow, [x], cpu), expected.reshape(1, 4, 5, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "columns", "matrix"),
    [(4, 32, AMX_BF16), (64, 24, AMX_BF16), (64, 32, None)],
    ids=["rows", "columns", "no"],
)
def test_where_no_instruction_for_matrices_is_used_channels_stay_as_they_are(rows, columns, matrix):
    plain = model([(rows, 184), (184, columns)], lambda _builder, x, w: op.matmul(x, w))

    assert precision.in_bf16(plain, 16, matrix).weights["p1"].shape == (184, columns)


def test_groups_of_an_odd_number_of_channels_stay_in_float32_where_vectors_alone_multiply():
    def build(_builder, x, w):
        return op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO", groups=3)

    plain = model([(1, 4, 5, 51), (1, 1, 17, 96)], build)

    assert precision.in_bf16(plain, 16) is plain


@pytest.mark.parametrize(("channels", "groups", "padded"), [(17, 3, 20), (68, 4, 72), (68, 1, 72), (64, 2, 64)])
def test_sums_of_padded_bytes_are_exact(cpu, channels, groups, padded):
    shapes = (1, 4, 5, groups * channels), (1, 1, channels, groups * 32)
    params = [
        relax.Var(name, relax.TensorType(shape, kind))
        for name, shape, kind in zip("xw", shapes, ("uint8", "int8"), strict=True)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            attrs = {"data_layout": "NHWC", "kernel_layout": "HWIO", "groups": groups, "out_dtype": "int32"}
            result = builder.emit_output(op.nn.conv2d(*params, **attrs))
        builder.emit_func_output(result)
    rng = np.random.default_rng(0)
    x, w = rng.integers(0, 256, shapes[0]).astype(np.uint8), rng.integers(-128, 128, shapes[1]).astype(np.int8)
    plain = Model(tvm.IRModule({"main": builder.get()["main"].with_attr("num_input", 1)}), {"w": w})

    found = precision.in_quads(plain, 16, AMX_INT8)

    assert found.weights["w"].shape == (1, 1, padded, groups * 32)
    apart = w.reshape(channels, groups, 32).astype(np.int32)
    expected = np.einsum("yxgc,cgk->yxgk", x.reshape(4, 5, groups, channels).astype(np.int32), apart)
    np.testing.assert_array_equal(run(found, [x], cpu), expected.reshape(1, 4, 5, -1))
