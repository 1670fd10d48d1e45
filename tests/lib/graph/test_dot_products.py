"""Attention of a few queries."""

import numpy as np
import pytest
from tvm.relax import op

from lib.graph import dot_products, fusion, precision
from lib.graph.rules.products import CONTEXT
from lib.graph.subgraphs import extract_subgraphs
from lib.search import evolution
from lib.tir.workload import load_module
from tests.lib.graph.rules.helpers import const, module, operators, random, run

HEADS, KEYS, SIZE, LANES = 3, 152, 32, 16
TOKENS, EXPERTS, WIDE = 2, 5, 48


def found_in(model, is_narrow=False):
    return dot_products.read_as_they_lie(model, is_narrow=is_narrow)


def attention(n):
    """Of n queries to keys and values that the model is given, and to their own."""

    def build(x, keys, values):
        query = op.reshape(op.matmul(x, const(random((24, HEADS * SIZE), 1))), (1, n, HEADS, SIZE))
        query = op.permute_dims(query, [0, 2, 1, 3])
        turned = op.permute_dims(op.concat([keys, query], 2), [0, 1, 3, 2])
        scores = op.nn.softmax(op.multiply(op.matmul(query, turned), const(np.float32(SIZE**-0.5))))
        return op.matmul(scores, op.concat([values, query], 2))

    return build


def inputs(n):
    return [random(shape, k) for k, shape in enumerate([(1, n, 24), *[(1, HEADS, KEYS, SIZE)] * 2])]


def plain(n):
    return module(attention(n), *(x.shape for x in inputs(n)))


@pytest.mark.parametrize("n", [1, 4, 8])
def test_keys_are_not_transposed_and_scores_are_the_same(cpu, n):
    found = found_in(fusion.lift_constants(plain(n)))

    assert operators(found.module).count("permute_dims") == 1 + (n > 1)  # of the queries, and of several ones' scores
    fused = fusion.fuse(found.module, cpu.tvm())
    [y] = run(fused, *inputs(n), *found.weights.values())
    np.testing.assert_allclose(y, run(plain(n), *inputs(n))[0], rtol=1e-4, atol=1e-5)
    [dots] = [each for each in extract_subgraphs(fused) if "dot_products" in each.name]
    [program] = evolution.sample(load_module(dots.workload), cpu.tvm(), 1, known=set(), seed=0)
    assert (dots.core_operator, program.space) == ("reduce", "rows")


def test_in_bf16_neither_keys_nor_values_are_rounded():
    narrow = precision.in_bf16(found_in(fusion.lift_constants(plain(1))), LANES)

    assert operators(narrow.module).count("astype") == 1  # of what the product with weights reads
    assert {str(value.dtype) for value in narrow.weights.values()} == {"bfloat16"}


@pytest.mark.parametrize(("n", "keys"), [(9, KEYS), (4, 40), (2, 2)], ids=["many queries", "few keys", "a window"])
def test_keys_of_more_queries_or_that_are_few_are_transposed(n, keys):
    x, *caches = inputs(n)
    model = fusion.lift_constants(module(attention(n), x.shape, *(each[:, :, :keys].shape for each in caches)))

    assert found_in(model) is model


def repeated(each, n=1, is_einsum=False):
    """One query of each head, `each` of which read one head of keys and of values, written out for all of them."""

    def build(x, keys, values):
        def heads(part):
            part = op.expand_dims(op.concat([part, part], 2), 2)
            spread = op.broadcast_to(part, (1, HEADS, each, 2 * KEYS, SIZE))
            return op.reshape(spread, (1, HEADS * each, 2 * KEYS, SIZE))

        query = op.reshape(op.matmul(x, const(random((24, each * HEADS * SIZE), 1))), (1, n, HEADS * each, SIZE))
        query = op.permute_dims(query, [0, 2, 1, 3])
        scores = op.matmul(query, op.permute_dims(heads(keys), [0, 1, 3, 2]))
        weights = op.nn.softmax(op.multiply(scores, const(np.float32(SIZE**-0.5))))
        if is_einsum:  # as rules write it where heads are joined again
            return op.einsum((weights, heads(values)), CONTEXT)
        return op.matmul(weights, heads(values))

    return module(build, *(x.shape for x in inputs(n)))


@pytest.mark.parametrize("is_einsum", [False, True])
@pytest.mark.parametrize("each", [4, 12])
def test_heads_that_read_the_same_keys_are_rows_of_one_product(cpu, each, is_einsum):
    model = repeated(each, is_einsum=is_einsum)
    found = found_in(fusion.lift_constants(model))

    assert "broadcast_to" not in operators(found.module)
    fused = fusion.fuse(found.module, cpu.tvm())
    [y] = run(fused, *inputs(1), *found.weights.values())
    np.testing.assert_allclose(y, run(model, *inputs(1))[0], rtol=1e-4, atol=1e-5)
    assert any("dot_products" in each.name for each in extract_subgraphs(fused)) == (each == 4)


def test_keys_that_more_queries_read_are_repeated_as_they_were():
    model = fusion.lift_constants(repeated(4, n=9))

    assert found_in(model) is model


def mixture(x, router):
    """Each token times the weights of two of some experts."""
    chosen = op.topk(op.matmul(x, router), 2, ret_type="indices", dtype="int64")
    weights = op.take(const(random((EXPERTS, WIDE, SIZE), 3)), chosen, 0, "clip")
    return op.matmul(weights, op.reshape(x, (TOKENS, 1, SIZE, 1)))


def transposed_mixture(x, router):
    """The same as rows times transposed weights."""
    chosen = op.reshape(op.topk(op.matmul(x, router), 2, ret_type="indices", dtype="int64"), (2 * TOKENS,))
    weights = op.take(const(random((EXPERTS, WIDE, SIZE), 3)), chosen, 0, "clip")
    rows = op.reshape(op.broadcast_to(op.expand_dims(x, 1), (TOKENS, 2, SIZE)), (2 * TOKENS, 1, SIZE))
    return op.matmul(rows, op.permute_dims(weights, [0, 2, 1]))


MIXTURE = [random((TOKENS, SIZE), 1), random((SIZE, EXPERTS), 2)]


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("build", [mixture, transposed_mixture])
def test_weights_that_are_chosen_are_read_where_they_are(cpu, build, is_narrow):
    plain = module(build, *(x.shape for x in MIXTURE))
    found = found_in(fusion.lift_constants(plain), is_narrow)

    assert "take" not in operators(found.module)
    [weights] = found.weights.values()
    assert str(weights.dtype) == ("bfloat16" if is_narrow else "float32")
    fused = fusion.fuse(found.module, cpu.tvm())
    [y] = run(fused, *MIXTURE, weights)
    x, router = MIXTURE
    rounded = np.asarray(weights, np.float32)
    best = np.argsort(-(x @ router), axis=1)[:, :2]
    np.testing.assert_allclose(
        y.reshape(TOKENS, 2, WIDE), np.einsum("tkws,ts->tkw", rounded[best], x), rtol=1e-4, atol=1e-5
    )
    [dots] = [each for each in extract_subgraphs(fused) if "dot_products" in each.name]
    [program] = evolution.sample(load_module(dots.workload), cpu.tvm(), 1, known=set(), seed=0)
    assert (dots.core_operator, program.space) == ("reduce", "rows")


def test_what_is_looked_up_for_others_too_is_looked_up_once():
    def build(x, router):
        chosen = op.topk(op.matmul(x, router), 2, ret_type="indices", dtype="int64")
        weights = op.take(const(random((EXPERTS, WIDE, SIZE), 3)), chosen, 0, "clip")
        return op.add(op.matmul(weights, op.reshape(x, (TOKENS, 1, SIZE, 1))), op.max(weights))

    model = fusion.lift_constants(module(build, *(x.shape for x in MIXTURE)))

    assert found_in(model) is model
