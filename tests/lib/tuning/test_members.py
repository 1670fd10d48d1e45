import pyarrow as pa
import pytest

from lib.contracts.schemas import FAMILIES, MODELS
from lib.tuning.history import History, SubgraphHistory
from lib.tuning.members import first_latency_s, is_tried, joint_members, latency_s

SUBGRAPHS = pa.table({
    "subgraph_id": ["a", "b", "c"], "weight": pa.array([5, 1, 2], pa.int32()), "flop": [0.0, 1e9, 1e6],
})  # fmt: skip
CLUSTERED = pa.table({"subgraph_id": ["a", "b", "c"], "family_id": ["f", "f", "g"]}).cast(FAMILIES)
MODEL_1 = {"name": "one", "importance": 1.0, "error": "", "subgraphs": ["a", "b"], "calls": [3, 1]}
MODEL_2 = {"name": "two", "importance": 3.0, "error": "", "subgraphs": ["a", "c"], "calls": [2, 2]}
FAILED = {"name": "failed", "importance": 9.0, "error": "why", "subgraphs": [], "calls": []}
JOINT = pa.Table.from_pylist([MODEL_1, FAILED, MODEL_2], schema=MODELS)


def known(**curves):
    return History({name: SubgraphHistory(best_after=list(curve)) for name, curve in curves.items()})


def test_a_second_counts_its_calls_over_the_first_latency_of_each_model_by_importance():
    # First latencies: 3 * 2 + 1 * 4 = 10 and 2 * 2 + 2 * 8 = 20; importance 1/4 and 3/4.
    so_far = known(a=[2.0, 1.0], b=[4.0], c=[8.0])

    found = joint_members(SUBGRAPHS, CLUSTERED, JOINT, so_far)

    assert {m.subgraph_id: m.weight for m in found} == pytest.approx({
        "a": 0.25 * 3 / 10 + 0.75 * 2 / 20, "b": 0.25 * 1 / 10, "c": 0.75 * 2 / 20,
    })  # fmt: skip
    # So the sum over subgraphs is the mean of what is left of the first latencies: 7 of 10, and 18 of 20.
    assert sum(m.weight * so_far.of(m.subgraph_id).best_s for m in found) == pytest.approx(0.25 * 0.7 + 0.75 * 0.9)


def test_subgraphs_are_tried_first_with_the_first_model_that_has_them():
    found = joint_members(SUBGRAPHS, CLUSTERED, JOINT, History())

    assert {m.subgraph_id: m.group for m in found} == {"a": 0, "b": 0, "c": 2}


def test_a_model_is_ready_when_each_of_its_subgraphs_was_tried_whether_or_not_something_worked():
    so_far = known(a=[2.0], b=[float("inf")])

    assert (is_tried(MODEL_1, so_far), is_tried(MODEL_2, so_far)) == (True, False)
    assert first_latency_s(MODEL_1, so_far) == pytest.approx(6.0)
    assert latency_s(MODEL_1, so_far) == float("inf")


def test_what_only_models_of_no_importance_have_is_not_tuned():
    models = pa.Table.from_pylist([MODEL_1, {**MODEL_2, "importance": 0.0}], schema=MODELS)

    assert {m.subgraph_id: m.weight for m in joint_members(SUBGRAPHS, CLUSTERED, models, known(a=[1.0], b=[1.0]))} == {
        "a": 0.75, "b": 0.25,
    }  # fmt: skip
