"""Functions of a byte as tables: which, and that they are what NumPy computes in float32."""

import numpy as np
import pytest
import tvm
from scipy.special import expit
from tvm import relax
from tvm.relax import op

from lib.graph import lookups
from lib.graph.fusion import Model
from tests.lib.graph.test_precision import functions, run

SHAPE = (2, 4, 32)
BYTES = np.arange(256, dtype=np.uint8).reshape(SHAPE)
IN, ZERO, OUT = np.float32(0.05), np.float32(90), np.float32(20)


def number(value):
    return relax.const(np.full((1, 1, 1), value, np.float32))


def dequantized(x):
    return op.multiply(op.subtract(op.astype(x, "float32"), number(ZERO)), number(IN))


def rounded(x, least=0.0, most=255.0):
    near = op.round(op.multiply(x, number(OUT)))
    return op.minimum(op.maximum(near, number(least)), number(most))


def model(build, *more):
    """What `build` makes of bytes, and of other inputs in float32; what it returns are emitted one by one."""
    builder = relax.BlockBuilder()
    params = [relax.Var("x", relax.TensorType(SHAPE, "uint8")), *(
        relax.Var(f"y{n}", relax.TensorType(shape, "float32")) for n, shape in enumerate(more)
    )]  # fmt: skip
    with builder.function("main", params):
        with builder.dataflow():
            made = builder.emit(builder.normalize(build(builder, *params)))
            result = builder.emit_output(op.reshape(made, made.ty.shape))
        builder.emit_func_output(result)
    module = relax.transform.Normalize()(builder.get())
    return Model(tvm.IRModule({"main": module["main"].with_attr("num_input", len(params))}), {})


def reals():
    return (BYTES.astype(np.float32) - ZERO) * IN


def quantum(x, least=0.0, most=255.0):
    return np.clip(np.rint(x * OUT), least, most)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda b, x: op.multiply(x, b.emit(op.sigmoid(x))), lambda x: x * expit(x)),
        (lambda b, x: x, lambda x: x),
        (lambda b, x: op.multiply(op.maximum(x, number(0)), number(1.5)), lambda x: np.maximum(x, 0) * np.float32(1.5)),
        (lambda b, x: op.tanh(x), np.tanh),
    ],
    ids=["silu", "another scale", "of several steps", "tanh"],
)
def test_what_is_computed_of_a_byte_and_becomes_one_is_looked_up(cpu, function, expected):
    plain = model(lambda b, x: op.astype(rounded(function(b, b.emit(dequantized(x)))), "uint8"))

    found = lookups.in_tables(plain)

    [table] = found.weights.values()
    np.testing.assert_array_equal(table, quantum(expected(reals())).reshape(-1).astype(np.uint8))
    assert any("lookup" in name for name, _ in functions(found, cpu))
    np.testing.assert_array_equal(run(found, [BYTES], cpu), quantum(expected(reals())).astype(np.uint8))
    np.testing.assert_array_equal(run(found, [BYTES], cpu), run(plain, [BYTES], cpu))


def test_what_is_rounded_and_stays_a_float_is_looked_up_as_well(cpu):
    plain = model(lambda b, x: op.multiply(rounded(op.tanh(dequantized(x)), -20.0, 10.0), number(0.25)))

    found = lookups.in_tables(plain)

    assert any("lookup" in name for name, _ in functions(found, cpu))
    expected = quantum(np.tanh(reals()), -20.0, 10.0) * np.float32(0.25)
    np.testing.assert_array_equal(run(found, [BYTES], cpu), expected)


def test_bytes_are_moved_before_they_are_looked_up(cpu):
    def moved(b, x):
        turned = op.permute_dims(b.emit(op.sigmoid(dequantized(x))), [2, 0, 1])
        return op.astype(rounded(op.strided_slice(b.emit(turned), [0], [3], [20], [1])), "uint8")

    found = lookups.in_tables(model(moved))

    assert len(found.weights) == 1
    expected = quantum(expit(reals()).transpose(2, 0, 1)[3:20]).astype(np.uint8)
    np.testing.assert_array_equal(run(found, [BYTES], cpu), expected)


def test_what_was_looked_up_is_looked_up_once_more_at_the_same_time(cpu):
    def twice(b, x):
        once = b.emit(op.astype(rounded(op.sigmoid(dequantized(x))), "uint8"))
        return op.astype(rounded(op.tanh(dequantized(once))), "uint8")

    plain = model(twice)
    found = lookups.in_tables(plain)

    assert len([name for name, _ in functions(found, cpu) if "lookup" in name]) == 1
    np.testing.assert_array_equal(run(found, [BYTES], cpu), run(plain, [BYTES], cpu))


def test_what_others_read_is_looked_up_by_itself(cpu):
    def shared(b, x):
        once = b.emit(op.astype(rounded(op.sigmoid(dequantized(x))), "uint8"))
        again = b.emit(op.astype(rounded(op.tanh(dequantized(once))), "uint8"))
        return op.concat([once, again], 0)

    plain = model(shared)
    found = lookups.in_tables(plain)

    assert len(found.weights) == 2
    np.testing.assert_array_equal(run(found, [BYTES], cpu), run(plain, [BYTES], cpu))
    [_, again] = [b.value for block in found.module["main"].body.blocks for b in block.bindings
                  if isinstance(b.value, relax.Call) and b.value.op.name == "relax.take"]  # fmt: skip
    assert again.args[1].name != "x"  # but what the first one made


@pytest.mark.parametrize(
    ("build", "more"),
    [
        (lambda b, x, y: op.astype(rounded(op.add(dequantized(x), y)), "uint8"), [SHAPE]),
        (lambda b, x, y: op.astype(rounded(op.multiply(dequantized(x), y)), "uint8"), [(1, 1, 32)]),
        (lambda b, x: op.sigmoid(dequantized(x)), []),
        (lambda b, x: op.astype(rounded(op.sum(dequantized(x), 1, keepdims=True)), "uint8"), []),
        (lambda b, x, y: op.astype(rounded(op.sigmoid(y)), "uint8"), [SHAPE]),
    ],
    ids=["with another tensor", "with a number for each channel", "what stays a float", "a sum", "of floats"],
)
def test_all_else_stays_as_it_is(build, more):
    plain = model(build, *more)

    assert lookups.in_tables(plain) is plain
