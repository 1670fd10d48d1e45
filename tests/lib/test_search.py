import numpy as np
import pytest
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from lib import search, spaces, workloads
from lib.cost_model import TrainConfig, labels, train
from lib.search import Measured, SearchConfig
from tests.helpers import matmul, run_on


@derived_object
class _Fails(ms.schedule_rule.PyScheduleRule):
    """A rule with a bug."""

    def _initialize_with_tune_context(self, context): ...

    def apply(self, schedule, block):
        return [schedule.get_loops(block)[7]]

    def clone(self):
        return _Fails()


QUICK = SearchConfig(population=32, generations=2)
PRODUCT = matmul(64, 256, 64)


@pytest.fixture(scope="module")
def sampled(cpu):
    return search.sample(PRODUCT, cpu.tvm(), 24, known=set(), seed=1)


@pytest.fixture(scope="module")
def model(sampled):
    """Thinks that the programs sampled last are the fastest."""
    latencies = np.linspace(2.0, 1.0, len(sampled))
    return train([p.features for p in sampled], labels(latencies, np.zeros(len(sampled))), TrainConfig(), 0)


def evolve(cpu, model, sampled, seed=1, n=16):
    parents = [Measured(p.trace, 1.0 + n) for n, p in enumerate(reversed(sampled))]
    known = {p.program for p in sampled}
    return search.evolve(PRODUCT, cpu.tvm(), n, model=model, parents=parents, known=known, seed=seed, config=QUICK)


def test_samples_are_distinct_programs_with_features(sampled):
    assert len({p.program for p in sampled}) == len(sampled) == 24
    assert all(p.features.shape[1] == 164 and p.origin == "sampled" for p in sampled)


def test_equal_seeds_give_equal_candidates(cpu, model, sampled):
    first, second = evolve(cpu, model, sampled), evolve(cpu, model, sampled)

    assert [p.trace for p in first] == [p.trace for p in second]


def test_other_seeds_give_other_candidates(cpu, model, sampled):
    first, second = evolve(cpu, model, sampled, seed=1), evolve(cpu, model, sampled, seed=2)

    assert {p.program for p in first} != {p.program for p in second}


def test_nothing_known_is_proposed_again(cpu, model, sampled):
    found = evolve(cpu, model, sampled)

    assert len({p.program for p in found}) == len(found) == 16
    assert not {p.program for p in found} & {p.program for p in sampled}


def test_evolved_candidates_score_higher_than_random_ones(cpu, model, sampled):
    found = evolve(cpu, model, sampled)
    random = search.sample(PRODUCT, cpu.tvm(), 32, known=set(), seed=9)

    evolved = [p.score for p in found if p.origin == "evolved"]

    assert np.median(evolved) > np.median(model.predict([p.features for p in random]))


def test_a_space_that_is_exhausted_gives_fewer(cpu):
    tiny = matmul(1, 1, 1)
    first = search.sample(tiny, cpu.tvm(), 64, known=set(), seed=0)

    again = search.sample(tiny, cpu.tvm(), 64, known={p.program for p in first}, seed=1)

    assert len(first) < 64
    assert len(again) < len(first)


def test_a_trace_replayed_from_json_gives_the_same_program(cpu, sampled):
    assert [workloads.program_hash(search.apply(PRODUCT, p.trace).mod) for p in sampled] == [p.program for p in sampled]


def test_every_sampled_program_computes_the_product(cpu, sampled):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(64, 64)).astype(np.float32), rng.normal(size=(64, 256)).astype(np.float32)

    for proposal in sampled[:6]:
        module = search.apply(PRODUCT, proposal.trace).mod
        found = run_on(module, cpu.tvm(), [x, w], np.zeros((64, 256), np.float32))
        np.testing.assert_allclose(found, x @ w, rtol=1e-4, atol=1e-4)


def test_the_untuned_program_is_the_workload_itself(cpu):
    proposal = search.untuned(matmul(), cpu.tvm())

    assert proposal.program == workloads.program_hash(matmul())
    assert workloads.program_hash(search.apply(matmul(), proposal.trace).mod) == proposal.program


def test_a_space_that_fails_is_replaced_by_metaschedules(cpu, monkeypatch, caplog):
    broken = ms.space_generator.PostOrderApply(sch_rules=[_Fails()], postprocs=[], mutator_probs={})
    monkeypatch.setattr(spaces, "generators", lambda *_: [broken, "post-order-apply"])

    found = search.sample(PRODUCT, cpu.tvm(), 4, known=set(), seed=0)

    assert len(found) == 4
    assert "gets MetaSchedule's instead: " in caplog.text
