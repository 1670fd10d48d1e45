import pytest

from lib import tables
from lib.errors import ContractError, MissingInput
from lib.schemas import CANDIDATES, MEASUREMENTS, PLAN, SUBGRAPHS, TRAINING
from stages import generate, measure, train
from tests.stages.conftest import ORIGIN, SEARCH, TRAIN
from tests.stages.conftest import PLAN as PLAN_CONFIG


def again(started, run, cpu, past, out, seed=0):
    return generate.run(
        started.model.subgraphs, started.families, past, cpu, PLAN_CONFIG, SEARCH, seed=seed, origin=ORIGIN, out=out
    )  # fmt: skip


def test_the_warm_up_looks_at_every_subgraph_and_at_its_untuned_program(started):
    subgraphs = tables.read(started.model.subgraphs, SUBGRAPHS)["subgraph_id"].to_pylist()

    rows = tables.read(started.run.round(0).candidates, CANDIDATES).to_pylist()

    assert [row["subgraph_id"] for row in rows if row["origin"] == "untuned"] == subgraphs
    assert len({row["candidate_id"] for row in rows}) == len(rows)
    assert all(row["score"] is None for row in rows)


def test_a_later_round_takes_the_bottleneck_with_its_familys_model(started, second_round):
    first = tables.read(started.run.round(0).measurements, MEASUREMENTS).to_pylist()
    weights = {r["subgraph_id"]: r["weight"] for r in tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()}
    costs = {}
    for row in first:
        if row["status"] == "ok":
            cost = weights[row["subgraph_id"]] * sorted(row["latencies"])[len(row["latencies"]) // 2 - 1]
            costs[row["subgraph_id"]] = min(cost, costs.get(row["subgraph_id"], cost))

    [plan] = tables.read(second_round.round(1).plan, PLAN).to_pylist()
    rows = tables.read(second_round.round(1).candidates, CANDIDATES).to_pylist()

    assert plan["kind"] == "bottleneck"
    assert costs[plan["subgraph_id"]] == pytest.approx(max(costs.values()), rel=0.5)
    assert {row["origin"] for row in rows} == {"evolved", "sampled"}
    assert all(row["score"] is not None for row in rows)


def test_nothing_measured_is_asked_for_again(started, second_round):
    before = set(tables.read(started.run.round(0).candidates, CANDIDATES)["program"].to_pylist())

    after = tables.read(second_round.round(1).candidates, CANDIDATES)["program"].to_pylist()

    assert not before & set(after)


def test_equal_inputs_and_seed_give_equal_candidates(started, second_round, cpu):
    path = second_round.round(1).candidates
    before = tables.stamp(path, CANDIDATES).content
    path.unlink()

    again(started, second_round, cpu, second_round.rounds(1), second_round.round(1))

    assert tables.stamp(path, CANDIDATES).content == before


def test_another_seed_gives_other_candidates(started, second_round, cpu):
    path = second_round.round(1).candidates
    before = tables.stamp(path, CANDIDATES).content

    again(started, second_round, cpu, second_round.rounds(1), second_round.round(1), seed=1)

    assert tables.stamp(path, CANDIDATES).content != before


def test_a_foresee_round_goes_to_another_member_of_the_family(started, second_round, cpu, pool):
    files = second_round.round(1)
    measure.run(started.model.subgraphs, pool, origin=ORIGIN, out=files)
    train.run(started.families, second_round.rounds(2), TRAIN, seed=0, origin=ORIGIN, out=files)

    again(started, second_round, cpu, second_round.rounds(2), second_round.round(2))

    [bottleneck] = tables.read(files.plan, PLAN).to_pylist()
    [foresee] = tables.read(second_round.round(2).plan, PLAN).to_pylist()
    assert (foresee["kind"], foresee["num_trials"], foresee["family_id"]) == ("foresee", 2, bottleneck["family_id"])
    assert foresee["subgraph_id"] != bottleneck["subgraph_id"]


def test_a_missing_model_is_named(started, second_round, cpu):
    [model] = [r["model"] for r in tables.read(second_round.round(0).training, TRAINING).to_pylist() if r["model"]]
    (second_round.folder / model).unlink()

    with pytest.raises(MissingInput, match=r"conv2d\.ubj does not exist"):
        again(started, second_round, cpu, second_round.rounds(1), second_round.round(1))


def test_damaged_measurements_of_an_earlier_round_are_named(started, second_round, cpu):
    path = second_round.round(0).measurements
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(ContractError, match=r"0000/measurements\.parquet is damaged"):
        again(started, second_round, cpu, second_round.rounds(1), second_round.round(1))
