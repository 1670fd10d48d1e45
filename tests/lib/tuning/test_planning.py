from collections import Counter

import pytest

from lib.tuning.history import History, SubgraphHistory, TimedCandidate
from lib.tuning.planning import Member, PlanConfig, dead, plan_round, promise

A, B, C = Member("a", "conv2d", 2), Member("b", "conv2d", 1), Member("c", "matmul", 1)
CONFIG = PlanConfig()


def past(*best_after, trials=64, ok=1, fill=1.0):
    trials_after = [trials * (n + 1) for n in range(len(best_after))]
    fastest = [TimedCandidate(best_after[-1], "x", "[]")] if best_after else []
    statuses = Counter(ok=ok, timeout=1)
    total = trials_after[-1] if trials_after else 0
    return SubgraphHistory(total, statuses, list(best_after), trials_after, fill, set(), fastest)


def history(last="", kind="", family="", **subgraphs):
    return History(dict(subgraphs), 1, 0, kind, last, family)


def test_the_first_round_looks_at_every_subgraph():
    rows = plan_round(History(), [A, B, C], CONFIG)

    assert [(row.subgraph_id, row.kind, row.num_trials) for row in rows] == [
        (name, "warm-up", CONFIG.num_trials_warmup) for name in "abc"
    ]


def test_what_was_tried_or_recalled_is_not_looked_at_first_and_groups_come_one_after_the_other():
    late = Member("d", "matmul", 1, group=1)
    known = history(a=past(1.0))

    assert [row.subgraph_id for row in plan_round(known, [A, late, B, C], CONFIG)] == ["b", "c"]
    known = history(a=past(1.0), b=past(1.0), c=past(1.0))
    assert [(row.subgraph_id, row.kind) for row in plan_round(known, [A, late, B, C], CONFIG)] == [("d", "warm-up")]


def test_so_many_subgraphs_are_tried_in_a_round_those_with_the_most_time_first():
    many = [Member("abcdefghijklm"[n], "conv2d", weight=n % 3 + 1, guess_s=1 + n // 3) for n in range(13)]

    rows = plan_round(History(), many, PlanConfig(num_first_looks=8), modelled={"conv2d"})

    assert "".join(row.subgraph_id for row in rows) == "likfhmej"  # 12, 9, 8, 6, 6, 5, 4 and 4 s


def test_what_no_model_foretells_is_looked_at_first():
    rows = plan_round(History(), [A, B, C], CONFIG, modelled={"conv2d"})

    assert [row.subgraph_id for row in rows] == ["c", "a", "b"]


def test_promise_is_the_gradient_worked_by_hand():
    # t = 5, window 3: 2 * (0.2 * (8 - 5) / 3 + 0.8 * 5 / 5) = 2 * (0.2 + 0.8)
    assert promise(past(10.0, 8.0, 7.0, 6.0, 5.0), 2, CONFIG) == pytest.approx(2.0)


def test_promise_after_one_round_is_what_is_left_to_gain():
    assert promise(past(10.0), 3, CONFIG) == pytest.approx(3 * 0.8 * 10)


def test_the_bottleneck_is_the_subgraph_with_the_largest_promise():
    rows = plan_round(history(a=past(1.0), b=past(1.0), c=past(5.0)), [A, B, C], CONFIG)

    assert [(row.subgraph_id, row.kind, row.num_trials) for row in rows] == [("c", "bottleneck", 64)]


def test_a_bottleneck_round_is_followed_by_its_family_with_a_share_of_the_trials():
    rows = plan_round(history("a", "bottleneck", "conv2d", a=past(9.0), b=past(1.0), c=past(5.0)), [A, B, C], CONFIG)

    assert [(row.subgraph_id, row.kind, row.num_trials) for row in rows] == [("b", "foresee", 16)]


def test_a_foresee_round_is_followed_by_the_next_bottleneck():
    rows = plan_round(history("b", "foresee", "conv2d", a=past(9.0), b=past(1.0), c=past(5.0)), [A, B, C], CONFIG)

    assert [(row.subgraph_id, row.kind) for row in rows] == [("a", "bottleneck")]


@pytest.mark.parametrize("config", [PlanConfig(strategy="gradient"), PlanConfig(foresee=0.0)])
def test_without_foresee_every_round_is_a_bottleneck_round(config):
    rows = plan_round(history("a", "bottleneck", "conv2d", a=past(9.0), b=past(1.0), c=past(5.0)), [A, B, C], config)

    assert [(row.subgraph_id, row.kind) for row in rows] == [("a", "bottleneck")]


def test_a_family_of_one_has_nobody_to_foresee():
    rows = plan_round(history("c", "bottleneck", "matmul", a=past(9.0), b=past(1.0), c=past(5.0)), [A, B, C], CONFIG)

    assert rows[0].kind == "bottleneck"


def test_round_robin_takes_turns_and_skips_the_dead():
    config = PlanConfig(strategy="round-robin")
    subgraphs = {"a": past(1.0), "b": past(1.0, fill=0.0), "c": past(1.0)}

    first = plan_round(history(**subgraphs), [A, B, C], config)
    second = plan_round(history("a", "turn", "conv2d", **subgraphs), [A, B, C], config)
    third = plan_round(history("c", "turn", "matmul", **subgraphs), [A, B, C], config)

    assert [rows[0].subgraph_id for rows in (first, second, third)] == ["a", "c", "a"]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (past(float("inf"), ok=0), "none of its 64 candidates worked"),
        (past(1.0, fill=0.1), "its space is exhausted"),
        (past(2.0, *[1.0] * 10), "no improvement in 576 trials"),
        (past(2.0, *[1.0] * 3), ""),
        (past(2.0, 1.5, 1.4, 1.3, 1.2, 1.1, 1.05, 1.0, 0.9, 0.8), ""),
    ],
)
def test_a_subgraph_stops_asking_for_trials_for_a_reason(found, reason):
    assert dead(found, CONFIG) == reason


def test_nothing_is_planned_when_nothing_can_improve():
    assert plan_round(history(a=past(1.0, fill=0.0)), [A], CONFIG) == []
