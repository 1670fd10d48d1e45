"""The whole, started as a user starts it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from lib.contracts import tables
from lib.contracts.files import ModelFiles, RunFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, PLAN, SUBGRAPHS, TRAINING
from lib.machine import targets
from lib.report import page
from lib.runtime.family_tuner_runtime import weights
from lib.tuning.base import base_models
from tests import helpers
from tests.helpers import ROOT, environment, luigi, luigi_command, with_runtime
from tests.lib.tir.test_dot import needs_it
from tests.lib.tir.test_matrix import needs_it as needs_matrices

SMALL = str(helpers.SMALL)
TRIALS = ("--trials", "14")  # two rounds: 12 to warm up, then 8


def run_files(tmp_path: Path, model: str = "small") -> RunFiles:
    [folder] = (tmp_path / "artifacts").glob(f"*/{model}-*/runs/*")
    return RunFiles(folder)


def subgraphs_of(run: RunFiles):
    return ModelFiles(run.folder.parent.parent).subgraphs, SUBGRAPHS


def n_rounds(run: RunFiles) -> int:
    return len(list((run.folder / "rounds").iterdir()))


def snapshot(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A run to its end; the tests below go on with it, in their order."""
    folder = tmp_path_factory.mktemp("tuned")
    done = luigi(folder, "TuneModel", "--model", SMALL, *TRIALS)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_one_command_ends_with_a_library_a_table_and_pictures(tuned):
    folder, done = tuned
    run = run_files(folder)

    assert "speed-up" in done.stdout
    assert "fused_conv2d_relu" in done.stdout
    assert run.curve.read_bytes().startswith(b"\x89PNG")
    assert run.treemap.read_bytes().startswith(b"\x89PNG")
    assert done.stdout.rstrip().endswith(f"families: {run.treemap}")
    assert run.compiled.library.exists()
    assert json.loads(run.compiled.manifest.read_text())["n_trials"] >= 14


def test_without_a_terminal_each_round_leaves_a_line_and_nothing_else_is_written_but_the_report(tuned):
    _, done = tuned

    lines = [line.partition(" ")[2].split(" · ") for line in done.stderr.splitlines() if "Warning" not in line]
    begun = [["round 0", "begins", "0/14 trials"], ["round 1", "begins", ANY]]
    assert [line[:3] for line in lines[:-1]] == [["round 0", "importing the model", "0 trials"], *begun]
    assert lines[-1][0].startswith("tuning ended: ")


def test_the_same_command_again_does_nothing(tuned):
    folder, _ = tuned
    before = snapshot(folder / "artifacts")

    done = luigi(folder, "TuneModel", "--model", SMALL, *TRIALS)

    assert done.returncode == 0
    assert done.stdout.startswith("Nothing is left to do; the report is ")
    assert snapshot(folder / "artifacts") == before


def test_a_deleted_picture_is_drawn_again_and_nothing_is_compiled(tuned):
    folder, _ = tuned
    run = run_files(folder)
    before = {**snapshot(run.folder / "rounds"), **snapshot(run.compiled.folder)}
    run.treemap.unlink()

    done = luigi(folder, "TuneModel", "--model", SMALL, *TRIALS)

    assert done.returncode == 0, done.stderr
    assert run.treemap.exists()
    assert {**snapshot(run.folder / "rounds"), **snapshot(run.compiled.folder)} == before


def test_a_larger_budget_continues_the_same_run(tuned):
    folder, _ = tuned
    run = run_files(folder)
    rounds, before = n_rounds(run), snapshot(run.folder / "rounds")

    done = luigi(folder, "TuneModel", "--model", SMALL, "--trials", "24")

    assert done.returncode == 0, done.stderr
    assert n_rounds(run) > rounds
    assert snapshot(run.folder / "rounds").items() >= before.items()
    assert json.loads(run.compiled.manifest.read_text())["n_rounds"] == n_rounds(run)


def test_another_limit_continues_the_same_run(tuned):
    folder, _ = tuned
    before = snapshot(folder / "artifacts")

    done = luigi(folder, "TuneModel", "--model", SMALL, "--trials", "24", measure="recycle_after = 7")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Nothing is left to do")
    assert snapshot(folder / "artifacts") == before


def test_a_finished_run_of_subgraphs_as_an_older_version_extracted_them_goes_on_with_those_of_now(tuned, tmp_path):
    folder, _ = tuned
    shutil.copytree(folder / "artifacts", tmp_path / "artifacts")
    path = ModelFiles(run_files(tmp_path).folder.parents[1]).subgraphs
    tables.write(tables.read(path, SUBGRAPHS), path, SUBGRAPHS, tables.Provenance("by an older version"))

    done = luigi(tmp_path, "TuneModel", "--model", SMALL, *TRIALS)

    assert done.returncode == 0, done.stderr
    assert "importing the model" in done.stderr
    assert done.stdout.startswith("Nothing new came of it; the report is ")  # they are the same
    assert luigi(tmp_path, "TuneModel", "--model", SMALL, *TRIALS).stdout.startswith("Nothing is left to do")


def test_another_way_of_timing_begins_another_run_and_names_what_differs(tuned):
    folder, _ = tuned
    run = run_files(folder)

    done = luigi(folder, "GenerateCandidates", "--model", SMALL, measure="weights = warm")

    [other] = [path for path in run.folder.parent.iterdir() if path != run.folder]
    assert done.returncode == 0, done.stderr
    assert f"a new run: it differs from {run.folder.name} in\n" in done.stderr
    assert "\n  [measure] weights = warm (there: cold)\n" in done.stderr
    assert json.loads((other / "run.json").read_text())["deciding"]["conditions"]["weights"] == "warm"
    shutil.rmtree(other)


def test_a_deleted_library_is_compiled_again_and_nothing_else(tuned):
    folder, _ = tuned
    run = run_files(folder)
    before = snapshot(run.folder / "rounds")
    run.compiled.library.unlink()

    done = luigi(folder, "TuneModel", "--model", SMALL, *TRIALS)

    assert done.returncode == 0, done.stderr
    assert run.compiled.library.exists()
    assert snapshot(run.folder / "rounds") == before


def test_a_deleted_model_is_trained_again_and_what_it_led_to_still_fits(tuned):
    folder, _ = tuned
    run = run_files(folder)
    before = snapshot(run.folder / "rounds")
    model = run.round(0).model("conv2d")
    old = model.read_bytes()
    model.unlink()

    done = luigi(folder, "TuneModel", "--model", SMALL, *TRIALS)

    changed = {name for name, date in snapshot(run.folder / "rounds").items() if before.get(name) != date}
    assert done.returncode == 0, done.stderr
    assert model.read_bytes() == old
    models = {f"0000/models/{path.name}" for path in model.parent.iterdir()}
    assert changed == {*models, "0000/training.parquet"}


def test_deleted_measurements_come_back_from_the_memory_and_what_was_built_on_them_still_fits(tuned):
    folder, _ = tuned
    run = run_files(folder)
    before = tables.read(run.round(0).measurements, MEASUREMENTS)
    later = tables.stamp(run.round(1).candidates, CANDIDATES).inputs
    run.round(0).measurements.unlink()

    done = luigi(folder, "TuneModel", "--model", SMALL, *TRIALS)

    assert done.returncode == 0, done.stderr
    assert tables.read(run.round(0).measurements, MEASUREMENTS).equals(before)
    assert tables.stamp(run.round(1).candidates, CANDIDATES).inputs == later


@pytest.mark.acceptance
def test_another_seed_begins_with_what_is_known_and_tries_nothing_again(tuned):
    folder, _ = tuned
    known = sum(len(tables.read(each.measurements, MEASUREMENTS)) for each in run_files(folder).rounds(2))

    done = luigi(folder, "TuneModel", "--model", SMALL, "--trials", "8", "--seed", "5")

    assert done.returncode == 0, done.stderr
    [other] = (folder / "artifacts").glob("*/small-*/runs/*seed5*")
    recalled = tables.read(RunFiles(other).recalled.measurements, MEASUREMENTS)
    assert recalled.num_rows >= known
    assert tables.read(RunFiles(other).round(0).plan, PLAN)["kind"].to_pylist() == ["bottleneck"]
    tried = tables.read(RunFiles(other).round(0).candidates, CANDIDATES)["candidate_id"].to_pylist()
    assert not set(tried) & set(recalled["candidate_id"].to_pylist())
    shutil.rmtree(other)


@pytest.mark.acceptance
def test_without_a_memory_a_run_begins_with_nothing(tuned):
    folder, _ = tuned

    done = luigi(folder, "TuneModel", "--model", SMALL, "--trials", "12", "--seed", "6", memory="use = no")

    assert done.returncode == 0, done.stderr
    [other] = (folder / "artifacts").glob("*/small-*/runs/*seed6*")
    assert tables.read(RunFiles(other).recalled.measurements, MEASUREMENTS).num_rows == 0
    assert set(tables.read(RunFiles(other).round(0).plan, PLAN)["kind"].to_pylist()) == {"warm-up"}
    shutil.rmtree(other)


def test_damaged_measurements_stop_the_run_and_are_left_as_they_are(tuned):
    folder, _ = tuned
    path = run_files(folder).round(0).measurements
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])

    done = luigi(folder, "TuneModel", "--model", SMALL, *TRIALS)

    assert done.returncode == 30
    assert "0000/measurements.parquet is damaged" in done.stderr
    assert "Traceback" not in done.stderr
    assert path.read_bytes() == whole[:-100]
    path.write_bytes(whole)


def test_a_stage_alone_says_what_is_missing(tuned):
    folder, _ = tuned

    done = luigi(folder, "GenerateCandidates", "--model", SMALL, "--round", "30")

    assert done.returncode == 20
    assert "0029/training.parquet is missing" in done.stderr
    assert f"TrainFamilyModels --model {SMALL} --round 29" in done.stderr


def test_a_stage_alone_runs_when_its_inputs_are_there(tuned):
    folder, _ = tuned
    run = run_files(folder)
    rounds = json.loads(run.compiled.manifest.read_text())["n_rounds"]
    # Left of a larger budget, and stale since measurements were made again.
    shutil.rmtree(run.round(rounds).folder, ignore_errors=True)

    done = luigi(folder, "GenerateCandidates", "--model", SMALL, "--round", str(rounds))

    assert done.returncode == 0, done.stderr
    assert run.round(rounds).candidates.exists()
    assert not run.round(rounds).measurements.exists()


def test_who_asks_for_the_families_sees_them_whether_or_not_they_had_to_be_made(tmp_path):
    made = luigi(tmp_path, "ClusterFamilies", "--model", "tiny_cnn")
    known = luigi(tmp_path, "ClusterFamilies", "--model", "tiny_cnn")

    assert made.stdout.startswith("family ")
    assert known.stdout == made.stdout


def test_who_asks_for_more_than_the_families_sees_the_report_alone(tuned):
    _, done = tuned

    assert "MFLOP a call" not in done.stdout


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--model", "resnet51"), "The zoo has: resnet18, resnet50"),
        (("--model", "nowhere.onnx"), "there is no such file"),
        (("--model", "tiny_cnn", "--target", "gpu"), "--target is neither `host`, nor a name, nor JSON"),
        (("--model", "tiny_cnn", "--threads", "4096"), "--threads must be between 1 and"),
        (("--model", "tiny_cnn", "--foresee", "7"), "--foresee is a share of a round"),
        (("--model", "tiny_cnn", "--strategy", "best"), "round-robin"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_is_written(tmp_path, options, told):
    done = luigi(tmp_path, "TuneModel", *options)

    assert done.returncode != 0
    assert told in done.stderr
    assert not list((tmp_path / "artifacts").rglob("*.parquet"))


def test_a_damaged_onnx_file_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"not a model")

    done = luigi(tmp_path, "TuneModel", "--model", str(tmp_path / "bad.onnx"))

    assert done.returncode == 30
    assert "bad.onnx is damaged" in done.stderr
    assert not list((tmp_path / "artifacts").rglob("*.parquet"))


# Interruptions.


def start(tmp_path: Path, command: list[str]) -> "subprocess.Popen[bytes]":
    """Start a command, as a terminal does; its output goes to a file, which `output` reads."""
    with (tmp_path / "output").open("a") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(tmp_path), stdout=file, stderr=file, preexec_fn=_hear_ctrl_c
        )


def _hear_ctrl_c() -> None:
    """What a shell starts in the background ignores SIGINT, and so does all that it starts: these tests, say."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def output(tmp_path: Path) -> str:
    return (tmp_path / "output").read_text()


def deterministic(tmp_path: Path) -> "subprocess.Popen[bytes]":
    return start(
        tmp_path,
        [sys.executable, str(ROOT / "tests" / "deterministic.py"), "TuneModel", "--model", SMALL, *TRIALS],
    )


def wait_for(condition, process, tmp_path, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not condition(tmp_path):
        assert process.poll() is None, output(tmp_path)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def find(tmp_path: Path, pattern: str) -> list[Path]:
    return list((tmp_path / "artifacts").glob(f"*/small-*/runs/*/{pattern}"))


MOMENTS = {
    "in the warm-up": lambda path: any(f.read_text().count("\n") >= 7 for f in find(path, "rounds/0000/*.jsonl")),
    "in a search": lambda path: find(path, "rounds/0000/training.parquet"),
    "in a round": lambda path: any(f.read_text().count("\n") >= 2 for f in find(path, "rounds/000[1-9]/*.jsonl")),
    "in the compilation": lambda path: find(path, "compiled/building-*"),
}


@pytest.mark.acceptance
def test_a_run_killed_again_and_again_ends_like_one_that_was_not(tmp_path):
    (tmp_path / "calm").mkdir()
    (tmp_path / "killed").mkdir()
    assert deterministic(tmp_path / "calm").wait(timeout=300) == 0
    measured_before: dict[str, float] = {}

    for condition in MOMENTS.values():
        process = deterministic(tmp_path / "killed")
        wait_for(condition, process, tmp_path / "killed")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert alive == []
        for journal in find(tmp_path / "killed", "rounds/*/*.jsonl"):
            rows = [json.loads(line)["row"] for line in journal.read_text().split("\n")[:-1]]
            measured_before |= {row["candidate_id"]: row["measured_at"] for row in rows}
    assert deterministic(tmp_path / "killed").wait(timeout=300) == 0

    calm, killed = run_files(tmp_path / "calm"), run_files(tmp_path / "killed")
    assert n_rounds(calm) == n_rounds(killed) > 1
    measured_after: dict[str, float] = {}
    for one, other in zip(calm.rounds(n_rounds(calm)), killed.rounds(n_rounds(calm)), strict=True):
        assert pq.read_table(one.plan).equals(pq.read_table(other.plan))
        stamps = [tables.stamp(files.candidates, CANDIDATES) for files in (one, other)]
        assert stamps[0].content == stamps[1].content  # features that say nothing are NaN, which equals nothing
        columns = ["candidate_id", "subgraph_id", "status", "latencies"]
        rows = [tables.read(files.measurements, MEASUREMENTS) for files in (one, other)]
        assert rows[0].select(columns).equals(rows[1].select(columns))
        measured_after |= dict(zip(*rows[1].select(["candidate_id", "measured_at"]).to_pydict().values(), strict=True))
        models = [tables.read(files.training, TRAINING)["model_digest"] for files in (one, other)]
        assert models[0].equals(models[1])
    assert len(measured_before) >= 9
    assert measured_after.items() >= measured_before.items()  # nothing was measured twice


def test_ctrl_c_ends_the_run_with_a_word_and_without_survivors(tmp_path):
    process = start(tmp_path, luigi_command("TuneModel", "--model", SMALL, *TRIALS))
    wait_for(lambda path: any(f.stat().st_size for f in find(path, "rounds/0000/*.jsonl")), process, tmp_path)
    children = psutil.Process(process.pid).children(recursive=True)

    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) != 0

    assert "the same command continues" in output(tmp_path)
    assert "Traceback" not in output(tmp_path)
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []


def test_without_trials_there_is_a_verified_library_all_the_same(tmp_path):
    """Of what base models foretell, where there are any for this CPU; else of random programs."""
    surroundings = environment(tmp_path)
    config = Path(surroundings["LUIGI_CONFIG_PATH"])
    config.write_text(config.read_text().replace("base = no", "base = yes"))

    command = luigi_command("TuneModel", "--model", SMALL, "--trials", "0")
    done = subprocess.run(command, env=surroundings, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    run = run_files(tmp_path)
    facts = json.loads(run.compiled.manifest.read_text())
    assert not (run.folder / "rounds").exists()
    assert (facts["n_trials"], facts["n_rounds"]) == (0, 0)
    assert facts["max_error"] < 1e-4
    notes = pq.read_table(run.compiled.results)["note"].to_pylist()
    origins = set(tables.read(run.foretold.candidates, CANDIDATES)["origin"].to_pylist())
    assert "foretold, not measured" in notes
    assert ("evolved" in origins) == bool(base_models(targets.cpu_target().instructions).of("conv2d"))
    assert "speed-up not known" in run.report.read_text()


def test_a_run_whose_limit_comes_before_all_was_tried_takes_the_rest_as_models_foretell_it_and_goes_on(tmp_path):
    surroundings = environment(tmp_path)
    config = Path(surroundings["LUIGI_CONFIG_PATH"])
    config.write_text(
        config.read_text().replace("base = no", "base = yes").replace("[plan]", "[plan]\nnum_first_looks = 1")
    )

    def tune(*given):
        command = luigi_command("TuneModel", "--model", SMALL, *given)
        done = subprocess.run(command, env=surroundings, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        run = run_files(tmp_path)
        return run, pq.read_table(run.compiled.results).to_pylist(), json.loads(run.compiled.manifest.read_text())

    run, rows, facts = tune("--trials", "1")
    foretold = {row["family_id"] for row in rows if row["note"] == "foretold, not measured"}
    bases = base_models(targets.cpu_target().instructions)
    assert all(bases.of(family) for family in foretold)
    if all(bases.of(row["core_operator"]) for row in tables.read(*subgraphs_of(run)).to_pylist() if row["tunable"]):
        assert n_rounds(run) == 1
        assert len(foretold) >= 2
    assert facts["max_error"] < 1e-4

    run, rows, facts = tune("--trials", "30")
    assert not any("foretold" in row["note"] for row in rows), rows
    assert facts["n_trials"] >= 30
    assert facts["max_error"] < 1e-4


@needs_it
def test_a_model_in_bf16_runs_by_the_code_of_its_page_and_says_how_far_it_is_from_its_file(tmp_path):
    done = luigi(tmp_path, "TuneModel", "--model", SMALL, "--precision", "bf16", *TRIALS)

    assert done.returncode == 0, done.stderr
    run = run_files(tmp_path)
    facts = json.loads(run.compiled.manifest.read_text())
    assert run.folder.parent.parent.name.endswith("-precision_bf16")
    assert (facts["precision"], facts["shipped"]) == ("bf16", "tuned")
    assert 1e-5 < facts["max_error"] <= facts["tolerance"] == 0.05
    assert {entry.dtype for entry in weights.entries(run.compiled.params)} == {"bfloat16", "float32"}
    families = {row["family_id"] for row in tables.read(run.round(0).plan, PLAN).to_pylist()}
    assert {"conv2d_bf16", "matmul_bf16"} <= families
    script = page.code(facts, run.compiled.folder) + "\nprint(outputs.shape)"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, env=with_runtime())
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "(1, 10)"


@needs_matrices
def test_a_model_in_three_products_of_bf16_is_as_far_from_its_file_as_one_in_floats_may_be(tmp_path):
    done = luigi(tmp_path, "TuneModel", "--model", "tiny_transformer", "--precision", "bf16x3", *TRIALS)

    assert done.returncode == 0, done.stderr
    run = run_files(tmp_path, "tiny_transformer")
    facts = json.loads(run.compiled.manifest.read_text())
    assert (facts["precision"], facts["shipped"], facts["tolerance"]) == ("bf16x3", "tuned", 1e-3)
    assert facts["max_error"] < 1e-4
    assert facts["peak_flops_bf16"] > facts["peak_flops"]
    families = {row["family_id"] for row in tables.read(run.round(0).plan, PLAN).to_pylist()}
    assert "matmul_bf16" in families


@pytest.mark.parametrize(
    ("precision", "told"),
    [("bf16", "has no instruction for bf16"), ("bf16x3", "no instruction that multiplies matric")],
)
def test_bf16_for_a_cpu_without_it_is_refused(tmp_path, precision, told):
    old = '{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell"}'

    done = luigi(tmp_path, "TuneModel", "--model", SMALL, "--precision", precision, "--target", old)

    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_in_floats_is_quantised_with_samples_and_runs_in_integers(tmp_path):
    pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "samples.npz", x=rng.normal(size=(4, 1, 8, 8, 8)).astype(np.float32))
    given = ("TuneModel", "--model", SMALL, "--precision", "int8", "--calibration", str(tmp_path / "samples.npz"))

    done = luigi(tmp_path, *given, *TRIALS)

    assert done.returncode == 0, done.stderr
    run = run_files(tmp_path)
    facts = json.loads(run.compiled.manifest.read_text())
    assert "conv2d_int8" in done.stdout  # with AVX2 alone of seven bits
    assert "matmul_int8" in done.stdout
    assert facts["compared_with"].startswith("ONNX Runtime")
    kinds = {entry.dtype for entry in weights.entries(run.compiled.params)}
    assert "int8" in kinds
    again = luigi(tmp_path, *given, *TRIALS)
    assert again.stdout.startswith("Nothing is left to do")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--precision", "int8"), "is quantised with samples of its inputs"),
        (("--precision", "int8", "--calibration", "nowhere"), "--calibration nowhere: there is no such file or folder"),
        (("--calibration", "nowhere"), "--calibration is for --precision int8"),
    ],
)
def test_what_cannot_be_quantised_is_told(tmp_path, options, told):
    done = luigi(tmp_path, "TuneModel", "--model", SMALL, *options)

    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback" not in done.stderr
