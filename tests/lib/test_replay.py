from dataclasses import asdict, replace

import pyarrow as pa
import pytest

from lib import tables
from lib.errors import ConfigError
from lib.replay import ReplayRunner
from lib.runner import Job, Measurement
from lib.schemas import MEASUREMENTS
from lib.tables import Origin

GOOD = Measurement("a", "subgraph", "ok", [1e-3, 2e-3], None, 0.1, 0.2, 100.0, "host", "cpu", 2, "versions")
BAD = replace(GOOD, candidate_id="b", status="crash", latencies=[], error="SIGSEGV")


def write(folder, *measurements):
    table = pa.Table.from_pylist([asdict(each) for each in measurements], schema=MEASUREMENTS)
    tables.write(table, folder / "measurements.parquet", MEASUREMENTS, Origin("inputs", "session"))


def ask(folder, *candidates):
    return list(ReplayRunner(folder).run([Job(each, "subgraph", "workload", "trace") for each in candidates]))


def test_it_answers_what_was_measured_failures_included(tmp_path):
    write(tmp_path / "0", GOOD)
    write(tmp_path / "1", BAD)

    assert ask(tmp_path, "b", "a") == [BAD, GOOD]


def test_a_candidate_that_was_never_measured_is_a_clear_miss(tmp_path):
    write(tmp_path, GOOD)

    [found] = ask(tmp_path, "unknown")

    assert (found.candidate_id, found.status, found.latencies) == ("unknown", "miss", [])
    assert found.error == f"never measured in {tmp_path}"


def test_a_success_counts_more_than_a_failure_and_the_latest_more_than_others(tmp_path):
    write(tmp_path / "0", replace(GOOD, measured_at=300.0))
    write(tmp_path / "1", replace(GOOD, measured_at=200.0))
    write(tmp_path / "2", replace(BAD, candidate_id="a", measured_at=400.0))

    assert [found.measured_at for found in ask(tmp_path, "a")] == [300.0]


def test_a_miss_that_was_written_down_is_no_knowledge(tmp_path):
    write(tmp_path / "0", replace(BAD, measured_at=1.0))
    write(tmp_path / "1", replace(BAD, status="miss", measured_at=2.0))

    assert [found.status for found in ask(tmp_path, "b")] == ["crash"]


def test_a_folder_without_measurements_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no measurements\.parquet"):
        ReplayRunner(tmp_path)
