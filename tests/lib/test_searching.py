import numpy as np
import pytest
import tvm

from lib.machine import host, targets
from lib.search import evolution, nest
from lib.search.evolution import SearchConfig
from lib.search.transfer import Donor
from lib.searching import Searched, Searcher
from lib.tuning.history import History, SubgraphHistory, TimedCandidate
from lib.tuning.planning import PlanRow
from tests.helpers import matmul

QUICK = SearchConfig(population=32, generations=1)
PRODUCT, OTHER = matmul(64, 256, 128), matmul(96, 288, 64)
REGRETS = (0.3, 0.1, 0.03, 0.01)


class LikesTasks:
    """Scores programs by how many parallel tasks they have."""

    def predict(self, features):
        return features[:, nest.NAMES.index("tasks")]


def searcher(cpu, so_far=None, models=None, donors=None, share=0.5, regrets=REGRETS, spares_untuned=False):
    subgraphs = [Searched(key, "matmul", tvm.ir.save_json(module), share, regrets, spares_untuned)
                 for key, module in (("a", PRODUCT), ("b", OTHER))]  # fmt: skip
    return Searcher(subgraphs, so_far or History(), models or {}, cpu.tvm(), QUICK, 1, donors)


def warm_up(key="a", n=10):
    return PlanRow(key, "matmul", "warm-up", n, None, "")


@pytest.fixture(scope="module")
def donor(cpu):
    [found] = evolution.sample(OTHER, cpu.tvm(), 1, known=set(), seed=5)
    return Donor("elsewhere", found.trace, nest.describe(OTHER, cpu.tvm()).context)


def test_without_a_model_a_first_look_is_random_and_as_long_as_asked_for(cpu):
    found = searcher(cpu).propose(warm_up())

    assert [p.origin for p in found] == ["sampled"] * 9 + ["untuned"]
    assert all(p.score is None for p in found)


def test_subgraphs_for_gpus_are_searched_at_a_time_and_find_what_each_finds_alone(monkeypatch):
    gpu = targets.target("nvidia/nvidia-a100")
    monkeypatch.setattr(host, "physical_cores", lambda: 2)
    rows = [warm_up("a", 4), warm_up("b", 4)]

    together = searcher(gpu).propose_all(rows)

    assert [[p.program_hash for p in part] for part in together] == [
        [p.program_hash for p in searcher(gpu).propose(row)] for row in rows
    ]
    assert [len(part) for part in together] == [4, 4]
    assert together[0] != together[1]


def test_with_a_model_a_first_look_is_as_short_as_its_errors_allow(cpu):
    looks = {}
    for share in (0.02, 0.18, 1.0):
        found = searcher(cpu, models={"matmul": LikesTasks()}, share=share).propose(warm_up())
        looks[share] = len(found) - 1
        assert {p.origin for p in found[:-1]} == {"evolved"}
        assert found[-1].origin == "untuned"

    assert looks == {0.02: 1, 0.18: 2, 1.0: 4}  # 0.04 may be lost, and these are two subgraphs


def test_a_hopeless_untuned_program_is_spared_where_a_model_chooses(cpu):
    foretold, random = (searcher(cpu, models=models, spares_untuned=True).propose(warm_up())
                        for models in ({"matmul": LikesTasks()}, {}))  # fmt: skip

    assert {p.origin for p in foretold} == {"evolved"}
    assert random[-1].origin == "untuned"


def test_the_first_look_takes_what_the_model_likes_best(cpu):
    found = searcher(cpu, models={"matmul": LikesTasks()}).propose(warm_up())
    random = evolution.sample(PRODUCT, cpu.tvm(), 32, known=set(), seed=3)

    tasks = nest.NAMES.index("tasks")
    assert found[0].score == max(p.score for p in found[:-1])
    assert found[0].score >= max(p.features[tasks] for p in random)


def test_donors_are_looked_at_beside_it_and_named(cpu, donor):
    for models in ({}, {"matmul": LikesTasks()}):
        found = searcher(cpu, models=models, donors={"matmul": [donor]}).propose(warm_up())

        adapted = [p for p in found if p.origin == "adapted"]
        assert [p.donor for p in adapted] == ["elsewhere"]
        assert (adapted[0].score is None) == (not models)
        assert len({p.program_hash for p in found}) == len(found)


def test_a_subgraph_is_no_donor_of_itself(cpu, donor):
    own = Donor("a", donor.trace, donor.context)

    found = searcher(cpu, donors={"matmul": [own]}).propose(warm_up())

    assert "adapted" not in {p.origin for p in found}


def test_what_is_foretold_stands_in_the_order_of_its_scores(cpu, donor):
    found = searcher(cpu, models={"matmul": LikesTasks()}, donors={"matmul": [donor]}).foretell("a", 3)

    assert [p.score for p in found] == sorted((p.score for p in found), reverse=True)


def test_without_a_model_something_random_is_foretold(cpu):
    assert [p.origin for p in searcher(cpu).foretell("a", 3)] == ["sampled"] * 3


def test_a_later_round_asks_for_nothing_that_was_measured(cpu):
    first = searcher(cpu).propose(warm_up())[:-1]
    past = SubgraphHistory(known={p.program_hash for p in first})
    past.fastest = [TimedCandidate(float(n), str(n), p.trace) for n, p in enumerate(first, 1)]

    found = searcher(cpu, History({"a": past}), {"matmul": LikesTasks()}).propose(
        PlanRow("a", "matmul", "bottleneck", 12, 1.0, "")
    )

    assert found
    assert not {p.program_hash for p in found} & past.known


def test_foresee_goes_where_the_model_sees_most_to_gain(cpu):
    """Of `a` the program with most tasks is known already."""
    best = searcher(cpu, models={"matmul": LikesTasks()}).propose(warm_up())[0]
    [worst] = [min(evolution.sample(OTHER, cpu.tvm(), 16, known=set(), seed=1),
                   key=lambda p: p.features[nest.NAMES.index("tasks")])]  # fmt: skip
    pasts = {
        key: SubgraphHistory(known={p.program_hash}, fastest=[TimedCandidate(1.0, key, p.trace)])
        for key, p in (("a", best), ("b", worst))
    }
    rows = [PlanRow(key, "matmul", "foresee", 4, 1.0, "") for key in ("a", "b")]

    chosen = searcher(cpu, History(pasts), {"matmul": LikesTasks()}).choose(rows)

    assert np.isfinite(best.score)
    assert chosen.subgraph_id == "b"


def test_a_first_look_in_metaschedules_space_is_no_whole_search(cpu, monkeypatch):
    efforts = []

    def evolved(workload, target, n, *, model, parents, known, seed, search):
        efforts.append(search)
        return []

    monkeypatch.setattr(evolution.metaschedule, "evolved", evolved)
    config = SearchConfig(population=256, generations=4, islands=2, spaces="metaschedule")
    subgraphs = [Searched("a", "matmul", tvm.ir.save_json(PRODUCT), 0.5, REGRETS)]

    found = Searcher(subgraphs, History(), {"matmul": LikesTasks()}, cpu.tvm(), config, 1).propose(warm_up())

    assert [(each.population, each.generations) for each in efforts] == [(32, 1)]
    assert {proposal.origin for proposal in found[:-1]} == {"sampled"}  # since nothing was evolved


def test_without_a_measurement_the_model_chooses_among_what_donors_have_and_what_it_finds(cpu):
    config = SearchConfig(population=32, generations=1, spaces="metaschedule")
    subgraphs = [Searched("a", "matmul", tvm.ir.save_json(PRODUCT), 0.5, REGRETS)]
    donors = [
        Donor(f"donor {n}", proposal.trace, nest.describe(OTHER, cpu.tvm()).context)
        for n, proposal in enumerate(evolution.sample(OTHER, cpu.tvm(), 2, known=set(), seed=5, spaces=config.offered))
    ]
    made = Searcher(subgraphs, History(), {"matmul": LikesTasks()}, cpu.tvm(), config, 1, {"matmul": donors})

    found = made.foretell("a", 9)

    assert {"adapted"} < {proposal.origin for proposal in found}
    assert [p.score for p in found] == sorted((p.score for p in found), reverse=True)
