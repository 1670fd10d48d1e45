"""Programs that TVM alone cannot lower for GPUs, or whose CUDA C++ nvcc refuses. `tests/cuda` runs them."""

import pytest
import tvm_ffi

from lib.machine import targets
from lib.search import evolution
from lib.tir import gpu, lowering, traces
from lib.tir.lowering import Lowering
from lib.tir.traces import EMPTY_TRACE
from tests.cuda.operators import mean, product_of_halves
from tests.cuda.stand_ins import TARGET
from tests.helpers import matmul
from tests.lib.search.spaces.test_contraction import attention

TVMS_OWN = Lowering(prefetch=False, peel=False, stack=False)


@pytest.fixture(scope="module")
def target():
    return targets.target(TARGET).tvm()


def source(program, target, how=None):
    with target:
        return str(lowering.build(program, target, how).imports[0].inspect_source())


def failures(programs, target, how):
    """What building programs ends with, where it fails."""
    found = []
    for program in programs:
        try:
            source(program, target, how)
        except Exception as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("workload", "told"),
    [(mean(), "load_remap_"), (product_of_halves("float32"), "tvm_access_ptr element type must match")],
    ids=["sum across threads, unrolled", "tensor cores with sums in float32"],
)
def test_what_tvm_alone_cannot_lower_is_lowered(target, workload, told):
    proposals = evolution.sample(workload, target, 6, known=set(), seed=0)
    programs = [traces.program(workload, proposal.trace, target) for proposal in proposals]

    assert any(told in error for error in failures(programs, target, TVMS_OWN))
    assert failures(programs, target, None) == []


def test_booleans_are_no_vectors(target):
    program = traces.program(attention(), EMPTY_TRACE, target)

    assert "= *(ushort2*)(mask" in source(program, target, TVMS_OWN)
    assert "*(ushort2*)(mask" not in source(program, target)


def test_other_programs_stay_as_they_are(target):
    workload = matmul(64, 64, 64)
    [proposal] = evolution.sample(workload, target, 1, known=set(), seed=0)
    program = traces.program(workload, proposal.trace, target)

    assert tvm_ffi.structural_equal(gpu.repair(program["main"]), program["main"])
    assert source(program, target) == source(program, target, TVMS_OWN)


def test_a_measurement_says_that_programs_were_repaired():
    assert lowering.standard("cuda").text == f"repair r{lowering.REVISION}"
    assert "repair" not in lowering.standard("llvm").text
