"""Whole runs on other devices than this CPU, and several runs at once; started as a user starts them."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lib.contracts import tables
from lib.contracts.files import RunFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS
from lib.machine import host
from tests.farm import Farm, kill, until
from tests.helpers import ROOT, SMALL, environment, luigi, luigi_command, small_network

TUNE = ("TuneModel", "--model", str(SMALL), "--trials", "14", "--threads", "1")


def run_of(tmp_path: Path) -> RunFiles:
    [folder] = (tmp_path / "artifacts").glob("*/small-*/runs/*")
    return RunFiles(folder)


def rows(run: RunFiles, number: int) -> list[dict]:
    return tables.read(run.round(number).measurements, MEASUREMENTS).to_pylist()


@pytest.fixture(scope="module")
def tuned_over_rpc(tmp_path_factory):
    folder, farm = tmp_path_factory.mktemp("rpc"), Farm(servers=2)
    done = luigi(folder, *TUNE, "--devices", farm.address)
    farm.close()
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_model_is_tuned_compiled_and_verified_over_rpc(tuned_over_rpc):
    folder, done = tuned_over_rpc
    run = run_of(folder)
    manifest = json.loads(run.compiled.manifest.read_text())

    assert "speed-up" in done.stdout
    assert {row["status"] for row in rows(run, 0)} == {"ok"}
    assert {row["device"].rpartition(":")[0] for row in rows(run, 0)} == {"test at 127.0.0.1"}
    assert manifest["n_trials"] >= 14
    assert manifest["max_error"] < 1e-4
    assert set(manifest["latencies_s"]) == {"tuned", "untuned"}


def test_a_replay_of_a_run_searches_the_same_candidates_and_measures_nothing(tuned_over_rpc, tmp_path):
    recorded, _ = tuned_over_rpc

    done = luigi(tmp_path, *TUNE, "--devices", f"replay:{recorded / 'artifacts'}")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Nothing is compiled from replayed measurements")
    before, after = run_of(recorded), run_of(tmp_path)
    numbers = range(len(list((before.folder / "rounds").iterdir())))
    for number in numbers:
        assert rows(after, number) == rows(before, number)
        stamps = [tables.stamp(run.round(number).candidates, CANDIDATES) for run in (before, after)]
        assert stamps[0].content == stamps[1].content
    again = luigi(tmp_path, *TUNE, "--devices", f"replay:{recorded / 'artifacts'}")
    assert again.stdout.startswith("Nothing is left to do; the tables are in ")


def test_other_candidates_than_those_recorded_are_misses_and_no_failures_to_learn_from(tuned_over_rpc, tmp_path):
    recorded, _ = tuned_over_rpc

    done = luigi(tmp_path, *TUNE, "--seed", "7", "--devices", f"replay:{recorded / 'artifacts'}")

    assert done.returncode == 0, done.stderr
    statuses = [row["status"] for row in rows(run_of(tmp_path), 0)]
    assert statuses.count("miss") > 0
    assert statuses.count("ok") > 0  # the untuned program of each subgraph


@pytest.mark.skipif(bool(host.gpus()), reason="there is a GPU")
def test_models_that_should_train_on_a_missing_gpu_train_on_the_cpu_and_say_so(tuned_over_rpc, tmp_path):
    recorded, _ = tuned_over_rpc
    surroundings = environment(tmp_path)
    config = Path(surroundings["LUIGI_CONFIG_PATH"])
    config.write_text(config.read_text().replace("[train]", "[train]\ndevice = cuda"))

    done = subprocess.run(
        luigi_command(*TUNE, "--devices", f"replay:{recorded / 'artifacts'}"), cwd=ROOT, env=surroundings, text=True,
        capture_output=True, timeout=100,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: [train] device = cuda: ") == 1
    assert "so cost models train on the CPU" in done.stderr


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ("gpu", "--devices must be `local`"),
        ("replay:/nowhere", "there is no folder /nowhere"),
    ],
)
def test_devices_that_are_not_there_end_the_run_with_a_message(devices, told, tmp_path):
    done = luigi(tmp_path, *TUNE, "--devices", devices)

    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tracker_that_is_not_there_is_told_at_once_and_ends_the_run_later(tmp_path):
    done = luigi(tmp_path, *TUNE, "--devices", "rpc://127.0.0.1:1/key", measure="device_patience_s = 3")

    assert done.returncode != 0
    assert done.stderr.startswith("warning: The tracker 127.0.0.1:1 does not answer")
    assert "error: The tracker 127.0.0.1:1 does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_loses_all_devices_stops_and_the_same_command_continues(tmp_path):
    farm = Farm(servers=1)
    command = luigi_command(*TUNE, "--devices", farm.address)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(tmp_path, measure="device_patience_s = 10"), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    until(lambda: [path for path in journals(tmp_path) if path.read_text().count("\n") > 5])
    kill(farm.servers[0])
    _, told = process.communicate(timeout=100)
    [journal] = journals(tmp_path)
    before = [json.loads(line)["row"] for line in journal.read_text().splitlines()]

    farm.start_server()
    done = luigi(tmp_path, *TUNE, "--devices", farm.address)
    farm.close()

    assert process.returncode != 0
    assert "No server is registered under 'test'" in told
    assert "the same command continues" in told
    assert done.returncode == 0, done.stderr
    assert {row["candidate_id"]: row["measured_at"] for row in before}.items() <= {
        row["candidate_id"]: row["measured_at"] for row in rows(run_of(tmp_path), 0)
    }.items()


def test_two_hosts_share_a_device_which_times_one_candidate_at_a_time(tmp_path):
    """Each has locks and artifacts of its own, as hosts have; models of other seeds, so that both have work."""
    farm, processes = Farm(servers=1), []
    for seed in ("0", "1"):
        host_folder = tmp_path / seed
        host_folder.mkdir()
        surroundings = {**environment(host_folder), "TUNER_LOCKS": str(host_folder)}
        command = luigi_command(*TUNE, "--seed", seed, "--devices", farm.address)
        processes.append(subprocess.Popen(
            command, cwd=ROOT, env=surroundings, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ))  # fmt: skip
    told = [process.communicate(timeout=250) for process in processes]
    farm.close()

    assert [process.returncode for process in processes] == [0, 0], told
    found = [rows(run_of(tmp_path / seed), 0) for seed in ("0", "1")]
    timed = [[(row["measured_at"] - row["run_s"], row["measured_at"]) for row in each] for each in found]
    assert {row["status"] for each in found for row in each} == {"ok"}
    assert not overlaps(*timed)  # one candidate at a time


def journals(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "artifacts").rglob("measurements.jsonl"))


def test_two_runs_of_one_command_share_the_work(tmp_path):
    processes = [
        subprocess.Popen(
            luigi_command(*TUNE), cwd=ROOT, env=environment(tmp_path), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=300) for process in processes]

    assert [process.returncode for process in processes] == [0, 0], told
    assert all("speed-up" in out for out, _ in told)
    run = run_of(tmp_path)
    found = [
        row["candidate_id"]
        for number in range(len(list((run.folder / "rounds").iterdir())))
        for row in rows(run, number)
    ]
    assert len(found) == len(set(found))
    assert json.loads(run.compiled.manifest.read_text())["n_trials"] == len(found)


@pytest.fixture
def luigid(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from luigi.cmdline import luigid; luigid()", "--address", "127.0.0.1",
               "--port", str(port), "--state-path", str(tmp_path / "state")]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: _answers(port))
    yield port
    process.kill()
    process.wait()


def _answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_workers_of_a_central_scheduler_share_one_store(tmp_path, luigid):
    surroundings = environment(tmp_path)
    with Path(surroundings["LUIGI_CONFIG_PATH"]).open("a") as config:
        config.write(f"[core]\nlocal_scheduler = false\ndefault_scheduler_port = {luigid}\n")
    other = [*TUNE[:2], str(small_network(tmp_path / "other.onnx", seed=1)), *TUNE[3:]]
    processes = [
        subprocess.Popen(
            luigi_command(*command), cwd=ROOT, env=surroundings, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for command in (TUNE, TUNE, other)
    ]  # fmt: skip
    told = [process.communicate(timeout=400) for process in processes]

    assert [process.returncode for process in processes] == [0, 0, 0], told
    one, another = (Past(tmp_path / "artifacts", model) for model in ("small-*", "other-*"))
    assert one.max_error < 1e-4
    assert another.max_error < 1e-4
    assert len(set(one.candidates)) == len(one.candidates)
    own = set(another.timings) - set(one.timings)  # what one run measures, the other takes from the memory
    assert not overlaps(set(one.timings), own)  # one candidate at a time,
    assert not overlaps(one.timings, another.searches)  # with nobody searching meanwhile
    assert not overlaps(one.searches, another.timings)


class Past:
    """When a finished run did what, as intervals in Unix time."""

    def __init__(self, artifacts: Path, model: str) -> None:
        [manifest] = artifacts.glob(f"*/{model}/runs/*/compiled/manifest.json")
        self.max_error = json.loads(manifest.read_text())["max_error"]
        rounds = [path.parent for path in manifest.parent.parent.glob("rounds/*/measurements.parquet")]
        rows = [row for path in rounds for row in tables.read(path / "measurements.parquet", MEASUREMENTS).to_pylist()]
        self.candidates = [row["candidate_id"] for row in rows]
        self.timings = [(row["measured_at"] - row["run_s"], row["measured_at"]) for row in rows]
        clocks = [tables.stamp(path / "candidates.parquet", CANDIDATES).clock for path in rounds]
        self.searches = [(clock["started"], clock["started"] + clock["total"]) for clock in clocks]


def overlaps(some, others):
    return [(a, b) for a in some for b in others if a[0] < b[1] and b[0] < a[1]]
