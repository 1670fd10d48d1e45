import numpy as np
import pytest
import tvm
from tvm import relax, te
from tvm.relax import op
from tvm.s_tir.analysis import OOBChecker

from lib.machine import targets
from lib.search.spaces import rows
from lib.tir.workload import as_workload
from tests.helpers import matmul, run_on, subgraph
from tests.lib.search.spaces.test_contraction import sampled

N, WIDTH = 24, 64


def softmax(cpu, *shape):
    return subgraph(cpu, lambda _, x: op.nn.softmax(x, axis=-1), shape)


def log_softmax(cpu, *shape):
    return subgraph(cpu, lambda _, x: op.nn.log_softmax(x, axis=-1), shape)


def layer_norm(cpu, *shape):
    return subgraph(cpu, lambda _, x, a, b: op.nn.layer_norm(x, a, b, [-1], 1e-5), shape, shape[-1:], shape[-1:])


def maximum(cpu, *shape):
    return subgraph(cpu, lambda _, x: op.max(x, axis=-1), shape)


def kept_mean(cpu, *shape):
    """A mean that keeps the rank, with an axis of one element where the columns were."""
    return subgraph(cpu, lambda _, x: op.mean(x, [-1], keepdims=True), shape)


def root_mean_square_norm(cpu, *shape):
    """As Llama has it, given the squares as well."""

    def make(_, squares, x, scale):
        return op.multiply(op.divide(x, op.sqrt(op.add(op.mean(squares, [-1], True), relax.const(1e-5)))), scale)

    return subgraph(cpu, make, shape, shape, shape[-1:])


@pytest.mark.parametrize("shape", [(1, N, WIDTH), (2, 3, 37), (1, N, 1, 100), (1, 1, 1, WIDTH)])
def test_reductions_that_keep_the_rank_are_reductions_over_rows(cpu, shape):
    rng = np.random.default_rng(0)
    x, scale = (rng.normal(size=s).astype(np.float32) for s in (shape, shape[-1:]))
    mean = x.mean(-1, keepdims=True, dtype=np.float64)
    norm = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * scale

    for workload, inputs, expected in [
        (kept_mean(cpu, *shape), [x], mean),
        (root_mean_square_norm(cpu, *shape), [x * x, x, scale], norm),
    ]:
        assert rows.fits(workload, cpu.tvm())
        for schedule in sampled(workload, cpu):
            found = run_on(schedule.mod, cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def in_numpy(make, x, *affine):
    x = x.astype(np.float64)
    if make is softmax:
        powers = np.exp(x - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)
    if make is log_softmax:
        return x - np.log(np.exp(x).sum(-1, keepdims=True))
    if make is layer_norm:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * affine[0] + affine[1]
    return x.max(-1)


@pytest.mark.parametrize("make", [softmax, log_softmax, layer_norm, maximum])
@pytest.mark.parametrize("shape", [(N, WIDTH), (2, 3, 4, WIDTH), (N, 63), (2, 3, 4, 37), (12, 100), (40, 16), (40, 19)])
def test_every_program_computes_what_it_should(cpu, make, shape):
    workload = make(cpu, *shape)
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=s).astype(np.float32) for s in (shape, shape[-1:], shape[-1:])]
    inputs = inputs if make is layer_norm else inputs[:1]
    expected = in_numpy(make, *inputs)

    schedules = sampled(workload, cpu)

    assert rows.fits(workload, cpu.tvm())
    assert len(schedules) >= 4
    for schedule in schedules:
        text = schedule.mod.script()
        assert (text.count("T.parallel(") == 1) != (text.count('"parallel": 1') == 1)
        assert "T.vectorized(" in text
        found = run_on(schedule.mod, cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_vectors_of_two_lanes_are_not_reduced_to_more_results_than_they_have():
    short_vectors = targets.cpu_target('{"kind": "llvm", "mcpu": "nehalem"}', threads=2)
    workload = softmax(short_vectors, 3, 10)
    x = np.random.default_rng(0).normal(size=(3, 10)).astype(np.float32)

    schedules = sampled(workload, short_vectors)

    assert rows.fits(workload, short_vectors.tvm())
    for schedule in schedules:
        OOBChecker()(schedule.mod)  # what it would read beyond its tensors may be right by chance
        found = run_on(schedule.mod, short_vectors.tvm(), [x], np.zeros_like(x))
        np.testing.assert_allclose(found, in_numpy(softmax, x), rtol=1e-4, atol=1e-5)


def test_sums_of_bytes_over_rows_are_exact(cpu):
    x = te.placeholder((2, 3, 49, 32), "uint8", name="x")
    axis = te.reduce_axis((0, 32), "axis")
    total = te.compute((2, 3, 49), lambda *at: te.sum(x[(*at, axis)].astype("int32"), axis), name="total")
    workload = as_workload(te.create_prim_func([x, total]))
    given = np.random.default_rng(0).integers(0, 256, (2, 3, 49, 32)).astype(np.uint8)

    schedules = sampled(workload, cpu)

    assert rows.fits(workload, cpu.tvm())
    for schedule in schedules:
        found = run_on(schedule.mod, cpu.tvm(), [given], np.zeros((2, 3, 49), np.int32))
        np.testing.assert_array_equal(found, given.sum(-1, dtype=np.int32))


def over_lines():
    x = te.placeholder((N, WIDTH), name="x")
    axis = te.reduce_axis((0, N), "axis")
    return as_workload(te.create_prim_func([x, te.compute((WIDTH,), lambda j: te.sum(x[axis, j], axis))]))


@pytest.mark.parametrize("name", ["product", "sum over lines", "short", "a single row"])
def test_other_sums_and_short_rows_are_left_alone(cpu, name):
    workload: tvm.IRModule = {
        "product": matmul,
        "sum over lines": over_lines,
        "short": lambda: softmax(cpu, N, 4),
        "a single row": lambda: softmax(cpu, WIDTH),
    }[name]()

    assert not rows.fits(workload, cpu.tvm())
