"""Products of two activations as instructions take them, against NumPy; run untuned, so on any CPU."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm.relax import op
from tvm.target import Target

from lib.graph import fusion, packing, precision
from lib.graph.subgraphs import extract_subgraphs
from lib.machine.dots import BF16
from lib.search import evolution
from lib.tir.workload import load_module
from tests.lib.graph.test_precision import functions, model, rounded, run
from tests.lib.tir.test_dot import WITH


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def of_inputs(shape, other, multiply=op.matmul):
    """A product of two inputs, which are computed with before, as activations are."""

    def build(builder, x, y):
        return multiply(*(builder.emit(op.nn.relu(each)) for each in (x, y)))

    return model([shape, other], build, n_inputs=2)


def context(x, y):
    return op.einsum((x, y), "bhnm,bhms->bnhs")


@pytest.mark.parametrize(
    ("shape", "other"),
    [((3, 5, 8), (3, 8, 16)), ((2, 3, 5, 7), (2, 3, 7, 32)), ((3, 5, 8), (3, 8, 12))],
    ids=["whole instructions", "an odd reduction", "columns that leave part of a vector"],
)
def test_a_product_of_activations_is_numpys_of_rounded_factors(cpu, shape, other):
    plain, x, y = of_inputs(shape, other), normal(*shape), normal(*other)

    narrow = precision.in_bf16(plain, 16)

    called = {name: types for name, types in functions(narrow, cpu) if packing.FUNCTION in name}
    [types] = called.values()
    assert set(types[:-1]) == {"bfloat16"}
    expected = rounded(np.maximum(x, 0)) @ rounded(np.maximum(y, 0))
    np.testing.assert_allclose(run(narrow, [x, y], cpu), expected, rtol=1e-5, atol=1e-5)


def test_a_context_of_attention_is_written_by_tokens(cpu):
    plain, x, y = of_inputs((2, 3, 5, 6), (2, 3, 6, 16), context), normal(2, 3, 5, 6), normal(2, 3, 6, 16)

    found = run(precision.in_bf16(plain, 16), [x, y], cpu)

    expected = np.einsum("bhnm,bhms->bnhs", *(rounded(np.maximum(each, 0)) for each in (x, y)))
    assert found.shape == (2, 5, 3, 16)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_its_kernel_is_a_batched_product_with_neighbours_along_the_reduction_side_by_side(cpu):
    module = fusion.fuse(precision.in_bf16(of_inputs((3, 5, 8), (3, 8, 16)), 16).module, cpu.tvm())

    [product] = [s for s in extract_subgraphs(module) if s.core_operator == "batch_matmul_bf16"]

    packed = [param.ty.shape for param in tvm.ir.load_json(product.workload)["main"].params]
    assert [int(extent) for extent in packed[1]] == [3, 4, 16, 2]


@pytest.mark.parametrize(
    ("shape", "other"), [((3, 5, 8), (3, 8, 5)), ((3, 5, 8), (1, 8, 16))],
    ids=["columns that fill no vector", "a batch that is repeated"],
)  # fmt: skip
def test_others_stay_as_they_are(shape, other):
    plain = of_inputs(shape, other)

    assert packing.pack(plain, BF16, 16, "float32") is plain


def test_projections_are_stored_in_bf16_before_they_are_split_into_heads(cpu):
    """By the kernel that computes them, though three others read them."""

    def attention(builder, x, w):
        joined = builder.emit(op.reshape(builder.emit(op.matmul(x, w)), (1, 6, 3, 2, 16)))
        parts = [op.squeeze(builder.emit(op.strided_slice(joined, [2], [n], [n + 1])), [2]) for n in range(3)]
        q, k, v = (builder.emit(op.permute_dims(builder.emit(part), order))
                   for part, order in zip(parts, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True))  # fmt: skip
        scores = builder.emit(op.nn.softmax(builder.emit(op.matmul(q, k)), -1))
        return context(scores, v)

    plain, x = model([(1, 6, 8), (8, 96)], attention), normal(1, 6, 8)

    narrow = precision.in_bf16(plain, 4)

    assert "float32" not in {types[0] for name, types in functions(narrow, cpu) if "slice" in name}
    w = rounded(plain.weights["p1"])
    q, k, v = np.moveaxis(rounded(rounded(x) @ w).reshape(1, 6, 3, 2, 16), 2, 0)
    scores = np.einsum("bnhs,bmhs->bhnm", q, k)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhnm,bmhs->bnhs", weights / weights.sum(-1, keepdims=True), v)
    found = run(narrow, [x], cpu)
    assert np.abs(found - expected).max() < 2 * ml_dtypes.finfo(ml_dtypes.bfloat16).eps * np.abs(expected).max()


def test_what_others_read_too_is_rounded_for_all_of_them_before_it_is_moved(cpu):
    def build(builder, x, w):
        moved = builder.emit(op.permute_dims(builder.emit(op.nn.relu(x)), [1, 0]))
        return op.add(builder.emit(op.matmul(moved, w)), moved)

    plain, x = model([(8, 5), (8, 8)], build), normal(8, 5)

    found = run(precision.in_bf16(plain, 16), [x], cpu)

    moved = rounded(np.maximum(x, 0)).T
    np.testing.assert_allclose(found, moved @ rounded(plain.weights["p1"]) + moved, rtol=1e-5, atol=1e-5)


def test_what_is_left_of_an_odd_reduction_and_a_rounding_are_one_epilogue(cpu):
    def build(builder, x, y, w):
        parts = [builder.emit(op.nn.relu(each)) for each in (x, y)]
        rows = builder.emit(op.reshape(builder.emit(context(*parts)), (2, 5, 48)))
        return op.matmul(rows, w)

    plain = model([(2, 3, 5, 7), (2, 3, 7, 16), (48, 16)], build, 2)
    module = fusion.fuse(precision.in_bf16(plain, 16).module, cpu.tvm())

    [product] = [s for s in extract_subgraphs(module) if s.core_operator == "batch_matmul_bf16"]
    found = evolution.sample(load_module(product.workload), Target(WITH), 4, known=set(), seed=0)
    assert {proposal.space for proposal in found} == {"contraction"}


@pytest.mark.parametrize(("multiply", "order"), [(op.matmul, (0, 1, 2, 3)), (context, (0, 2, 1, 3))])
@pytest.mark.parametrize("columns", [2, 7, 12, 18, 24])
def test_a_product_to_columns_that_fill_no_vectors_is_one_to_whole_ones(cpu, columns, multiply, order):
    plain = of_inputs((1, 3, 20, 24), (1, 3, 24, columns), multiply)
    x, y = normal(1, 3, 20, 24), normal(1, 3, 24, columns)

    wide = packing.with_whole_vectors(plain, 16)

    fused = fusion.fuse(wide.module, cpu.tvm())
    [found] = [each for each in extract_subgraphs(fused) if each.core_operator == "batch_matmul"]
    [program] = evolution.sample(load_module(found.workload), cpu.tvm(), 1, known=set(), seed=0)
    assert program.space == "contraction"
    expected = (np.maximum(x, 0) @ np.maximum(y, 0)).transpose(order)
    np.testing.assert_allclose(run(wide, [x, y], cpu), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("columns", "rows"), [(1, 20), (8, 20), (16, 20), (48, 20), (24, 4)])
def test_a_product_to_other_columns_or_of_few_rows_stays(columns, rows):
    plain = of_inputs((3, rows, 24), (3, 24, columns))

    assert packing.with_whole_vectors(plain, 16) is plain
