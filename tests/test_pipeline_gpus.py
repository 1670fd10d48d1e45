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
        await_rows(2, tmp_path, process)
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # compilers come and go
                if each.name() == "driver":
                    each.kill()
        await_rows(4, tmp_path, process)
        gpus.set(UUIDS[1:])
        await_rows(7, tmp_path, process)
    finally:
        process.kill()
        process.communicate()
    done = luigi(tmp_path, *tune(SMALL, 18))
    gpus.set(UUIDS)

    measured = check(tmp_path, done)
    assert {row["device"] for row in measured} <= {f"Stand-in GPU {uuid}" for uuid in UUIDS}
    assert measured[-1]["device"] == f"Stand-in GPU {UUIDS[1]}"
    assert len({row["candidate_id"] for row in measured}) == len(measured)


def await_rows(count: int, tmp_path: Path, process: "subprocess.Popen[str]") -> None:
    """Until a run that goes on has more rows than that in the journal of the round in flight."""
    until(lambda: written(tmp_path) > count or process.poll() is not None, 200)
    assert process.poll() is None, process.communicate()[1]


def written(tmp_path: Path) -> int:
    return sum(path.read_text().count("\n") for path in (tmp_path / "artifacts").rglob("measurements.jsonl"))


def test_a_resnet_of_small_images_is_tuned_compiled_and_verified_on_gpus(tmp_path):
    done = luigi(tmp_path, *tune(small_resnet18(tmp_path / "resnet18.onnx"), 24), timeout_s=900)

    check(tmp_path, done)
