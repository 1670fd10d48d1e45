"""A sample of what `benchmarks/gpu_candidates.py` does: candidates for GPUs compute what their workload does."""

import pytest

from tests.cuda import candidates
from tests.cuda.operators import HALVES, OPERATORS

pytestmark = pytest.mark.usefixtures("gpus")

SAMPLE = ("conv2d 3x3 stride 2", "matmul of odd extents", "layer norm", "f16 matmul, f32 sums")


@pytest.mark.parametrize("name", SAMPLE)
def test_candidates_compute_what_the_cpu_does(name, monkeypatch):
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvcc")
    workload = (OPERATORS | HALVES)[name]()

    found = candidates.outcomes(workload, candidates.sampled(workload, 2))

    assert len(found) > 1  # with the untuned one
    assert {(each.status, each.told) for each in found} == {("right", "")}
