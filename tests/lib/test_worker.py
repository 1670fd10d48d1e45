"""Timing with weights from memory; what a worker does as a process is in `test_workers`."""

import itertools
import math

import numpy as np
import pytest
import tvm

from lib import backends, search, worker, workloads
from lib.worker import Kernels, Memory
from tests.helpers import matmul

ROWS, COLUMNS, DEPTH = 4, 512, 256  # half a megabyte of weights


def marked(module):
    """A workload whose second parameter is a weight."""
    return workloads.as_workload(module["main"].with_attr("layout_free_buffers", [1]))


@pytest.fixture(scope="module")
def memory():
    return Memory()


def test_places_do_not_overlap_and_are_more_than_caches_hold(memory):
    shapes = [(DEPTH, COLUMNS), (COLUMNS,)]
    found = [tensor for places in memory.places(shapes) for tensor in places]

    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + 4 * math.prod(tensor.shape)) for tensor in found)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert sum(end - begin for begin, end in spans) > 90e6
    assert all(begin % 64 == 0 for begin, _ in spans)


def test_there_is_no_place_for_what_is_larger_than_the_memory(memory):
    assert memory.places([(1 << 15, 1 << 10)]) == []


def test_each_run_takes_the_next_place(cpu, memory):
    kernel = backends.build(marked(matmul(ROWS, COLUMNS, DEPTH)), cpu.tvm())
    x = np.ones((ROWS, DEPTH), np.float32)
    data, out = tvm.runtime.tensor(x), tvm.runtime.tensor(np.zeros((ROWS, COLUMNS), np.float32))
    turns = [[data, weights, out] for [weights] in memory.places([(DEPTH, COLUMNS)])]
    evaluate = worker.in_turn(kernel, turns)

    for runs in (7, 14):  # two repeats of three each time, and one to wake the threads up
        latencies = evaluate(3, 2)
        last = turns[runs - 1][1].numpy()

        assert len(latencies) == 2
        assert min(latencies) > 0
        np.testing.assert_allclose(out.numpy(), x @ last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("workload", "n_turns"), [(marked(matmul(16, 32, 64)), 0), (marked(matmul(ROWS, COLUMNS, DEPTH)), 192)]
)
def test_weights_of_some_size_are_read_from_memory(cpu, monkeypatch, workload, n_turns):
    seen = []
    in_turn = worker.in_turn
    monkeypatch.setattr(worker, "in_turn", lambda kernel, turns: seen.append(turns) or in_turn(kernel, turns))
    kernels = Kernels(cpu.tvm())
    kernels.define("w", tvm.ir.save_json(workload))
    kernels.build("c", "w", search.EMPTY_TRACE)

    warm = kernels.time("c", 2, 0.001, math.inf)
    cold = kernels.time("c", 2, 0.001, math.inf, cold_weights=True)

    assert [len(turns) for turns in seen] == ([n_turns] if n_turns else [])
    assert len(warm["latencies"]) == len(cold["latencies"]) == 2
    for data, _, out in itertools.chain(*seen):  # what is computed is not moved
        assert (data.same_as(seen[0][0][0]), out.same_as(seen[0][0][2])) == (True, True)
