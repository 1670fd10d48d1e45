import json
from collections import Counter

import pytest

from lib.tuning import agreement
from lib.tuning.agreement import Sharing
from lib.tuning.history import History, SubgraphHistory, TimedCandidate
from lib.tuning.planning import Member, PlanConfig, plan_round

NARROW, WIDE = "i1%0/16 i0%0/1 i1%16/1", "i1%0/64 i0%0/1 i1%64/1"


def index_map(columns: int) -> str:
    """Of a weight (i0, i1) that is packed in so many columns, as TVM writes it."""
    nodes = [
        {"type": "None"}, {"type": "ir.Var", "data": {}}, {"type": "ir.Var", "data": {}},
        {"type": "ffi.Array", "data": [1, 2]}, {"type": "int", "data": columns},
        {"type": "ir.IntImm", "data": {"value": 4}},
        {"type": "prim.FloorDiv", "data": {"a": 2, "b": 5}}, {"type": "prim.FloorMod", "data": {"a": 2, "b": 5}},
        {"type": "ffi.Array", "data": [6, 1, 7]},
        {"type": "tirx.IndexMap", "data": {"initial_indices": 3, "final_indices": 8, "inverse_index_map": 0}},
    ]  # fmt: skip
    return json.dumps({"root_index": 9, "nodes": nodes})


def timed(columns: int, latency_s: float) -> TimedCandidate:
    trace = json.dumps([[["TransformLayout", ["b0", index_map(columns)], [1, 0, None, 0], []]], []])
    return TimedCandidate(latency_s, f"{columns}-{latency_s}", trace)


def past(*fastest: TimedCandidate, n_refits: int = 0) -> SubgraphHistory:
    best = min(each.latency_s for each in fastest)
    return SubgraphHistory(
        len(fastest),
        Counter(ok=len(fastest)),
        fastest=sorted(fastest, key=lambda each: each.latency_s),
        best_after=[best],
        trials_after=[1],
        n_refits=n_refits,
    )


def history(**subgraphs: SubgraphHistory) -> History:
    return History(dict(subgraphs))


SHARED = [Sharing("a", "g", 1.0), Sharing("b", "g", 1.0)]


def test_a_group_has_the_packing_that_costs_least_over_all_of_it():
    so_far = history(a=past(timed(16, 1.0), timed(64, 3.0)), b=past(timed(16, 9.0), timed(64, 2.0)))

    assert agreement.chosen(SHARED, so_far) == {"a": WIDE, "b": WIDE}
    assert agreement.chosen([Sharing("a", "g", 9.0), SHARED[1]], so_far) == {"a": NARROW, "b": NARROW}
    assert agreement.chosen([Sharing("a", "g", 1.0), Sharing("b", "h", 1.0)], so_far) == {"a": NARROW, "b": WIDE}


def test_what_was_not_measured_is_taken_to_cost_a_tenth_more_until_it_is_found_wanting():
    so_far = history(a=past(timed(16, 1.0)), b=past(timed(64, 8.0)))

    assert agreement.lacking(SHARED, so_far) == {"a": WIDE}
    so_far = history(a=past(timed(16, 1.0), n_refits=2), b=past(timed(64, 8.0), n_refits=2))
    assert agreement.lacking(SHARED, so_far) == {}


def test_where_one_cannot_have_the_best_packing_all_try_the_next_one_and_take_it_if_it_costs_little():
    so_far = history(a=past(timed(16, 1.0), n_refits=2), b=past(timed(64, 8.0)))
    assert agreement.lacking(SHARED, so_far) == {"b": NARROW}

    so_far = history(a=past(timed(16, 1.0), n_refits=2), b=past(timed(64, 8.0), timed(16, 8.5), n_refits=1))
    assert agreement.chosen(SHARED, so_far, is_final=True) == {"a": NARROW, "b": NARROW}

    so_far = history(a=past(timed(16, 1.0), n_refits=2), b=past(timed(64, 8.0), timed(16, 12.0), n_refits=1))
    assert agreement.chosen(SHARED, so_far, is_final=True) == {"a": WIDE, "b": WIDE}


def test_in_the_end_the_packing_that_more_have_is_taken_unless_it_costs_a_tenth_more():
    so_far = history(a=past(timed(16, 1.0), timed(64, 1.18)), b=past(timed(64, 1.0)))

    assert agreement.chosen(SHARED, so_far) == {"a": NARROW, "b": NARROW}
    assert agreement.chosen(SHARED, so_far, is_final=True) == {"a": WIDE, "b": WIDE}
    so_far = history(a=past(timed(16, 1.0), timed(64, 9.0)), b=past(timed(64, 1.0)))
    assert agreement.chosen(SHARED, so_far, is_final=True) == {"a": NARROW, "b": NARROW}


def test_an_untuned_program_has_no_say():
    so_far = history(a=past(TimedCandidate(0.5, "untuned", "[[], []]"), timed(16, 1.0)), b=past(timed(64, 2.0)))

    assert set(agreement.chosen(SHARED, so_far).values()) == {WIDE}


def test_only_programs_with_the_packing_are_left_where_there_are_any():
    both = past(timed(16, 1.0), timed(64, 3.0))

    assert [each.latency_s for each in agreement.restricted(both, WIDE).fastest] == [3.0]
    assert agreement.restricted(both, "another") == both


def test_rounds_ask_for_what_lacks_a_packing_before_they_improve_anything():
    members = [Member("a", "f", 1.0, shares="g"), Member("b", "f", 1.0, shares="g"), Member("c", "f", 1.0)]
    so_far = history(a=past(timed(16, 1.0)), b=past(timed(64, 8.0)), c=past(timed(16, 5.0)))

    [row] = plan_round(so_far, members, PlanConfig())
    assert (row.subgraph_id, row.kind) == ("a", "refit")
    so_far = history(a=past(timed(16, 1.0), timed(64, 1.0)), b=past(timed(64, 8.0)), c=past(timed(16, 5.0)))
    assert {row.kind for row in plan_round(so_far, members, PlanConfig())} == {"bottleneck"}


@pytest.mark.parametrize("columns", [16, 64])
def test_a_packing_is_read_from_the_index_map(columns):
    assert list(agreement.best_by_packing(past(timed(columns, 1.0)))) == [NARROW if columns == 16 else WIDE]


def test_what_was_not_measured_has_the_packing_of_its_group_and_others_lose_what_packs_otherwise():
    so_far = history(a=past(timed(16, 1.0), timed(64, 3.0)), b=past(timed(16, 9.0), timed(64, 2.0)))

    packed, agreed = agreement.agreed(SHARED, {"a": "g", "b": "g", "c": "g", "d": "h"}, so_far)

    assert packed == {"a": WIDE, "b": WIDE, "c": WIDE}
    assert [each.latency_s for each in agreed.of("a").fastest] == [3.0]
    assert [each.latency_s for each in agreed.of("b").fastest] == [2.0]
    assert so_far.of("a").fastest[0].latency_s == 1.0
