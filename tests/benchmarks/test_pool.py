"""Two families of two subgraphs, whose programs are the faster the larger their first feature is; the machine was half
as fast for a part of the first pass."""

import json
import shutil
from dataclasses import asdict, replace
from itertools import combinations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import tvm

from lib.contracts import tables
from lib.contracts.conditions import Conditions
from lib.contracts.files import ModelFiles, RunFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, MODELS, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.search.candidates import table
from lib.search.evolution import Proposal
from lib.search.recorded import Recorded
from lib.tuning.planning import PlanConfig
from tests.helpers import matmul, running_sum

PROGRAMS = 40
SLOW = range(10, 20)  # programs of the first pass, measured while the machine was half as fast
OPERATORS = {"a": "matmul", "b": "matmul", "c": "conv2d", "d": "conv2d"}
CONDITIONS = Conditions('{"kind": "llvm"}', 2, "cold", "plain r0", 1, "a CPU", "apache-tvm 0")


def latency_s(subgraph_id, place):
    return (1 + ord(subgraph_id) - ord("a")) * 1e-3 * (2 - place / PROGRAMS)


def measured(pass_number):
    rows = []
    for subgraph_id in OPERATORS:
        for place in range(PROGRAMS):
            is_slow = pass_number == 1 and place in SLOW
            found = latency_s(subgraph_id, place) * (2 if is_slow else 1)
            rows.append({
                "candidate_id": f"{subgraph_id}{place}", "subgraph_id": subgraph_id, "status": "ok",
                "latencies": [found] * 3, "error": None, "build_s": 0.1, "run_s": 0.1,
                "measured_at": 1e4 * ord(subgraph_id) + 1e6 * pass_number + place + (1000 if is_slow else 0),
                "host": "recorder", "device": "cpu", "conditions": asdict(CONDITIONS),
            })  # fmt: skip
    return pa.Table.from_pylist(rows, schema=MEASUREMENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("pool")
    noise = np.random.default_rng(0).normal(size=(4 * PROGRAMS, 3))
    proposals = [
        (key, OPERATORS[key], Proposal(json.dumps([f"{key}{place}"]), f"{key}{place}", "sampled", "rows", None,
                                       np.array([place, *noise[n]], np.float32)))
        for n, (key, place) in enumerate((key, place) for key in OPERATORS for place in range(PROGRAMS))
    ]  # fmt: skip
    found = table(proposals)
    ids = pa.array([f"{key}{place}" for key in OPERATORS for place in range(PROGRAMS)])
    found = found.set_column(found.column_names.index("candidate_id"), CANDIDATES.field("candidate_id"), ids)
    described = [
        {"subgraph_id": key, "name": key, "functions": [key], "weight": 1, "flop": 1.0, "core_operator": operator,
         "operators": [operator], "tunable": True, "note": "", "workload": "{}"}
        for key, operator in OPERATORS.items()
    ]  # fmt: skip
    models = [{"name": "m", "importance": 1.0, "subgraphs": list(OPERATORS), "calls": [1, 1, 1, 1], "error": ""}]
    for name, rows, schema in (
        ("candidates", found, CANDIDATES),
        ("measurements", measured(1), MEASUREMENTS), ("again", measured(2), MEASUREMENTS),
        ("subgraphs", pa.Table.from_pylist(described, schema=SUBGRAPHS), SUBGRAPHS),
        ("models", pa.Table.from_pylist(models, schema=MODELS), MODELS),
    ):  # fmt: skip
        tables.write(rows, out / f"{name}.parquet", schema, Provenance())
    return out


def test_a_moment_in_which_the_machine_was_slower_is_scaled_away(folder):
    from deep import DeepPool

    rows = DeepPool(folder).rows

    expected = [latency_s(row.subgraph_id, int(row.candidate_id[1:])) for row in rows.itertuples()]
    np.testing.assert_allclose(rows["first"], expected, rtol=1e-9)
    np.testing.assert_allclose(rows["latency"], expected, rtol=1e-9)


def test_models_of_a_pool_weigh_by_their_latency(folder):
    from deep import DeepPool

    best = sum(latency_s(key, PROGRAMS - 1) for key in OPERATORS)

    assert DeepPool(folder).weights() == pytest.approx(dict.fromkeys(OPERATORS, 1 / best))


def test_a_split_has_so_many_of_each_subgraph_and_the_others(folder):
    from accuracy import split
    from deep import DeepPool

    pool = DeepPool(folder)

    known, held_out = split(pool, 8, seed=1)

    assert pool.rows.iloc[known]["subgraph_id"].value_counts().to_dict() == dict.fromkeys(OPERATORS, 8)
    assert sorted([*known, *held_out]) == list(range(4 * PROGRAMS))


def test_models_order_what_one_feature_decides_and_one_of_all_does_too(folder):
    from accuracy import of_split, summary

    rows = pd.DataFrame(of_split(folder, 16, seed=0))

    assert set(rows["clustering"]) == {"core-operator", "single", "each"}
    assert (rows["ceiling"] == 1).all()  # the passes agree
    assert rows["pairwise"].min() > 0.8
    assert rows["regret 8"].max() < 1.05
    assert set(rows.loc[rows["others"], "clustering"]) == {"core-operator"}
    assert len(list(summary(rows))) == 2 + 7


def test_what_was_foretold_is_compared_with_the_second_pass():
    from accuracy import told

    rows = pd.DataFrame({"first": [1.0, 2.0, 3.0, 4.0] * 2, "second": [1.0, 3.0, 2.0, 4.0] * 2})
    scores = np.array([0.0, 1.0, 2.0, 3.0] * 2)  # likes slow programs

    found = told(scores, rows)

    assert found["regret 1"] == 4.0
    assert found["regret 8"] == 1.0
    assert found["ceiling"] == pytest.approx(20 / 24)  # one pair of four kinds is the other way round
    assert found["pairwise"] < 0.3


@pytest.fixture(scope="module")
def replayed(folder):
    from deep import DeepPool
    from strategies import Replay, Variant

    def run(variant, seed):
        plan = PlanConfig(strategy=variant[0], num_trials_per_round=8, num_trials_warmup=4)
        replay = Replay(DeepPool(folder), Recorded(folder), Variant(*variant, False), plan, seed)
        return list(replay.rounds())

    return run


def test_a_replay_ends_at_the_best_of_the_pool(replayed):
    for variant in (("foresee", "core-operator"), ("gradient", "single"), ("round-robin", "each")):
        curve = replayed(variant, 0)

        assert curve[-1] == (4 * PROGRAMS, pytest.approx(1.0))  # times the pool's best, as the weights have it
        assert [latency for _, latency in curve] == sorted((latency for _, latency in curve), reverse=True)


def test_an_oracle_needs_no_more_than_a_round_of_each_after_the_first_look(folder):
    from deep import DeepPool
    from strategies import Replay, Variant

    plan = PlanConfig(strategy="round-robin", num_trials_per_round=8, num_trials_warmup=4)
    variant = Variant("round-robin", "single", False, oracle=True)
    curve = dict(Replay(DeepPool(folder), Recorded(folder), variant, plan, 0).rounds())

    assert min(curve) == 4 * 4
    assert curve[4 * (4 + 8)] == pytest.approx(1.0)
    assert curve[4 * 4] > 1.0


def test_variants_of_a_seed_begin_with_the_same_programs(replayed):
    first = {variant: replayed(variant, 3)[0] for variant in (("foresee", "core-operator"), ("gradient", "single"))}
    other = replayed(("gradient", "single"), 4)

    assert len(set(first.values())) == 1
    assert other[0] not in first.values()


def test_trials_to_a_distance_are_those_of_the_first_round_there():
    from strategies import needed

    curve = pd.DataFrame({"trials": [10, 20, 30], "regret": [0.5, 0.03, 0.015]})
    rows = curve.assign(strategy="foresee", clustering="each", base=False, others=False, oracle=False, seed=0)

    [found] = needed(rows).to_dict("records")

    assert (found[0.05], found[0.02], found[0.01]) == (20, 30, 30)  # never within 1 %: all that there was


def test_a_pool_of_runs_has_the_operators_that_were_asked_for_and_counts_as_quiet(folder, tmp_path):
    from gather import gather
    from train_base import Pool

    model, run = ModelFiles(tmp_path / "m"), RunFiles(tmp_path / "m" / "runs" / "r")
    for path, name in (
        (model.subgraphs, "subgraphs"), (run.round(0).candidates, "candidates"),
        (run.round(0).measurements, "measurements"), (run.round(0).training, "candidates"),
    ):  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((folder / f"{name}.parquet").read_bytes())

    gather([run.folder], ["2d", "3d"], tmp_path / "out")

    pool = Pool([tmp_path / "out"], [])
    assert set(pool.operators) == {"conv2d"}
    assert len(pool.latencies) == 2 * PROGRAMS
    assert pool.is_quiet.all()
    assert pool.models == {"m": {"c", "d"}}


def test_programs_of_metaschedules_space_are_left_out_where_a_subgraph_has_a_space_of_its_own_by_now(
    cpu, folder, tmp_path
):
    from train_base import _of_spaces_of_now

    shutil.copytree(folder, tmp_path / "pool")
    rows = tables.read(folder / "subgraphs.parquet", SUBGRAPHS).to_pylist()
    own, stock = tvm.ir.save_json(matmul()), tvm.ir.save_json(running_sum(cpu))
    texts = {"a": own, "b": own, "c": stock, "d": stock}
    described = pa.Table.from_pylist([{**row, "workload": texts[row["subgraph_id"]]} for row in rows], schema=SUBGRAPHS)
    tables.write(described, tmp_path / "pool" / "subgraphs.parquet", SUBGRAPHS, Provenance())
    candidates = tables.read(folder / "candidates.parquet", CANDIDATES)
    spaces = ["rows" if key == "b" else "metaschedule" for key in candidates["subgraph_id"].to_pylist()]
    place = candidates.column_names.index("space")
    candidates = candidates.set_column(place, CANDIDATES.field("space"), pa.array(spaces))

    kept = _of_spaces_of_now(candidates, tmp_path / "pool")

    assert set(kept["subgraph_id"].to_pylist()) == {"b", "c", "d"}


def test_models_that_are_added_replace_those_of_their_operators_and_leave_the_others():
    from train_base import _added

    same = {"features": "f", "training": {}}
    before = {**same, "lowering": ["r4"], "operators": {"matmul": 1, "reduce": 1, "softmax": 1}}
    told = {"made": "now", "lowering": ["r5"], "models": [], "left out": [], "programs": {}}
    card = {**same, **told, "operators": {"reduce": 2}}

    added = _added(before, card, ["reduce", "softmax"])  # of the latter there was not enough

    assert added["operators"] == {"matmul": 1, "reduce": 2}
    assert added["lowering"] == ["r4"]
    assert added["added"] == [{**told, "operators": ["reduce"]}]
    with pytest.raises(SystemExit, match="have features"):
        _added({**before, "features": "g"}, card, ["reduce"])


def test_measurements_go_where_they_are_worth_most():
    from looks import of_model, spread

    shrinking = np.array([[0.2, 0.1, *[0.0] * 8], [0.2, 0.1, *[0.0] * 8], [0.0] * 10])

    assert spread([0.9, 0.05, 0.05], shrinking, 3) == [3, 0, 0]  # what no measurement makes better gets none
    assert spread([0.5, 0.3, 0.2], shrinking, 6) == [3, 3, 0]
    assert spread([0.5, 0.3, 0.2], shrinking, 60) == [3, 3, 0]
    rows = pd.DataFrame(1 + shrinking, columns=[f"regret {n}" for n in range(1, 11)])
    found = of_model(rows, np.array([9.0, 0.5, 0.5]), shrinking, 1)
    assert found["alike"] == pytest.approx(1 + 0.2 * 0.95)
    assert found["spread"] == pytest.approx(1 + 0.2 * 0.05)


def test_features_of_a_pool_are_made_anew_from_its_traces(cpu, tmp_path, folder):
    """Whatever they were before; what was said of lowered programs beside it stays."""
    from renew import renew

    from lib.search import evolution, nest
    from lib.search.features import N_LOWERED

    workload, pool = matmul(), tmp_path / "pool"
    [proposal] = evolution.sample(workload, cpu.tvm(), 1, known=set(), seed=0)
    lowered = np.arange(N_LOWERED, dtype=np.float32)
    old = [np.zeros(55, np.float32), np.concatenate([np.zeros(55, np.float32), lowered]), np.zeros(0, np.float32)]
    rows = [("a", "matmul", replace(proposal, features=features)) for features in old]
    tables.write(table(rows), pool / "candidates.parquet", CANDIDATES, Provenance())
    described = tables.read(folder / "subgraphs.parquet", SUBGRAPHS).to_pylist()[:1]
    subgraphs = [{**row, "subgraph_id": "a", "workload": tvm.ir.save_json(workload)} for row in described]
    tables.write(pa.Table.from_pylist(subgraphs, schema=SUBGRAPHS), pool / "subgraphs.parquet", SUBGRAPHS, Provenance())
    measured = tables.read(folder / "measurements.parquet", MEASUREMENTS).to_pylist()[0]
    measured["conditions"] |= {"target": cpu.text}
    measurements = pa.Table.from_pylist([measured], schema=MEASUREMENTS)
    tables.write(measurements, pool / "measurements.parquet", MEASUREMENTS, Provenance())

    renew(pool)
    found = tables.read(pool / "candidates.parquet", CANDIDATES)["features"].to_pylist()

    expected = nest.features(nest.describe(workload, cpu.tvm()), proposal.trace)
    assert np.array_equal(np.float32(found[0]), expected, equal_nan=True)
    assert np.array_equal(np.float32(found[1]), np.concatenate([expected, lowered]), equal_nan=True)
    assert found[2] == []


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_fastest_of_some_programs_is_the_mean_over_all_ways_to_draw_them(n):
    from having import fastest

    latencies = [3.0, 1.0, 2.0, 5.0]

    assert fastest(latencies, n) == pytest.approx(np.mean([min(drawn) for drawn in combinations(latencies, n)]))
