import time
from collections.abc import Iterator, Sequence

import pytest

from lib import host, journal, tables
from lib.errors import DeviceError
from lib.runner import Job, Measurement
from lib.schemas import CANDIDATES, MEASUREMENTS
from stages import measure
from tests.stages.conftest import ORIGIN


class Recorder:
    """Counts what reaches the real pool, and may lose its device."""

    def __init__(self, pool, lost_after=None):
        self.pool, self.lost_after, self.asked = pool, lost_after, []

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
    return measure.run(started.model.subgraphs, runner, origin=ORIGIN, out=files, **options)


def test_every_candidate_has_one_row_in_their_order(started):
    files = started.run.round(0)
    candidates = tables.read(files.candidates, CANDIDATES)

    rows = tables.read(files.measurements, MEASUREMENTS)

    assert rows["candidate_id"].to_pylist() == candidates["candidate_id"].to_pylist()
    assert set(rows["status"].to_pylist()) == {"ok"}


def test_a_row_keeps_where_when_and_with_what_it_was_measured(started, cpu):
    row = tables.read(started.run.round(0).measurements, MEASUREMENTS).to_pylist()[0]

    assert (row["host"], row["device"], row["threads"]) == (host.hostname(), host.cpu_name(), cpu.threads)
    assert "apache-tvm 0.27.0.post1" in row["versions"]
    assert abs(time.time() - row["measured_at"]) < 3600


def test_what_was_measured_before_the_device_was_lost_is_not_measured_again(started, second_round, pool):
    files = second_round.round(1)
    with pytest.raises(DeviceError):
        run(started, files, Recorder(pool, lost_after=3))
    kept = journal.read(files.journal)
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


def test_a_table_whose_candidates_changed_is_kept_aside(started, second_round, pool):
    files = second_round.round(1)
    run(started, files, pool)
    old = files.measurements.read_bytes()
    candidates = tables.read(files.candidates, CANDIDATES)
    tables.write(candidates.slice(2), files.candidates, CANDIDATES, ORIGIN)

    recorder = Recorder(pool)
    run(started, files, recorder)

    assert recorder.asked == []
    assert tables.read(files.measurements, MEASUREMENTS).num_rows == candidates.num_rows - 2
    [kept] = files.folder.glob("measurements-*.parquet")
    assert kept.read_bytes() == old


def test_an_empty_round_measures_nothing(started, second_round, pool):
    files = second_round.round(1)
    tables.write(tables.read(files.candidates, CANDIDATES).slice(0, 0), files.candidates, CANDIDATES, ORIGIN)

    run(started, files, pool)

    assert tables.read(files.measurements, MEASUREMENTS).num_rows == 0
