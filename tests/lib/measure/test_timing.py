"""Timing on arguments that stay or move; what a worker does with it is in `test_worker`."""

import itertools
import math
import time

import numpy as np
import pytest
import tvm

from lib.measure import timing
from lib.measure.timing import ColdMemory
from lib.tir import lowering
from tests.helpers import matmul

ROWS, COLUMNS, DEPTH = 4, 512, 256  # half a megabyte of weights


@pytest.fixture(scope="module")
def memory():
    return ColdMemory()


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_copies_do_not_overlap_and_are_more_than_caches_hold(dtype, size):
    shapes = [(DEPTH, COLUMNS), (COLUMNS,)]
    found = [tensor for tensors in ColdMemory(dtype).copies(shapes) for tensor in tensors]

    assert {str(tensor.dtype) for tensor in found} == {dtype}
    assert all(np.isfinite(tensor.numpy().astype(np.float32)).all() for tensor in found[:4])
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + size * math.prod(tensor.shape)) for tensor in found)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert sum(end - begin for begin, end in spans) > 90e6
    assert all(begin % 64 == 0 for begin, _ in spans)


def test_there_is_no_copy_of_what_is_larger_than_the_memory(memory):
    assert memory.copies([(1 << 15, 1 << 10)]) == []


def test_each_run_takes_the_next_arguments(cpu, memory):
    kernel = lowering.build(matmul(ROWS, COLUMNS, DEPTH), cpu.tvm())
    x = np.ones((ROWS, DEPTH), np.float32)
    data, out = tvm.runtime.tensor(x), tvm.runtime.tensor(np.zeros((ROWS, COLUMNS), np.float32))
    argument_lists = [[data, weights, out] for [weights] in memory.copies([(DEPTH, COLUMNS)])]
    evaluate = timing.on_rotating_arguments(kernel, argument_lists)

    for runs in (7, 14):  # two repeats of three each time, and one to wake the threads up
        latencies = evaluate(3, 2)
        last = argument_lists[runs - 1][1].numpy()

        assert len(latencies) == 2
        assert min(latencies) > 0
        np.testing.assert_allclose(out.numpy(), x @ last, rtol=1e-4, atol=1e-4)


def test_a_first_look_at_a_long_kernel_runs_it_once():
    runs = []

    def kernel(*_arguments):
        runs.append(0)
        time.sleep(0.005)

    evaluate = timing.on_rotating_arguments({"main": kernel}, [[1]])

    [latency_s] = evaluate(1, 1)
    assert (len(runs), latency_s >= 0.005) == (1, True)
    evaluate(2, 1)
    assert len(runs) == 1 + 1 + 2  # one wakes the threads up


def evaluator(latency_s, asked):
    """A kernel that always takes so long."""

    def evaluate(number, repeat):
        asked.append((number, repeat))
        return [latency_s] * repeat

    return evaluate


@pytest.mark.parametrize(
    ("slow_above_s", "asked"),
    [
        (None, [(1, 1), (4, 3)]),
        (0.01, [(1, 1), (4, 3)]),
        (0.004, [(1, 1)]),
    ],
    ids=["no limit", "faster than the limit", "slower"],
)
def test_what_is_slower_than_the_limit_is_timed_once(slow_above_s, asked):
    seen = []

    latencies, number = timing.time_kernel(evaluator(0.005, seen), 3, 0.02, slow_above_s)

    assert seen == asked
    assert (latencies, number) == ([0.005] * asked[-1][1], asked[-1][0])
