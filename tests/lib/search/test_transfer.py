import numpy as np
import pytest

from lib.search import evolution, nest, transfer
from lib.search.evolution import DesignSpace
from lib.search.spaces.table import SPACES
from lib.search.transfer import Donor
from lib.tir import traces
from tests.helpers import matmul, run_on
from tests.lib.search.spaces.test_contraction import convolution

WORKLOAD = matmul(96, 320, 60)


def donor(cpu, workload, name, spaces=SPACES, seed=0):
    [proposal] = evolution.sample(workload, cpu.tvm(), 1, known=set(), seed=seed, spaces=spaces)
    return Donor(name, proposal.trace, nest.describe(workload, cpu.tvm()).context)


def test_the_donors_most_like_a_workload_come_first_and_are_named(cpu):
    donors = [donor(cpu, matmul(8, 16, 2048), "far"), donor(cpu, matmul(96, 288, 64), "near")]

    [found] = transfer.adapted(DesignSpace(WORKLOAD, cpu.tvm(), SPACES, 0), donors, 1)

    assert (found.origin, found.donor, found.space) == ("adapted", "near", "contraction")


@pytest.mark.parametrize("spaces", [SPACES, ()])
def test_an_adapted_program_computes_what_the_workload_does(cpu, spaces):
    donors = [donor(cpu, matmul(64, 256, 128), "a", spaces, seed) for seed in range(3)]

    found = transfer.adapted(DesignSpace(WORKLOAD, cpu.tvm(), spaces, 0), donors, 3)

    a, b = np.random.default_rng(0).random((96, 60), np.float32), np.random.default_rng(1).random((60, 320), np.float32)
    assert found
    assert len({proposal.program_hash for proposal in found}) == len(found)
    for proposal in found:
        program = traces.program(WORKLOAD, proposal.trace, cpu.tvm())
        result = run_on(program, cpu.tvm(), [a, b], np.zeros((96, 320), np.float32))
        np.testing.assert_allclose(result, a @ b, rtol=1e-4)


def test_an_image_and_a_product_are_far_from_each_other(cpu):
    product, like, image = (nest.describe(w, cpu.tvm()).context for w in (WORKLOAD, matmul(96, 288, 64), convolution()))

    assert transfer.distance(product, product) == 0
    assert transfer.distance(like, product) < transfer.distance(image, product)


def test_without_donors_nothing_is_adapted(cpu):
    assert transfer.adapted(DesignSpace(WORKLOAD, cpu.tvm(), SPACES, 0), [], 3) == []
