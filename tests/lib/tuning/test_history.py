from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pytest

from lib.contracts import tables
from lib.contracts.errors import MissingInput
from lib.contracts.files import RunFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, N_FEATURES, PLAN
from lib.contracts.tables import Provenance
from lib.measure.runner import Measurement
from lib.search.evolution import Proposal
from lib.tuning import history
from lib.tuning.planning import PlanRow
from stages.generate import candidates
from tests.helpers import CONDITIONS

# By round: subgraph, program, latencies in seconds (none: it crashed).
ROUNDS = [
    [("a", "p1", [3.0, 2.0, 4.0]), ("a", "p2", []), ("a", "p3", [5.0])],
    [("a", "p4", [1.0]), ("a", "p5", [9.0]), ("b", "p6", [])],
]


def write_round(run, number, programs):
    files = run.round(number)
    plan = {subgraph: PlanRow(subgraph, "f", "warm-up", 4, None, "") for subgraph, _, _ in programs}
    proposals = [
        (
            plan[subgraph],
            Proposal(f'"{program}"', program, "sampled", "rows", None, np.full(n + 1, n, np.float32)),
        )
        for n, (subgraph, program, _) in enumerate(programs)
    ]
    table = candidates(proposals)
    measured = [
        Measurement(key, subgraph, "ok" if found else "crash", found, None, 0.1, 0.1, 0.0, "host", "cpu", CONDITIONS)
        for key, (subgraph, _, found) in zip(table["candidate_id"].to_pylist(), programs, strict=True)
    ]
    tables.write(
        pa.Table.from_pylist([asdict(row) for row in plan.values()], schema=PLAN), files.plan, PLAN, Provenance()
    )
    tables.write(table, files.candidates, CANDIDATES, Provenance())
    rows = pa.Table.from_pylist([asdict(row) for row in measured], schema=MEASUREMENTS)
    tables.write(rows, files.measurements, MEASUREMENTS, Provenance())


@pytest.fixture
def run(tmp_path):
    run = RunFiles(tmp_path)
    for number, programs in enumerate(ROUNDS):
        write_round(run, number, programs)
    return run


def test_the_best_after_each_round_is_the_lowest_median(run):
    past = history.load(run.rounds(2)).of("a")

    assert past.best_after == [3.0, 1.0]
    assert past.trials_after == [3, 5]
    assert [program.trace for program in past.fastest] == ['"p4"', '"p1"', '"p3"', '"p5"']


def test_failures_are_trials_and_their_programs_are_known(run):
    found = history.load(run.rounds(2))

    assert found.n_trials == 6
    assert found.of("a").statuses == {"ok": 4, "crash": 1}
    assert found.of("a").known >= {"p1", "p2", "p3", "p4", "p5"}
    assert found.of("b").best_s == float("inf")


def test_a_round_that_found_fewer_than_asked_for_is_seen_as_such(run):
    assert history.load(run.rounds(1)).of("a").fill == 3 / 4
    assert history.load(run.rounds(2)).of("b").fill == 1 / 4


def test_folding_on_gives_what_folding_afresh_gives(run):
    history.load(run.rounds(1))
    continued = history.load(run.rounds(2))
    history._folds.clear()

    assert history.load(run.rounds(2)) == continued


def test_finished_rounds_are_read_once(run, monkeypatch):
    history.load(run.rounds(2))
    reads = []
    monkeypatch.setattr(history.tables, "read", lambda path, schema: reads.append(path))

    history.load(run.rounds(2))

    assert reads == []


def test_a_round_written_anew_is_read_anew(run):
    assert history.load(run.rounds(2)).of("a").best_s == 1.0

    write_round(run, 1, [("a", "p7", [0.5])])

    assert history.load(run.rounds(2)).of("a").best_s == 0.5


def test_the_models_latency_is_the_weighted_sum(run):
    assert history.model_latency_s(history.load(run.rounds(2)), {"a": 3}) == pytest.approx(3.0)
    assert history.model_latency_s(history.load(run.rounds(2)), {"a": 3, "b": 1}) == float("inf")


def test_samples_are_features_and_medians_in_order(run):
    samples = history.samples(run.round(0))

    assert samples.latencies_s[[0, 2]].tolist() == [3.0, 5.0]
    assert np.isnan(samples.latencies_s[1])
    assert samples.features.shape == (3, N_FEATURES)
    assert [np.isfinite(vector).sum() for vector in samples.features] == [1, 2, 3]
    assert samples.features[:, 0].tolist() == [0.0, 1.0, 2.0]


def test_a_missing_round_is_named(run):
    with pytest.raises(MissingInput, match=r"0002/plan\.parquet does not exist"):
        history.load(run.rounds(3))


def test_a_round_that_found_nothing_taught_nothing(run):
    write_round(run, 2, [])

    found = history.samples(run.round(2))

    assert found.features.shape == (0, N_FEATURES)
    assert len(found.families) == len(found.latencies_s) == 0
