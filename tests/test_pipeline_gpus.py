"""Whole runs on two GPUs, with stand-ins for them; started as a user starts them."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lib.contracts import tables
from lib.contracts.files import RunFiles
from lib.contracts.schemas import MEASUREMENTS
from lib.report import page
from tests.cuda.resnet import small_resnet18
from tests.cuda.stand_ins import TARGET, UUIDS
from tests.farm import until
from tests.helpers import ROOT, SMALL, environment, luigi, luigi_command

pytestmark = pytest.mark.usefixtures("gpus")


def tune(model: str | Path, trials: int) -> tuple[str, ...]:
    return ("TuneModel", "--model", str(model), "--trials", str(trials), "--target", TARGET)


def run_of(tmp_path: Path) -> RunFiles:
    [folder] = (tmp_path / "artifacts" / "cuda-sm_80").glob("*/runs/*")
    return RunFiles(folder)


def rows(run: RunFiles) -> list[dict]:
    found = sorted(run.folder.glob("rounds/*/measurements.parquet"))
    return [row for path in found for row in tables.read(path, MEASUREMENTS).to_pylist()]


def check(tmp_path: Path, done: "subprocess.CompletedProcess[str]") -> list[dict]:
    """What was measured in a run that ended well."""
    assert done.returncode == 0, done.stderr
    run = run_of(tmp_path)
    manifest = json.loads(run.compiled.manifest.read_text())
    assert "speed-up" in done.stdout
    assert "Stand-in GPU" in done.stdout
    assert manifest["max_error"] < 1e-5
    assert manifest["target"]["kind"] == "cuda"
    measured = rows(run)
    assert {row["status"] for row in measured} == {"ok"}
    return measured


def test_a_transformer_is_tuned_compiled_and_verified_on_gpus(tmp_path):
    done = luigi(tmp_path, *tune("tiny_transformer", 14))

    check(tmp_path, done)
    compiled = run_of(tmp_path).compiled
    code = page.code(json.loads(compiled.manifest.read_text()), compiled.manifest.parent)
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(outputs[0].device)"], capture_output=True, text=True, timeout=100
    )
    assert "tvm.cuda()" in code
    assert shown.stdout == "cuda:0\n", shown.stderr


def test_a_killed_run_that_loses_a_gpu_goes_on_with_the_other(gpus, tmp_path):
    """Whoever measures is killed in the middle; then a GPU goes away; then the command itself is killed: all of it
    while the twelve candidates of the first round are measured."""
    process = subprocess.Popen(
        luigi_command(*tune(SMALL, 18)), cwd=ROOT, env=environment(tmp_path), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        until(lambda: written(tmp_path) > 2, 200)
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # compilers come and go
                if each.name() == "driver":
                    each.kill()
        until(lambda: written(tmp_path) > 4, 200)
        gpus.set(UUIDS[1:])
        until(lambda: written(tmp_path) > 7, 200)
    finally:
        process.kill()
        process.communicate()
    done = luigi(tmp_path, *tune(SMALL, 18))
    gpus.set(UUIDS)

    measured = check(tmp_path, done)
    assert {row["device"] for row in measured} <= {f"Stand-in GPU {uuid}" for uuid in UUIDS}
    assert measured[-1]["device"] == f"Stand-in GPU {UUIDS[1]}"
    assert len({row["candidate_id"] for row in measured}) == len(measured)


def written(tmp_path: Path) -> int:
    """Rows of the journal of the round in flight."""
    return sum(path.read_text().count("\n") for path in (tmp_path / "artifacts").rglob("measurements.jsonl"))


def test_a_resnet_of_small_images_is_tuned_compiled_and_verified_on_gpus(tmp_path):
    done = luigi(tmp_path, *tune(small_resnet18(tmp_path / "resnet18.onnx"), 24), timeout_s=900)

    check(tmp_path, done)
