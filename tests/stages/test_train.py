import math
from dataclasses import replace

import numpy as np
import pytest

from lib.contracts import tables
from lib.contracts.errors import ContractError
from lib.contracts.schemas import CANDIDATES, FAMILIES, MEASUREMENTS, N_FEATURES, TRAINING
from lib.tuning import history
from stages import measure, train
from tests.stages.conftest import PROVENANCE, TRAIN


@pytest.fixture
def measured(started, second_round, pool):
    files = second_round.round(1)
    measure.run(started.model.subgraphs, pool, provenance=PROVENANCE, out=files)
    return second_round


def rows_by_family(files):
    return {row["family_id"]: row for row in tables.read(files.training, TRAINING).to_pylist()}


def test_families_with_enough_programs_get_a_model_the_others_a_row(started):
    rows = rows_by_family(started.run.round(0))

    assert set(rows) == set(tables.read(started.families, FAMILIES)["family_id"].to_pylist())
    assert {family for family, row in rows.items() if row["model"]} == {"conv2d"}
    assert rows["conv2d"]["num_samples"] == 10  # untuned programs teach nothing
    assert (started.run.folder / rows["conv2d"]["model"]).exists()


def test_a_round_trains_its_own_family_and_keeps_the_models_of_the_others(started, measured):
    train.run(started.families, measured.rounds(2), TRAIN, seed=0, provenance=PROVENANCE, out=measured.round(1))

    first, second = rows_by_family(measured.round(0)), rows_by_family(measured.round(1))
    touched = set(history.samples(measured.round(1)).families)
    for family in first:
        if family in touched:
            assert second[family]["num_samples"] > first[family]["num_samples"]
        else:
            assert second[family]["model"] == first[family]["model"]


def score_in_order_and_measure_the_best_two_the_other_way_round(files):
    """New scores and latencies for a round; returns how many candidates each subgraph has."""
    places: dict[str, int] = {}
    scores, latencies = [], []
    for subgraph_id in tables.read(files.measurements, MEASUREMENTS)["subgraph_id"].to_pylist():
        place = places.setdefault(subgraph_id, 0)
        places[subgraph_id] += 1
        scores.append(-float(place))
        latencies.append([1e-3 * {0: 1, 1: 0}.get(place, place) + 1e-3])
    for path, schema, columns in (
        (files.candidates, CANDIDATES, {"score": scores}),
        (files.measurements, MEASUREMENTS, {"latencies": latencies, "status": ["ok"] * len(latencies)}),
    ):
        table = tables.read(path, schema)
        for name, values in columns.items():
            column = tables.pa.array(values, schema.field(name).type)
            table = table.set_column(schema.get_field_index(name), schema.field(name), column)
        tables.write(table, path, schema, PROVENANCE)
    return list(places.values())


def test_the_accuracy_is_that_of_the_scores_given_before_training(started, measured):
    counts = score_in_order_and_measure_the_best_two_the_other_way_round(measured.round(1))
    train.run(started.families, measured.rounds(2), TRAIN, seed=0, provenance=PROVENANCE, out=measured.round(1))

    rows = rows_by_family(measured.round(1))

    [family] = set(history.samples(measured.round(1)).families)
    wrong = [1 / (n * (n - 1) / 2) for n in counts]  # one pair of each subgraph's
    assert rows[family]["num_predicted"] == sum(counts)
    assert rows[family]["pairwise_accuracy"] == pytest.approx(1 - sum(wrong) / len(wrong))
    assert all(row["num_predicted"] == 0 and row["pairwise_accuracy"] is None for f, row in rows.items() if f != family)


def test_equal_tables_give_equal_models(started, measured):
    train.run(started.families, measured.rounds(2), TRAIN, seed=0, provenance=PROVENANCE, out=measured.round(1))
    first = rows_by_family(measured.round(1))

    train.run(started.families, measured.rounds(2), TRAIN, seed=0, provenance=PROVENANCE, out=measured.round(1))

    assert {f: r["model_digest"] for f, r in rows_by_family(measured.round(1)).items()} == {
        f: r["model_digest"] for f, r in first.items()
    }


def test_training_data_is_what_the_tables_say(measured):
    samples = history.samples(measured.round(1))

    rows = tables.read(measured.round(1).measurements, MEASUREMENTS).to_pylist()

    for row, latency in zip(rows, samples.latencies_s, strict=True):
        assert math.isnan(latency) == (row["status"] != "ok")
        if row["status"] == "ok":
            assert min(row["latencies"]) <= latency <= max(row["latencies"])
    assert samples.features.shape == (len(rows), N_FEATURES)
    assert np.isfinite(samples.features).any(axis=1).all()


def test_a_family_in_which_nothing_worked_gets_no_model(measured, started):
    path = measured.round(1).measurements
    rows = [{**row, "status": "crash", "latencies": []} for row in tables.read(path, MEASUREMENTS).to_pylist()]
    tables.write(tables.pa.Table.from_pylist(rows, schema=MEASUREMENTS), path, MEASUREMENTS, PROVENANCE)
    samples = history.samples(measured.round(1))

    data, _ = train.gather([samples], samples.families[0], TRAIN)

    assert train.fit(data, TRAIN, 0) is None


def test_only_the_latest_programs_are_trained_on_the_familys_own_and_others(measured):
    config = type(TRAIN)(min_samples=2, max_samples=5, max_others=3)
    samples = history.samples(measured.round(1))
    is_last = np.arange(len(samples.families)) >= len(samples.families) - 7
    both = replace(samples, families=np.where(is_last, samples.families, "another"))

    data, others = train.gather([samples, both], samples.families[0], config)

    assert data.latencies_s.tolist() == samples.latencies_s[-5:].tolist()
    assert others.latencies_s.tolist() == samples.latencies_s[~is_last][-3:].tolist()
    assert len(train.gather([samples], samples.families[0], config)[1]) == 0
    assert len(train.gather([both], "another", replace(config, max_others=0))[1]) == 0


def test_a_measurements_table_of_another_version_is_refused(started, measured):
    path = measured.round(1).measurements
    newer = MEASUREMENTS.with_metadata({**MEASUREMENTS.metadata, b"version": b"9"})
    tables.write(tables.read(path, MEASUREMENTS), path, newer, PROVENANCE)

    with pytest.raises(ContractError, match="version: expected 2, found 9"):
        train.run(started.families, measured.rounds(2), TRAIN, seed=0, provenance=PROVENANCE, out=measured.round(1))
