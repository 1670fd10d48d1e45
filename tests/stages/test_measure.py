import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from lib.contracts import tables
from lib.contracts.conditions import Conditions
from lib.contracts.errors import ContractError, DeviceError
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS
from lib.machine import host
from lib.measure import journal
from lib.measure.runner import Job, Measurement
from lib.tir import lowering
from lib.tuning import history
from stages import measure, train
from tests.stages.conftest import PROVENANCE, TRAIN

NOW = lowering.standard("llvm").text
LATER = replace(lowering.standard("llvm"), revision=lowering.REVISION + 1).text


class Recorder:
    """Counts what reaches the real pool, and may lose its device."""

    def __init__(self, pool, lost_after=None):
        self.pool, self.lost_after, self.asked = pool, lost_after, []

    @property
    def conditions(self) -> Conditions:
        return self.pool.conditions

    @property
    def clock(self) -> dict[str, float]:
        return self.pool.clock

    def run(self, jobs: Sequence[Job]) -> Iterator[Measurement]:
        self.asked = [job.candidate_id for job in jobs]
        for n, measurement in enumerate(self.pool.run(jobs)):
            if n == self.lost_after:
                raise DeviceError("the device is gone")
            yield measurement


def run(started, files, runner, **options):
    return measure.run(started.model.subgraphs, runner, provenance=PROVENANCE, out=files, **options)


def test_every_candidate_has_one_row_in_their_order(started):
    files = started.run.round(0)
    candidates = tables.read(files.candidates, CANDIDATES)

    rows = tables.read(files.measurements, MEASUREMENTS)

    assert rows["candidate_id"].to_pylist() == candidates["candidate_id"].to_pylist()
    assert set(rows["status"].to_pylist()) == {"ok"}


def test_a_row_keeps_where_when_and_with_what_it_was_measured(started, cpu):
    row = tables.read(started.run.round(0).measurements, MEASUREMENTS).to_pylist()[0]

    assert (row["host"], row["device"]) == (host.hostname(), host.cpu_name())
    assert row["conditions"] == {
        "target": cpu.text,
        "threads": cpu.threads,
        "weights": "cold",
        "lowering": NOW,
        "timing": 1,
        "device": host.cpu_name(),
        "versions": "apache-tvm 0.27.0.post1, apache-tvm-ffi 0.1.14.post1",
    }
    assert abs(time.time() - row["measured_at"]) < 3600


def test_what_was_measured_before_the_device_was_lost_is_not_measured_again(started, second_round, pool):
    files = second_round.round(1)
    with pytest.raises(DeviceError):
        run(started, files, Recorder(pool, lost_after=3))
    kept = journal.read(files.journal).rows
    assert len(kept) == 3

    recorder = Recorder(pool)
    run(started, files, recorder)

    rows = tables.read(files.measurements, MEASUREMENTS).to_pylist()
    assert not set(recorder.asked) & {m.candidate_id for m in kept}
    assert len(recorder.asked) + 3 == len(rows) == tables.read(files.candidates, CANDIDATES).num_rows
    by_id = {row["candidate_id"]: row for row in rows}
    assert all(by_id[m.candidate_id]["latencies"] == m.latencies for m in kept)
    assert not files.journal.exists()


def test_who_watches_is_told_of_every_measurement_those_of_before_included(started, second_round, pool):
    files, seen = second_round.round(1), []
    with pytest.raises(DeviceError):
        run(started, files, Recorder(pool, lost_after=2))

    run(started, files, Recorder(pool), watch=lambda m: seen.append(m.candidate_id))

    assert sorted(seen) == sorted(tables.read(files.candidates, CANDIDATES)["candidate_id"].to_pylist())


def test_measurements_of_candidates_that_are_gone_are_kept_aside(started, second_round, pool):
    files = second_round.round(1)
    run(started, files, pool)
    old = tables.read(files.measurements, MEASUREMENTS)
    candidates = tables.read(files.candidates, CANDIDATES)
    tables.write(candidates.slice(2), files.candidates, CANDIDATES, PROVENANCE)

    recorder = Recorder(pool)
    run(started, files, recorder)

    assert recorder.asked == []
    [kept] = files.folder.glob("measurements-*.parquet")
    assert tables.read(files.measurements, MEASUREMENTS).equals(old.slice(2))
    assert tables.read(kept, MEASUREMENTS).equals(old.slice(0, 2))


def test_measurements_of_another_lowering_are_told_apart_kept_aside_and_made_again(
    started, second_round, pool, monkeypatch
):
    files, told = second_round.round(1), []
    run(started, files, pool)
    old = tables.read(files.measurements, MEASUREMENTS)
    monkeypatch.setattr(lowering, "REVISION", lowering.REVISION + 1)
    newer = replace(pool.conditions, lowering=lowering.standard("llvm").text)
    monkeypatch.setattr(pool, "conditions", newer)

    recorder = Recorder(pool)
    run(started, files, recorder, say=told.append)

    [kept] = files.folder.glob("measurements-*.parquet")
    assert len(recorder.asked) == old.num_rows > 0
    assert tables.read(kept, MEASUREMENTS).equals(old)
    assert {row["lowering"] for row in tables.read(files.measurements, MEASUREMENTS)["conditions"].to_pylist()} == {
        LATER
    }
    assert told == [f"{old.num_rows} candidates are measured again: before they were with lowering: {NOW}, not {LATER}"]


def test_no_model_learns_from_rounds_of_two_lowerings(started, second_round, pool, monkeypatch):
    files = second_round.round(1)
    monkeypatch.setattr(pool, "conditions", replace(pool.conditions, lowering=LATER))
    run(started, files, pool)

    told = f"lowering: {LATER}, not {NOW}"
    with pytest.raises(ContractError, match=re.escape(told)):
        train.run(started.families, second_round.rounds(2), TRAIN, seed=0, provenance=PROVENANCE, out=files)
    with pytest.raises(ContractError, match=re.escape(told)):
        history.load(second_round.rounds(2))


def test_an_empty_round_measures_nothing(started, second_round, pool):
    files = second_round.round(1)
    tables.write(tables.read(files.candidates, CANDIDATES).slice(0, 0), files.candidates, CANDIDATES, PROVENANCE)

    run(started, files, pool)

    assert tables.read(files.measurements, MEASUREMENTS).num_rows == 0
