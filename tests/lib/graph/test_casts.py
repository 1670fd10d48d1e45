"""Narrow tensors are stored as they are, and widened by each of their readers."""

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph import casts
from tests.lib.graph.rules.helpers import const, operators, run

SHAPE = (4, 8)


def number(value):
    return const(np.full((1, 1), value, np.float32))


def made(build):
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(SHAPE, "uint8"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(build(builder, x))
        builder.emit_func_output(result)
    return builder.get()


def checked(build):
    """The operators after the pass, which compute the same as before."""
    before = made(build)
    after = casts.by_readers(before)
    x = np.random.default_rng(0).integers(0, 256, SHAPE).astype(np.uint8)
    np.testing.assert_array_equal(run(after, x)[0], run(before, x)[0])
    return operators(before), operators(after)


def test_each_reader_of_bytes_dequantises_them_for_itself():
    def shared(builder, x):
        less = builder.emit(op.subtract(builder.emit(op.astype(x, "float32")), number(90)))
        real = builder.emit(op.multiply(less, number(0.05)))
        return op.add(builder.emit(op.tanh(real)), builder.emit(op.exp(real)))

    before, after = checked(shared)

    assert [before.count(name) for name in ("astype", "subtract", "multiply")] == [1, 1, 1]
    assert [after.count(name) for name in ("astype", "subtract", "multiply")] == [2, 2, 2]


def test_what_depends_on_more_than_the_bytes_is_computed_once():
    def scaled(builder, x):
        real = builder.emit(op.multiply(builder.emit(op.astype(x, "float32")), const(np.ones((1, 8), np.float32))))
        return op.add(builder.emit(op.tanh(real)), builder.emit(op.exp(real)))

    before, after = checked(scaled)

    assert before.count("multiply") == after.count("multiply") == 1


def test_floats_are_computed_once():
    def of_floats(builder, x):
        real = builder.emit(op.exp(builder.emit(op.astype(x, "float32"))))
        twice = builder.emit(op.multiply(real, number(2)))
        return op.add(builder.emit(op.tanh(twice)), builder.emit(op.negative(twice)))

    before, after = checked(of_floats)

    assert sorted(before) == sorted(after)
