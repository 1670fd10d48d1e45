import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import rewrite
from lib.graph.rules import constants as rules
from tests.lib.graph.rules.helpers import becomes, const, module, operators, run, stays

A = const(np.array([[1.5, -2, 0.25], [3, -0.5, 1]], np.float32))
ROW = const(np.array([2, -1, 0.5], np.float32))
POSITIVE = const(np.array([0.5, 1, 4], np.float32))
INTS = const(np.array([7, -7, 8, 1], np.int64))
TABLE = const(np.arange(12, dtype=np.float32).reshape(4, 3))


def folded(rule, build):
    """Whether nothing is left to compute; the value is checked against TVM's own."""
    return becomes([rule], build)[1] == []


@pytest.mark.parametrize(
    "name", ["abs", "negative", "exp", "floor", "square", "tanh", "erf", "isnan", "round", "sigmoid"]
)
def test_functions_of_constants_are_folded(name):
    assert folded(rules.fold_elementwise, lambda: getattr(op, name)(A))


@pytest.mark.parametrize("name", ["relu", "gelu", "silu"])
def test_activations_of_constants_are_folded(name):
    assert folded(rules.fold_elementwise, lambda: getattr(op.nn, name)(A))


@pytest.mark.parametrize("name", ["log", "sqrt", "rsqrt"])
def test_functions_of_positive_constants_are_folded(name):
    assert folded(rules.fold_elementwise, lambda: getattr(op, name)(POSITIVE))


@pytest.mark.parametrize(
    "name",
    ["add", "subtract", "multiply", "divide", "maximum", "minimum", "equal", "not_equal", "less", "less_equal",
     "greater", "greater_equal", "floor_divide"],
)  # fmt: skip
def test_arithmetic_of_constants_broadcasts(name):
    assert folded(rules.fold_elementwise, lambda: getattr(op, name)(A, ROW))


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_not"])
def test_logic_of_constants_is_folded(name):
    operands = [const(np.array([True, False, True, False])), const(np.array([True, True, False, False]))]
    assert folded(rules.fold_elementwise, lambda: getattr(op, name)(*operands[: 1 if name == "logical_not" else 2]))


def test_powers_and_choices_of_constants_are_folded():
    assert folded(rules.fold_elementwise, lambda: op.power(POSITIVE, const(1.5)))
    assert folded(rules.fold_elementwise, lambda: op.where(op.less(A, ROW), A, ROW))


def folded_value(rule, build):
    """For what TVM cannot compute to compare with."""
    made = rewrite(module(build), [rule])
    assert operators(made) == []
    return run(made)[0]


def test_integers_are_divided_towards_zero():
    large = 2**62 + 1  # no float64
    quotient = folded_value(
        rules.fold_elementwise, lambda: op.divide(const(np.array([7, -7, large])), const(np.array([2, 2, 1])))
    )
    assert quotient.tolist() == [3, -3, large]


def test_a_power_that_numpy_refuses_stays():
    assert stays([rules.fold_elementwise], lambda: op.power(INTS, const(np.array(-1))))


def test_what_is_not_all_constant_stays():
    assert stays([rules.fold_elementwise], lambda x: op.add(x, A), (2, 3))


def test_a_large_broadcast_is_made_at_run_time():
    wide = const(np.ones((1, 2048), np.float32))
    assert stays([rules.fold_movement], lambda: op.broadcast_to(wide, (2048, 2048)))


@pytest.mark.parametrize(
    "build",
    [
        lambda: op.reshape(A, (3, 2)),
        lambda: op.flatten(A),
        lambda: op.expand_dims(A, [0, -1]),
        lambda: op.squeeze(const(np.ones((1, 3, 1), np.float32)), [0]),
        lambda: op.broadcast_to(ROW, (2, 3)),
        lambda: op.permute_dims(A),
        lambda: op.permute_dims(A, [-1, 0]),
        lambda: op.astype(A, "int32"),
        lambda: op.take(TABLE, const(np.array([[2, 0]])), 0),
        lambda: op.take(TABLE, const(np.array(1)), -1),
        lambda: op.take(TABLE, const(np.array([-1, 5])), 0, mode="wrap"),
        lambda: op.take(TABLE, const(np.array([-1, 5])), 0, mode="clip"),
        lambda: op.cumsum(A, 1),
        lambda: op.cumsum(A, 0, exclusive=True),
        lambda: op.cumsum(A),
        lambda: op.cumsum(const(np.array([[200, 100]], np.uint8)), 1, dtype="int32"),
    ],
)
def test_moved_constants_are_folded(build):
    assert folded(rules.fold_movement, build)


@pytest.mark.parametrize(("row", "mode"), [(4, "fast"), (-5, "fast"), (4, "nan")])
def test_rows_that_a_table_does_not_have_are_left_to_the_runtime(row, mode):
    assert stays([rules.fold_movement], lambda: op.take(TABLE, const(np.array([row])), 0, mode=mode))


def test_a_cast_of_nan_is_silent():
    assert folded_value(rules.fold_movement, lambda: op.astype(const(float("nan")), "int32")).dtype == np.int32


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concatenated_constants_are_folded(axis):
    assert folded(rules.fold_concat, lambda: op.concat([A, A], axis))


def test_a_concatenation_with_something_else_stays():
    assert stays([rules.fold_concat], lambda x: op.concat([A, x], 0), (2, 3))


@pytest.mark.parametrize(
    "build",
    [
        lambda: op.full((2, 3), const(2.5)),
        lambda: op.full((2,), const(3, "int64"), "int64"),
        lambda: op.zeros((2, 3), "float16"),
        lambda: op.ones((), "int32"),
    ],
)
def test_filled_tensors_are_folded(build):
    assert folded(rules.fold_filled, build)


def test_filled_tensors_that_are_large_or_of_an_input_stay():
    assert stays([rules.fold_filled], lambda x: op.full((2, 3), x), ())
    assert stays([rules.fold_filled], lambda: op.zeros((2048, 2048), "float32"))


def test_static_extents_are_a_constant():
    assert folded_value(rules.fold_shape, lambda: op.shape_to_tensor(relax.ShapeExpr([2, 3]))).tolist() == [2, 3]


def test_unknown_extents_stay():
    assert stays([rules.fold_shape], lambda x: op.shape_to_tensor(relax.ShapeExpr([x.ty.shape[0], 3])), ("n", 3))
