import numpy as np
import pytest
from tvm.relax import op

from lib.machine.registers import registers
from lib.search.spaces import columns
from lib.search.spaces.table import fitting
from lib.tir import remainder
from tests.helpers import matmul, run_on, subgraph
from tests.lib.search.spaces.test_contraction import sampled
from tests.lib.search.spaces.test_rows import softmax
from tests.lib.search.spaces.test_window import depthwise


def pooled(_, x):
    return op.mean(x, [1, 2], keepdims=True)


def largest(_, x):
    return op.max(x, [1, 2])


def summed(_, x):
    return op.sum(x, [0])


def exponentials(_, x):
    return op.sum(op.exp(x), [0])


def in_numpy(make, x):
    if make is exponentials:
        return np.exp(x.astype(np.float64)).sum(0)
    if make is pooled:
        return x.astype(np.float64).mean((1, 2), keepdims=True)
    return x.max((1, 2)) if make is largest else x.astype(np.float64).sum(0)


def texts_of_programs(cpu, make, shape):
    """Those of programs of the space, after they were seen to compute what they should."""
    workload = subgraph(cpu, make, shape)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    expected = in_numpy(make, x)
    assert fitting(workload, cpu.tvm()).name == "columns"
    schedules = sampled(workload, cpu)
    for schedule in schedules:
        found = run_on(schedule.mod, cpu.tvm(), [x], np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    return [schedule.mod.script() for schedule in schedules]


@pytest.mark.parametrize(
    ("make", "shape"),
    [(pooled, (1, 7, 7, 64)), (pooled, (2, 14, 14, 40)), (largest, (1, 8, 6, 32)), (summed, (24, 64))],
)
def test_every_program_computes_what_it_should(cpu, make, shape):
    texts = texts_of_programs(cpu, make, shape)

    assert any(text.count("T.parallel(") == 1 for text in texts)  # over the whole image
    assert any(text.count("T.parallel(") == 2 for text in texts)  # in parts, and of these
    assert all('scope="local"' in text for text in texts)


@pytest.mark.parametrize(
    ("make", "shape"),
    [(summed, (24, 257)), (largest, (2, 5, 6, 37)), (pooled, (1, 7, 7, 141)), (exponentials, (9, 47))],
)
def test_channels_that_vectors_leave_over_are_in_a_shorter_one(cpu, make, shape):
    texts = texts_of_programs(cpu, make, shape)

    assert texts
    assert all(remainder.MARK in text for text in texts)
    assert all(f"T.vectorized(T.int64({registers(cpu.tvm()).lanes}))" in text for text in texts)


@pytest.mark.parametrize("name", ["product", "softmax", "window", "few channels"])
def test_other_reductions_are_left_alone(cpu, name):
    workload = {
        "product": matmul,
        "softmax": lambda: softmax(cpu, 8, 64),
        "window": lambda: depthwise(1),
        "few channels": lambda: subgraph(cpu, pooled, (1, 7, 7, 3)),
    }[name]()

    assert not columns.fits(workload, cpu.tvm())
