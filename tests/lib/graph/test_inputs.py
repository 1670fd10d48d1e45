"""What the inputs of a model stand for, whatever they are called."""

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from lib.graph import fusion, inputs
from lib.graph.inputs import Values
from lib.tir.numerics import ONES, random_values


def fused(cpu, shapes, make):
    """A fused model of inputs (shape, dtype) by name."""
    variables = [relax.Var(name, relax.TensorType(*shape)) for name, shape in shapes.items()]
    builder = relax.BlockBuilder()
    with builder.function("main", variables, attrs={"num_input": len(variables)}):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(make(*variables)))
        builder.emit_func_output(out)
    return fusion.fuse(builder.get(), cpu.tvm())


def number(value, dtype="float32"):
    return relax.const(np.array(value, dtype))


def test_a_mask_is_followed_through_reshapes_and_casts(cpu):
    def masked(scores, kept):
        wide = op.astype(op.reshape(kept, (1, 1, 6)), "float32")
        return op.nn.softmax(op.add(scores, op.multiply(op.subtract(number(1), wide), number(-1e4))))

    module = fused(cpu, {"scores": ((1, 5, 6), "float32"), "kept": ((1, 6), "int64")}, masked)

    assert inputs.values(module) == {"scores": Values("real", 0), "kept": Values("mask", 2)}


def test_ids_are_ids_also_where_they_are_compared_with_the_padding(cpu):
    table = relax.const(np.ones((50, 8), np.float32))

    def embedded(tokens):
        kept = op.expand_dims(op.astype(op.not_equal(tokens, number(1, "int64")), "float32"), 2)
        return op.multiply(op.take(table, op.astype(tokens, "int32"), axis=0), kept)

    assert inputs.values(fused(cpu, {"tokens": ((1, 6), "int64")}, embedded)) == {"tokens": Values("ids", 50)}


def test_the_smallest_table_bounds_ids_that_index_several(cpu):
    large, small = (relax.const(np.ones((rows, 8), np.float32)) for rows in (50, 7))

    module = fused(
        cpu,
        {"tokens": ((6,), "int32")},
        lambda tokens: op.add(op.take(large, tokens, axis=0), op.take(small, tokens, axis=0)),
    )

    assert inputs.values(module) == {"tokens": Values("ids", 7)}


def test_what_counts_a_mask_is_not_followed_into_a_table(cpu):
    """Positions of tokens are counted by the mask in some models; the mask is one nevertheless."""
    table = relax.const(np.ones((50, 8), np.float32))

    def positions(kept):
        counted = op.multiply(op.cumsum(kept, axis=1), kept)
        hidden = op.astype(op.expand_dims(kept, 2), "bool")
        return op.where(hidden, op.take(table, op.astype(counted, "int32"), axis=0), number(0))

    assert inputs.values(fused(cpu, {"kept": ((1, 6), "int64")}, positions)) == {"kept": Values("mask", 2)}


def test_a_mask_that_only_tells_a_length_is_all_ones(cpu):
    def last(scores, attention_mask):
        length = op.astype(op.sum(attention_mask, 1, keepdims=True), "float32")
        return op.multiply(scores, length)

    module = fused(cpu, {"scores": ((2, 6), "float32"), "attention_mask": ((2, 6), "int64")}, last)

    assert inputs.values(module)["attention_mask"] == Values("ones", ONES)
    np.testing.assert_array_equal(random_values((2, 6), "int64", ONES, 0), np.ones((2, 6), np.int64))


def test_a_mask_that_nothing_reads_is_all_ones(cpu):
    """As of a prompt whose length its shape says; who made the file may read it."""
    module = fused(
        cpu, {"scores": ((2, 6), "float32"), "attention_mask": ((2, 6), "int64")}, lambda x, _: op.add(x, number(1)),
    )  # fmt: skip

    assert inputs.values(module)["attention_mask"] == Values("ones", ONES)


def test_a_mask_that_is_counted_and_hides_is_one(cpu):
    def mean(tokens, attention_mask):
        weights = op.astype(attention_mask, "float32")
        return op.divide(op.sum(op.multiply(tokens, weights), 1), op.sum(weights, 1))

    module = fused(cpu, {"tokens": ((2, 6), "float32"), "attention_mask": ((2, 6), "int64")}, mean)

    assert inputs.values(module)["attention_mask"] == Values("mask", 2)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("steps", "int64", Values("small", 0)),
        ("attention_mask", "int64", Values("mask", 2)),
        ("flags", "bool", Values("mask", 2)),
        ("mask", "float32", Values("real", 0)),
    ],
)
def test_where_the_graph_does_not_tell_the_type_or_the_name_does(cpu, name, dtype, expected):
    module = fused(cpu, {name: ((1, 6), dtype)}, lambda x: op.multiply(op.astype(x, "float32"), number(2.5)))

    assert inputs.values(module) == {name: expected}
