from collections import Counter

import pytest

from lib.contracts.errors import ConfigError
from lib.tuning import budget
from lib.tuning.budget import Budget, Spent
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
    untried = [*MEMBERS, Member("c", "f", 1)]

    assert budget.standing([], MEMBERS, Budget(trials=0), PLAN).ended == ""
    assert budget.standing(run.rounds(2), untried, Budget(trials=1), PLAN).ended == ""


def test_without_any_limit_trials_grow_with_the_model_and_a_limit_stays_alone():
    assert Budget().or_default([0] * 9) == Budget(trials=9 * budget.TRIALS_PER_SUBGRAPH)
    assert Budget(seconds=60.0).or_default([0] * 9) == Budget(seconds=60.0)


def test_what_is_known_counts_for_the_default_and_all_known_is_no_trial_at_all(run, monkeypatch):
    monkeypatch.setattr(budget, "spent", lambda *_: Spent(0, 0, 0.0, 3.0, Counter()))
    n = budget.TRIALS_PER_SUBGRAPH
    assert Budget().or_default([0, n - 8, 3 * n]) == Budget(trials=n + 8)
    nothing = Budget().or_default([n, n])
    assert nothing == Budget(trials=0)
    assert budget.standing(run.rounds(2), MEMBERS, nothing, PLAN).ended == "0 trials"


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "limits", [{"trials": -5}, {"seconds": -3.0}, {"latency_s": -1.0}, {"seconds": NAN}, {"latency_s": INFINITY}]
)
def test_a_limit_that_is_no_number_from_0_on_is_refused(limits):
    with pytest.raises(ConfigError, match="--trials, --minutes and --target-latency-ms must be numbers from 0 on"):
        Budget(**limits)
