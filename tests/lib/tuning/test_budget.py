from collections import Counter

import pytest

from lib.contracts.errors import ConfigError
from lib.tuning import budget, history
from lib.tuning.budget import Budget, Spent, default_trials
from lib.tuning.history import History, SubgraphHistory
from lib.tuning.planning import Member, PlanConfig
from tests.lib.tuning.test_history import run as run  # a fixture: two rounds of subgraphs a and b

MEMBERS = [Member("a", "f", 3)]
PLAN = PlanConfig(strategy="gradient")


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (Budget(trials=6), "6 trials"),
        (Budget(latency_s=3.0), "estimated latency 3000.000 ms"),
        (Budget(trials=7), ""),
        (Budget(latency_s=2.9), ""),
        (Budget(seconds=100.0), ""),
    ],
)
def test_the_first_limit_that_is_reached_ends_a_run(run, limits, told, monkeypatch):
    monkeypatch.setattr(budget, "spent", lambda *_: Spent(2, 6, 99.0, 3.0, Counter(crash=2)))

    assert budget.standing(run.rounds(2), MEMBERS, limits, PLAN).ended == told


def test_a_run_ends_when_nothing_is_left_to_improve(run, monkeypatch):
    monkeypatch.setattr(budget, "spent", lambda *_: Spent(2, 6, 99.0, 3.0, Counter()))
    impatient = PlanConfig(strategy="gradient", patience=0)

    found = budget.standing(run.rounds(2), MEMBERS, Budget(trials=100), impatient)

    assert found.ended == "no subgraph is left that can improve"
    assert found.exhausted == [("a", "no improvement in 0 trials")]


def test_no_run_is_over_before_each_subgraph_was_tried(run, monkeypatch):
    monkeypatch.setattr(budget, "spent", lambda *_: Spent(2, 6, 99.0, 3.0, Counter()))
    monkeypatch.setattr(history, "modelled", lambda _rounds: set())
    untried = [*MEMBERS, Member("c", "f", 1)]

    assert budget.standing([], MEMBERS, Budget(trials=1), PLAN).ended == ""
    assert budget.standing([], MEMBERS, Budget(trials=0), PLAN).ended  # what is foretold will do
    assert budget.standing(run.rounds(2), untried, Budget(trials=1), PLAN).ended == ""


def test_a_limit_ends_a_run_before_each_was_tried_where_models_foretell_the_others(run, monkeypatch):
    monkeypatch.setattr(budget, "spent", lambda *_: Spent(2, 6, 99.0, 3.0, Counter()))
    monkeypatch.setattr(history, "modelled", lambda _rounds: {"f"})
    foretold, other = [*MEMBERS, Member("c", "f", 1)], [*MEMBERS, Member("c", "g", 1)]

    assert budget.standing(run.rounds(2), foretold, Budget(trials=6), PLAN).ended == "6 trials"
    assert budget.standing(run.rounds(2), foretold, Budget(trials=7), PLAN).ended == ""
    assert budget.standing(run.rounds(2), other, Budget(trials=6), PLAN).ended == ""


def past(**latency_and_known):
    """A history in which each subgraph was tried, with its latency and what was known of it at the beginning."""
    found = History()
    for subgraph_id, (latency_s, known) in latency_and_known.items():
        found.subgraphs[subgraph_id] = SubgraphHistory(n_trials=known, best_after=[latency_s], n_recalled=known)
    return found


def of(*subgraph_ids):
    return [Member(subgraph_id, "f", 1) for subgraph_id in subgraph_ids]


def test_without_any_limit_trials_grow_with_the_model_and_a_limit_stays_alone():
    untried, tried = History(), past(a=(1.0, 0), b=(9.0, 0))

    assert Budget().or_default(untried, of("a", "b"), 128) == Budget(trials=256)
    assert Budget().or_default(tried, of("a", "b"), 10) == Budget(trials=20)
    assert Budget(seconds=60.0).or_default(tried, of("a", "b")) == Budget(seconds=60.0)


def test_what_is_known_counts_for_the_default_by_the_time_it_is_of():
    # Of 200 trials, 180 are due to the one of nine tenths of the time and 20 to the other.
    assert default_trials(past(a=(9.0, 100), b=(1.0, 0)), of("a", "b"), 100) == 20
    assert default_trials(past(a=(9.0, 50), b=(1.0, 20)), of("a", "b"), 100) == 90
    assert default_trials(past(a=(9.0, 0), b=(1.0, 20)), of("a", "b"), 100) == 180
    assert default_trials(past(a=(9.0, 100), b=(1.0, 10)), of("a", "b"), 100) == 10


def test_what_never_worked_is_due_no_trials():
    assert default_trials(past(a=(1.0, 0), b=(float("inf"), 0)), of("a", "b"), 100) == 200
    assert default_trials(past(a=(1.0, 100), b=(float("inf"), 0)), of("a", "b"), 100) == 0


def test_all_known_is_no_trial_at_all(run, monkeypatch):
    monkeypatch.setattr(budget, "spent", lambda *_: Spent(0, 0, 0.0, 3.0, Counter()))
    nothing = Budget().or_default(past(a=(1.0, 128)), MEMBERS)

    assert nothing == Budget(trials=0)
    assert budget.standing(run.rounds(2), MEMBERS, nothing, PLAN).ended == "0 trials"


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "limits", [{"trials": -5}, {"seconds": -3.0}, {"latency_s": -1.0}, {"seconds": NAN}, {"latency_s": INFINITY}]
)
def test_a_limit_that_is_no_number_from_0_on_is_refused(limits):
    with pytest.raises(ConfigError, match="--trials, --minutes and --target-latency-ms must be numbers from 0 on"):
        Budget(**limits)
