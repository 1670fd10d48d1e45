"""A few of many elements."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from lib.graph import fusion, selection
from tests.lib.graph.rules.helpers import module, operators


def run(made, target, x):
    machine = relax.VirtualMachine(relax.build(made, target=target), tvm.cpu())
    return [each.numpy() for each in machine["main"](tvm.runtime.tensor(x))]


def drawn(shape):
    """Values of which many are equal, zeros of both signs, and infinities."""
    random = np.random.default_rng(0)
    x = random.integers(-8, 8, shape).astype(np.float32)
    x[random.random(shape) < 0.1] = -0.0
    x[random.random(shape) < 0.1] = -np.inf
    x[random.random(shape) < 0.05] = np.inf
    return x


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(
    ("shape", "axis", "k"),
    [((3, 50), -1, 7), ((2, 4, 16), 2, 16), ((2, 33, 5), 1, 4), ((40,), 0, 3), ((3, 1), 1, 1), ((2, 3, 100), -1, 1)],
)
def test_they_are_found_in_the_order_of_a_stable_sort(shape, axis, k, largest, cpu):
    made = module(lambda x: op.topk(x, k, axis, "both", largest, "int64"), shape)
    x = drawn(shape)

    fused = fusion.fuse(fusion.lift_constants(made).module, cpu.tvm())
    values, places = run(fused, cpu.tvm(), x)

    expected = np.argsort(-x if largest else x, axis, kind="stable").take(range(k), axis)
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis))
    assert "tvm.contrib.sort.topk" not in fused.script()


@pytest.mark.parametrize(("wanted", "kind"), [("values", "float32"), ("indices", "int32")])
def test_one_of_both_is_a_tensor(wanted, kind, cpu):
    made = module(lambda x: op.topk(x, 2, -1, wanted, True, "int32"), (3, 20))
    x = np.random.default_rng(0).permuted(np.arange(60, dtype=np.float32)).reshape(3, 20)

    machine = relax.VirtualMachine(relax.build(selection.in_vectors(made), target=cpu.tvm()), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(x)).numpy()

    order = np.argsort(-x)[:, :2]
    assert found.dtype == kind
    np.testing.assert_array_equal(found, order if wanted == "indices" else np.take_along_axis(x, order, 1))


def test_what_is_no_number_does_not_lead_out_of_the_row(cpu):
    x = np.full((2, 20), np.nan, np.float32)
    made = module(lambda x: op.topk(x, 20, -1, "both", True, "int64"), x.shape)

    _, places = run(selection.in_vectors(made), cpu.tvm(), x)

    np.testing.assert_array_equal(np.sort(places), np.tile(np.arange(20), (2, 1)))


@pytest.mark.parametrize(
    ("build", "shape", "why"),
    [
        (lambda x: op.topk(x, 900, -1, "both"), (2, 1000), "so many that a sort is as fast"),
        (lambda x: op.topk(op.astype(x, "int32"), 3, -1, "both"), (2, 100), "integers"),
        (lambda x: op.topk(x, 3, -1, "both"), (1, 1 << 15), "a row that is too long for a stack"),
        (lambda x: op.topk(x, 3, -1, "both"), ("n", 100), "not known how many rows"),
    ],
)
def test_what_tvm_sorts(build, shape, why):
    made = module(build, shape)

    assert operators(selection.in_vectors(made)) == operators(made), why
