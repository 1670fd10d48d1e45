import math

import numpy as np
import pytest
from tvm.relax import op

from lib.graph.rules import formulas as rules
from tests.lib.graph.rules.helpers import becomes, const, module, random, run, stays

X = random((3, 20)) * 2
ROOT = math.sqrt(2)


def inner(x, cube):
    return op.multiply(const(math.sqrt(2 / math.pi)), op.add(x, op.multiply(cube, const(0.044715))))


FORMULAS = {
    "of torch": (lambda x: op.multiply(
        op.multiply(x, op.add(op.erf(op.divide(x, const(ROOT))), const(1))), const(0.5)), "nn.gelu"),
    "half of the tensor first": (lambda x: op.multiply(
        op.multiply(x, const(0.5)), op.add(const(1), op.erf(op.multiply(x, const(1 / ROOT))))), "nn.gelu"),
    "half at the other side": (lambda x: op.multiply(
        x, op.multiply(const(0.5), op.add(op.erf(op.divide(x, const(ROOT))), const(1)))), "nn.gelu"),
    "halved in the end": (lambda x: op.divide(
        op.multiply(op.add(op.erf(op.divide(x, const(ROOT))), const(1)), x), const(2)), "nn.gelu"),
    "by a tanh and a power": (lambda x: op.multiply(
        op.multiply(const(0.5), x), op.add(op.tanh(inner(x, op.power(x, const(3)))), const(1))), "nn.gelu_tanh"),
    "by a tanh and products": (lambda x: op.multiply(
        op.multiply(x, op.add(const(1), op.tanh(inner(x, op.multiply(op.multiply(x, x), x))))), const(0.5)),
        "nn.gelu_tanh"),
    "by a tanh of a product": (lambda x: op.multiply(op.multiply(x, const(0.5)), op.add(const(1), op.tanh(
        op.multiply(op.multiply(x, const(math.sqrt(2 / math.pi))),
                    op.add(const(1), op.multiply(op.multiply(x, const(0.044715)), x)))))), "nn.gelu_tanh"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_all_ways_to_write_a_gelu_are_one(name):
    formula, after = FORMULAS[name]

    assert becomes(rules.RULES, formula, X)[1] == [after]


@pytest.mark.parametrize(
    "formula",
    [
        lambda x: op.multiply(op.multiply(x, op.add(op.erf(op.divide(x, const(1.5))), const(1))), const(0.5)),
        lambda x: op.multiply(op.multiply(x, op.add(op.erf(op.divide(x, const(ROOT))), const(1))), const(0.6)),
        lambda x: op.multiply(op.multiply(x, op.add(op.erf(x), const(1))), const(0.5)),
    ],
)
def test_other_numbers_are_another_function(formula):
    stays(rules.RULES, formula, X)


def test_a_tensor_gates_another_by_its_own_formula_alone():
    """What multiplies it depends on something else."""
    stays(
        rules.RULES,
        lambda x, y: op.multiply(op.multiply(x, op.add(op.erf(op.divide(y, const(ROOT))), const(1))), const(0.5)),
        X, random((3, 20), seed=1),
    )  # fmt: skip


def test_a_broadcast_tensor_stays_one():
    stays(
        rules.RULES,
        lambda x, y: op.multiply(x, op.multiply(op.add(op.erf(op.divide(x, const(ROOT))), const(1)), y)),
        random((1, 20)), random((3, 20), seed=1),
    )  # fmt: skip


def test_values_are_those_of_the_formula():
    formula, _ = FORMULAS["of torch"]
    [expected] = run(module(formula, X), X)

    erf = np.vectorize(math.erf)(X.astype(np.float64) / ROOT)

    np.testing.assert_allclose(expected, X * (1 + erf) / 2, atol=1e-6)
