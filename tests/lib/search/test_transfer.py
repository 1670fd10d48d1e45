import numpy as np
import pytest

from lib.search import evolution, nest, transfer
from lib.search.evolution import DesignSpace
from lib.search.spaces.table import SPACES
from lib.search.transfer import Donor
from lib.tir import packings, traces
from tests.helpers import matmul, matmul_of_weights, run_on
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


class Likes:
    """A model that likes one point of all that it is asked about, by its place."""

    def __init__(self, place):
        self.place = place

    def predict(self, features):
        return np.array([1.0 if n == self.place else 0.0 for n in range(len(features))])


def packed_donor(cpu, rows, seed):
    [found] = evolution.sample(matmul_of_weights(rows, 256, 128), cpu.tvm(), 1, known=set(), seed=seed)
    return Donor(f"{rows} {seed}", found.trace, nest.describe(matmul_of_weights(rows, 256, 128), cpu.tvm()).context)


def test_what_is_taken_over_packs_weights_as_is_asked_for_and_computes_the_same(cpu):
    workload = matmul_of_weights(72, 256, 128)
    donors = [packed_donor(cpu, rows, seed) for rows in (64, 96) for seed in range(2)]
    wanted = packings.packing(donors[0].trace)
    space = DesignSpace(workload, cpu.tvm(), SPACES, 0)

    found = transfer.taken_over(space, donors, 2, None, wanted)

    assert wanted
    assert 1 <= len(found) <= 2
    assert {packings.packing(each.trace) for each in found} == {wanted}
    assert {each.donor for each in found} <= {each.subgraph_id for each in donors}
    a, b = (
        np.random.default_rng(0).random((72, 128), np.float32),
        np.random.default_rng(1).random((128, 256), np.float32),
    )
    for proposal in found:
        program = traces.program(workload, proposal.trace, cpu.tvm())
        result = run_on(program, cpu.tvm(), [a, b], np.zeros((72, 256), np.float32))
        np.testing.assert_allclose(result, a @ b, rtol=1e-4)
    assert transfer.taken_over(space, donors, 2, None, "as nobody packs") == []


def test_of_what_could_be_taken_over_the_model_chooses(cpu):
    donors = [packed_donor(cpu, 64, seed) for seed in range(4)]
    space = DesignSpace(matmul_of_weights(72, 256, 128), cpu.tvm(), SPACES, 0)
    every = transfer.taken_over(space, donors, 9, None, None)

    chosen = [transfer.taken_over(space, donors, 1, Likes(place), None) for place in range(len(every))]

    assert len(every) > 1
    assert [each.program_hash for [each] in chosen] == [each.program_hash for each in every]
    assert {each.score for [each] in chosen} == {1.0}


def test_an_image_and_a_product_are_far_from_each_other(cpu):
    product, like, image = (nest.describe(w, cpu.tvm()).context for w in (WORKLOAD, matmul(96, 288, 64), convolution()))

    assert transfer.distance(product, product) == 0
    assert transfer.distance(like, product) < transfer.distance(image, product)


def test_without_donors_nothing_is_adapted(cpu):
    assert transfer.adapted(DesignSpace(WORKLOAD, cpu.tvm(), SPACES, 0), [], 3) == []
