"""Attention of one query."""

import numpy as np
from tvm.relax import op

from lib.graph import fusion, precision, queries
from lib.graph.subgraphs import extract_subgraphs
from lib.search import evolution
from lib.tir.workload import load_module
from tests.lib.graph.rules.helpers import const, module, operators, random, run

HEADS, KEYS, SIZE, LANES = 3, 40, 32, 16


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


def test_keys_are_not_transposed_and_scores_are_the_same(cpu):
    found = queries.of_one(fusion.lift_constants(plain(1)))

    assert operators(found.module).count("permute_dims") == 1  # of the queries
    fused = fusion.fuse(found.module, cpu.tvm())
    [y] = run(fused, *inputs(1), *found.weights.values())
    np.testing.assert_allclose(y, run(plain(1), *inputs(1))[0], rtol=1e-4, atol=1e-5)
    [dots] = [each for each in extract_subgraphs(fused) if "dot_products" in each.name]
    [program] = evolution.sample(load_module(dots.workload), cpu.tvm(), 1, known=set(), seed=0)
    assert (dots.core_operator, program.space) == ("reduce", "rows")


def test_in_bf16_neither_keys_nor_values_are_rounded():
    narrow = precision.in_bf16(queries.of_one(fusion.lift_constants(plain(1))), LANES)

    assert operators(narrow.module).count("astype") == 1  # of what the product with weights reads
    assert {str(value.dtype) for value in narrow.weights.values()} == {"bfloat16"}


def test_keys_of_more_queries_are_transposed():
    model = fusion.lift_constants(plain(2))

    assert queries.of_one(model) is model
