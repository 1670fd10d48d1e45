from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pytest

from lib.contracts import tables
from lib.contracts.errors import ContractError, MissingInput
from lib.contracts.files import RunFiles
from lib.contracts.schemas import CANDIDATES, FAMILIES, MEASUREMENTS, PLAN, SUBGRAPHS, TRAINING
from lib.search.evolution import Proposal
from lib.searching import Known, Searcher
from lib.tuning.base import Base
from lib.tuning.history import History
from lib.tuning.planning import PlanRow
from stages import generate, measure, train
from tests.stages.conftest import PLAN as PLAN_CONFIG
from tests.stages.conftest import PROVENANCE, SEARCH, TRAIN


def again(started, run, cpu, past, out, seed=0):
    return generate.run(
        started.model.subgraphs,
        started.families,
        past,
        cpu,
        PLAN_CONFIG,
        SEARCH,
        seed=seed,
        provenance=PROVENANCE,
        out=out,
    )


def test_the_warm_up_looks_at_every_subgraph_and_at_its_untuned_program(started):
    subgraphs = tables.read(started.model.subgraphs, SUBGRAPHS)["subgraph_id"].to_pylist()

    rows = tables.read(started.run.round(0).candidates, CANDIDATES).to_pylist()

    assert [row["subgraph_id"] for row in rows if row["origin"] == "untuned"] == subgraphs
    assert len({row["candidate_id"] for row in rows}) == len(rows)
    assert all(row["score"] is None for row in rows)


def test_untuned_programs_are_spared_of_subgraphs_with_much_arithmetic_and_a_base_model(started):
    described, families = tables.read(started.model.subgraphs, SUBGRAPHS), tables.read(started.families, FAMILIES)
    rows = described.to_pylist()
    heavy = {row["subgraph_id"] for row in rows if row["core_operator"] in ("conv2d", "softmax")}
    for row in rows:
        row["flop"] = 1e9 if row["subgraph_id"] in heavy else 1e7

    class Bases:
        def of(self, operator):
            return None if operator == "softmax" else Base(operator, Path(), (0.1,))

    known = Known(pa.Table.from_pylist(rows, schema=SUBGRAPHS), families, [], History(), Bases())

    spared = {each.subgraph_id for each in known.subgraphs if each.spares_untuned}
    assert spared == {row["subgraph_id"] for row in rows if row["core_operator"] == "conv2d"} != set()


def test_a_later_round_takes_the_bottleneck_with_its_familys_model(started, second_round):
    first = tables.read(started.run.round(0).measurements, MEASUREMENTS).to_pylist()
    weights = {r["subgraph_id"]: r["weight"] for r in tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()}
    costs = {}
    for row in first:
        if row["status"] == "ok":
            cost = weights[row["subgraph_id"]] * median(row["latencies"])
            costs[row["subgraph_id"]] = min(cost, costs.get(row["subgraph_id"], cost))

    [plan] = tables.read(second_round.round(1).plan, PLAN).to_pylist()
    rows = tables.read(second_round.round(1).candidates, CANDIDATES).to_pylist()

    assert plan["kind"] == "bottleneck"
    assert costs[plan["subgraph_id"]] == max(costs.values())
    assert {"evolved"} <= {row["origin"] for row in rows} <= {"evolved", "sampled"}  # no new one may be sampled
    assert all(row["score"] is not None for row in rows)


def test_nothing_measured_is_asked_for_again(started, second_round):
    before = set(tables.read(started.run.round(0).candidates, CANDIDATES)["program_hash"].to_pylist())

    after = tables.read(second_round.round(1).candidates, CANDIDATES)["program_hash"].to_pylist()

    assert not before & set(after)


def test_equal_inputs_and_seed_give_equal_candidates(started, second_round, cpu):
    path = second_round.round(1).candidates
    before = tables.stamp(path, CANDIDATES).content
    path.unlink()

    again(started, second_round, cpu, second_round.rounds(1), second_round.round(1))

    assert tables.stamp(path, CANDIDATES).content == before


def test_another_seed_gives_other_candidates(started, cpu, tmp_path):
    """Of all subgraphs together: the space of one may be smaller than a round."""
    files = started.run.round(0)
    out = RunFiles(tmp_path).round(0)

    again(started, None, cpu, [], out, seed=1)

    assert tables.stamp(out.candidates, CANDIDATES).content != tables.stamp(files.candidates, CANDIDATES).content


def test_a_foresee_round_goes_to_another_member_of_the_family(started, second_round, cpu, pool):
    files = second_round.round(1)
    measure.run(started.model.subgraphs, pool, provenance=PROVENANCE, out=files)
    train.run(started.families, second_round.rounds(2), TRAIN, seed=0, provenance=PROVENANCE, out=files)

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


def test_a_damaged_cost_model_is_named_before_xgboost_reads_it(started, second_round, cpu):
    path = second_round.round(0).model("conv2d")
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)

    with pytest.raises(ContractError, match=r"conv2d\.ubj is damaged: expected the digest"):
        again(started, second_round, cpu, second_round.rounds(1), second_round.round(1))


def test_a_subgraph_that_cannot_be_searched_costs_its_candidates_alone(started, cpu, tmp_path, monkeypatch, caplog):
    rows = tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()
    broken = rows[0]["subgraph_id"]
    sample = Searcher._sample

    def fails_once(self, space, row, n, known):
        if row.subgraph_id == broken:
            raise RuntimeError("Traceback (most recent call last):\nDivide by zero")
        return sample(self, space, row, n, known)

    monkeypatch.setattr(Searcher, "_sample", fails_once)

    out = RunFiles(tmp_path).round(0)
    again(started, None, cpu, [], out)

    found = set(tables.read(out.candidates, CANDIDATES)["subgraph_id"].to_pylist())
    assert found == {row["subgraph_id"] for row in rows if row["tunable"]} - {broken}
    assert "cannot be searched and stays untuned: Divide by zero" in caplog.text


def test_a_first_look_by_model_says_how_many_trials_it_spared():
    def told(asked, found, enough, score=0.5):
        row = PlanRow("a", "f", "warm-up", asked, None, "first look")
        proposals = [Proposal("[]", str(n), "evolved", "rows", score, np.zeros(1)) for n in range(found)]
        came_out = generate.as_it_came_out(row, enough, proposals)
        return came_out.num_trials, came_out.num_spared

    assert told(asked=10, found=4, enough=3) == (4, 6)
    assert told(asked=10, found=2, enough=9) == (2, 1)  # the space has no more: that is no model's merit
    assert told(asked=10, found=4, enough=3, score=None) == (10, 0)
