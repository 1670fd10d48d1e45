"""Candidates of all operators, and that a fault in them would be seen."""

import pytest

from tests.cuda import candidates
from tests.cuda.operators import HALVES, OPERATORS
from tests.cuda.test_candidates import SAMPLE

pytestmark = pytest.mark.usefixtures("gpus")


@pytest.fixture(autouse=True)
def compiled_by_nvcc(monkeypatch):
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvcc")


@pytest.mark.parametrize("name", [name for name in OPERATORS | HALVES if name not in SAMPLE])
def test_candidates_compute_what_the_cpu_does(name):
    workload = (OPERATORS | HALVES)[name]()

    found = candidates.outcomes(workload, candidates.sampled(workload, 2))

    assert {(each.status, each.told) for each in found} == {("right", "")}


@pytest.mark.parametrize("name", ["matmul", "softmax"])
def test_most_candidates_are_wrong_without_their_barriers(name):
    workload = (OPERATORS | HALVES)[name]()
    traces = candidates.sampled(workload, 8)

    having = [n for n, each in enumerate(candidates.outcomes(workload, traces)) if each.barriers]
    without = candidates.outcomes(workload, [traces[n] for n in having], without=candidates.BARRIER)

    assert len(having) >= 3
    assert sum(each.status != "right" for each in without) > len(having) / 2
