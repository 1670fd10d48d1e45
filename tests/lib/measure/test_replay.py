from dataclasses import asdict, replace

import pyarrow as pa
import pytest

from lib.contracts import tables
from lib.contracts.errors import ConfigError
from lib.contracts.schemas import MEASUREMENTS
from lib.contracts.tables import Provenance
from lib.measure.replay import ReplayRunner
from lib.measure.runner import Job, Measurement
from tests.helpers import CONDITIONS

GOOD = Measurement("a", "subgraph", "ok", [1e-3, 2e-3], None, 0.1, 0.2, 100.0, "host", "cpu", CONDITIONS)
BAD = replace(GOOD, candidate_id="b", status="crash", latencies=[], error="SIGSEGV")


def write(folder, *measurements):
    table = pa.Table.from_pylist([asdict(each) for each in measurements], schema=MEASUREMENTS)
    tables.write(table, folder / "measurements.parquet", MEASUREMENTS, Provenance("inputs", "session"))


def ask(folder, *candidates):
    jobs = [Job(each, "subgraph", "workload", "trace") for each in candidates]
    return list(ReplayRunner(folder, CONDITIONS).run(jobs))


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


def test_only_measurements_of_the_conditions_asked_for_answer_and_the_others_are_told(tmp_path):
    newer = replace(CONDITIONS, lowering="plain r1")
    write(tmp_path / "0", GOOD)
    write(tmp_path / "1", replace(GOOD, latencies=[9.0], conditions=newer), replace(BAD, conditions=newer))

    runner = ReplayRunner(tmp_path, CONDITIONS)

    assert [found.latencies for found in runner.run([Job("a", "subgraph", "workload", "trace")])] == [[1e-3, 2e-3]]
    assert [found.status for found in runner.run([Job("b", "subgraph", "workload", "trace")])] == ["miss"]
    assert runner.left_out == "left out of the replay: 2 measurements with lowering: plain r1, not plain r0"


def test_measurements_of_other_conditions_alone_are_refused_with_what_differs(tmp_path):
    write(tmp_path, GOOD)

    with pytest.raises(ConfigError, match=r"none of its 1 measurements .*\n  weights: cold, not warm"):
        ReplayRunner(tmp_path, replace(CONDITIONS, weights="warm", device="another"))


def test_warm_weights_answer_where_devices_had_no_cold_ones_but_never_beside_them(tmp_path):
    warm = replace(CONDITIONS, weights="warm")
    write(tmp_path / "0", replace(GOOD, conditions=warm))
    assert ReplayRunner(tmp_path, CONDITIONS).conditions == warm

    write(tmp_path / "1", GOOD)
    assert ReplayRunner(tmp_path, CONDITIONS).conditions == CONDITIONS


def test_measurements_of_two_devices_are_not_mixed(tmp_path):
    write(tmp_path, GOOD, replace(BAD, conditions=replace(CONDITIONS, device="another CPU")))

    with pytest.raises(ConfigError, match=r"several devices \(a CPU, another CPU\)"):
        ReplayRunner(tmp_path, CONDITIONS)


def test_the_device_may_be_any_where_none_is_at_hand(tmp_path):
    write(tmp_path, GOOD)

    assert ReplayRunner(tmp_path, replace(CONDITIONS, device="")).conditions == CONDITIONS


def test_a_folder_without_measurements_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no measurements\.parquet"):
        ReplayRunner(tmp_path, CONDITIONS)
