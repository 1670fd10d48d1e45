import numpy as np
import pytest

from lib.contracts.errors import ConfigError
from lib.search import evolution
from lib.search.evolution import DesignSpace, Measured, SearchConfig
from lib.search.features import padded
from lib.search.spaces.space import Space
from lib.search.spaces.table import SPACES
from lib.tir import packings, traces
from lib.tir.workload import program_hash
from lib.tuning.cost_model import Samples, TrainConfig, train
from tests.helpers import matmul, matmul_of_weights, run_on

QUICK = SearchConfig(population=32, generations=2)
PRODUCT = matmul(64, 256, 64)


@pytest.fixture(scope="module")
def sampled(cpu):
    return evolution.sample(PRODUCT, cpu.tvm(), 24, known=set(), seed=1)


@pytest.fixture(scope="module")
def model(sampled):
    """Thinks that the programs sampled last are the fastest."""
    latencies = np.linspace(2.0, 1.0, len(sampled))
    vectors = padded([p.features for p in sampled])
    return train(Samples(vectors, np.zeros(len(sampled)), latencies), TrainConfig(), 0)


def evolve(cpu, model, sampled, seed=1, n=16):
    parents = [Measured(p.trace, 1.0 + n) for n, p in enumerate(reversed(sampled))]
    known = {p.program_hash for p in sampled}
    space = DesignSpace(PRODUCT, cpu.tvm(), QUICK.offered, seed)
    return evolution.evolve(space, n, model=model, parents=parents, known=known, seed=seed, config=QUICK)


def test_samples_are_distinct_programs_with_features(sampled):
    assert len({p.program_hash for p in sampled}) == len(sampled) == 24
    assert all(np.isfinite(p.features).any() and p.origin == "sampled" for p in sampled)


def test_equal_seeds_give_equal_candidates(cpu, model, sampled):
    first, second = evolve(cpu, model, sampled), evolve(cpu, model, sampled)

    assert [p.trace for p in first] == [p.trace for p in second]


def test_other_seeds_give_other_candidates(cpu, model, sampled):
    first, second = evolve(cpu, model, sampled, seed=1), evolve(cpu, model, sampled, seed=2)

    assert {p.program_hash for p in first} != {p.program_hash for p in second}


def test_nothing_known_is_proposed_again(cpu, model, sampled):
    found = evolve(cpu, model, sampled)

    assert len({p.program_hash for p in found}) == len(found) == 16
    assert not {p.program_hash for p in found} & {p.program_hash for p in sampled}


def test_evolved_candidates_score_higher_than_random_ones(cpu, model, sampled):
    found = evolve(cpu, model, sampled)
    random = evolution.sample(PRODUCT, cpu.tvm(), 32, known=set(), seed=9)

    evolved = [p.score for p in found if p.origin == "evolved"]

    assert np.median(evolved) > np.median(model.predict(padded([p.features for p in random])))


def test_a_space_that_is_exhausted_gives_fewer(cpu):
    tiny = matmul(1, 1, 1)
    first = evolution.sample(tiny, cpu.tvm(), 64, known=set(), seed=0)

    again = evolution.sample(tiny, cpu.tvm(), 64, known={p.program_hash for p in first}, seed=1)

    assert len(first) < 64
    assert len(again) < len(first)


def test_a_trace_replayed_from_json_gives_the_same_program(cpu, sampled):
    assert [program_hash(traces.apply(PRODUCT, p.trace).mod) for p in sampled] == [p.program_hash for p in sampled]


def test_every_sampled_program_computes_the_product(cpu, sampled):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(64, 64)).astype(np.float32), rng.normal(size=(64, 256)).astype(np.float32)

    for proposal in sampled[:6]:
        module = traces.apply(PRODUCT, proposal.trace).mod
        found = run_on(module, cpu.tvm(), [x, w], np.zeros((64, 256), np.float32))
        np.testing.assert_allclose(found, x @ w, rtol=1e-4, atol=1e-4)


def test_the_untuned_program_is_the_workload_itself(cpu):
    proposal = evolution.untuned(matmul(), cpu.tvm())

    assert proposal.program_hash == program_hash(matmul())
    assert program_hash(traces.apply(matmul(), proposal.trace).mod) == proposal.program_hash


def fails(schedule, block, _registers):
    """Sketches with a bug."""
    return [schedule.get_loops(block)[7]]


def test_a_space_that_fails_is_replaced_by_metaschedules_and_the_candidates_say_so(cpu, caplog):
    broken = Space("broken", fits=lambda *_: True, sketches=fails)

    found = evolution.sample(PRODUCT, cpu.tvm(), 4, known=set(), seed=0, spaces=[broken])

    assert [proposal.space for proposal in found] == ["metaschedule"] * 4
    assert "The space 'broken' fails on a workload, which gets MetaSchedule's instead: " in caplog.text


def test_candidates_name_the_space_they_come_from(cpu, model, sampled):
    alone = evolution.sample(PRODUCT, cpu.tvm(), 4, known=set(), seed=0, spaces=())

    assert {p.space for p in sampled} == {"contraction"}
    assert {p.space for p in evolve(cpu, model, sampled)} == {"contraction"}
    assert [p.space for p in alone] == ["metaschedule"] * 4
    assert evolution.untuned(PRODUCT, cpu.tvm()).space == "none"


def test_the_search_can_be_run_in_metaschedules_space(cpu, model):
    config = SearchConfig(population=32, generations=2, spaces="metaschedule")
    sampled = evolution.sample(PRODUCT, cpu.tvm(), 8, known=set(), seed=0, spaces=config.offered)
    parents = [Measured(p.trace, 1.0 + n) for n, p in enumerate(sampled)]

    space = DesignSpace(PRODUCT, cpu.tvm(), config.offered, 0)
    found = evolution.evolve(space, 8, model=model, parents=parents, known=set(), seed=0, config=config)

    assert {p.origin for p in found} == {"evolved", "sampled"}
    assert {p.space for p in found} == {"metaschedule"}


def test_a_choice_of_spaces_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"must be one of own, metaschedule, recorded, but got 'all'"):
        SearchConfig(spaces="all")


class Shifted:
    """A model whose scores are all so much higher. Differences within a workload are all that a score says."""

    def __init__(self, model, by):
        self._model, self._by = model, by

    def predict(self, features):
        return self._model.predict(features).astype(np.float64) + self._by


def test_metaschedules_search_goes_by_differences_of_scores(cpu):
    config = SearchConfig(population=32, generations=3, spaces="metaschedule")
    sampled = evolution.sample(PRODUCT, cpu.tvm(), 16, known=set(), seed=0, spaces=config.offered)
    vectors, latencies = padded([p.features for p in sampled]), np.linspace(2.0, 1.0, len(sampled))
    model = train(Samples(vectors, np.zeros(len(sampled)), latencies), TrainConfig(), 0)
    space = DesignSpace(PRODUCT, cpu.tvm(), config.offered, 0)

    low, high = (
        evolution.evolve(space, 6, model=Shifted(model, by), parents=[], known=set(), seed=1, config=config, n_random=0)
        for by in (-5.0, 5.0)
    )

    assert [p.trace for p in low] == [p.trace for p in high]


def test_names_of_spaces_are_distinct():
    names = [space.name for space in SPACES] + ["metaschedule", "none"]

    assert len(set(names)) == len(names)


@pytest.mark.parametrize("has_model", [True, False])
def test_programs_that_pack_weights_as_wanted_are_found_and_none_where_there_are_none(cpu, model, has_model):
    space = DesignSpace(matmul_of_weights(24, 256, 64), cpu.tvm(), QUICK.offered, 0)
    there = {packings.packing(each.trace) for each in evolution.sampled(space, 24, known=set(), seed=0)}
    wanted = sorted(there)[0]

    def packed(packing, known=()):
        return evolution.packed(
            space, 4, packing, model=model if has_model else None, parents=[], known=known, seed=0, config=QUICK
        )

    found = packed(wanted)
    assert len(found) == 4
    assert {packings.packing(each.trace) for each in found} == {wanted}
    assert {each.origin for each in found} == {"refit"}
    assert not {each.program_hash for each in found} & {
        each.program_hash for each in packed(wanted, {each.program_hash for each in found})
    }
    assert packed("i1%0/12345 i0%0/1 i1%12345/1") == []
