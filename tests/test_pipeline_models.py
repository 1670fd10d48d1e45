"""Several models tuned as one, started as a user starts it."""

import json
import signal
import subprocess
import time

import onnx
import pytest
from onnx import numpy_helper

from lib.contracts import tables
from lib.contracts.files import ModelFiles, RunFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, MODELS, PLAN
from tests import helpers
from tests.helpers import ROOT, environment, luigi, luigi_command

TRIALS = ("--trials", "20")


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    """Two files with the same subgraphs and other weights; one that is none."""
    folder = tmp_path_factory.mktemp("nets")
    model = onnx.load(helpers.SMALL)
    onnx.save(model, folder / "a.onnx")
    for weight in model.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT:
            weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 0.5, weight.name))
    onnx.save(model, folder / "b.onnx")
    (folder / "c.onnx").write_bytes(b"no model")
    return folder


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, nets):
    folder = tmp_path_factory.mktemp("tuned")
    return folder, luigi(folder, "TuneModels", "--models", f"{nets}/*.onnx", *TRIALS)


def night(folder) -> RunFiles:
    [found] = (folder / "artifacts").glob("*/nights/*/runs/*")
    return RunFiles(found)


def rows(files: RunFiles, name: str, schema):
    return [row for path in sorted((files.folder / "rounds").glob(f"*/{name}.parquet"))
            for row in tables.read(path, schema).to_pylist()]  # fmt: skip


def libraries(folder):
    return sorted(
        path.parent.parent.parent.parent.name for path in (folder / "artifacts").glob("*/*/runs/*/compiled/model.so")
    )


def test_what_cannot_be_imported_is_told_and_the_others_have_their_libraries(tuned):
    folder, done = tuned

    assert done.returncode == 30
    assert "1 of 3 models failed: c-" in done.stderr
    assert "Traceback" not in done.stderr
    assert [name.split("-")[0] for name in libraries(folder)] == ["a", "b"]
    summary = night(folder).summary.read_text()
    assert summary in done.stdout
    assert "subgraphs: 8 in all, 4 different ones, 0 of them known before" in summary
    assert "c.onnx is no ONNX file" in summary or "c-" in summary


def test_what_models_share_is_measured_once(tuned):
    folder, _ = tuned
    files = night(folder)

    ids = [row["candidate_id"] for row in rows(files, "measurements", MEASUREMENTS)]
    [joint] = tables.read(ModelFiles(files.folder.parents[1]).models, MODELS).slice(0, 1)["subgraphs"].to_pylist()
    plans = rows(files, "plan", PLAN)

    assert len(ids) == len(set(ids)) >= 20
    assert sorted(row["subgraph_id"] for row in plans if row["kind"] == "warm-up") == sorted(joint)


def test_each_model_gets_a_library_early_and_the_one_at_the_end_is_of_all_rounds(tuned):
    folder, _ = tuned
    n_rounds = len(list((night(folder).folder / "rounds").iterdir()))

    manifests = [
        json.loads(path.read_text()) for path in (folder / "artifacts").glob("*/*/runs/*/compiled/manifest.json")
    ]

    assert {manifest["n_rounds"] for manifest in manifests} == {n_rounds}
    assert {manifest["shipped"] for manifest in manifests} <= {"tuned", "previous"}
    assert all(manifest["onnx"]["max_error"] < 1e-3 for manifest in manifests)


def test_the_same_list_without_the_broken_file_measures_nothing_again_and_then_nothing_is_left(tuned, nets):
    folder, _ = tuned
    before = rows(night(folder), "measurements", MEASUREMENTS)
    command = ("TuneModels", "--models", f"{nets}/a.onnx,{nets}/b.onnx", "--trials", "4")

    done = luigi(folder, *command)
    again = luigi(folder, *command)

    assert done.returncode == 0, done.stderr
    assert "4 of them known before" in done.stdout
    [other] = [RunFiles(path) for path in (folder / "artifacts").glob("*/nights/2-models-*/runs/*")]
    fresh = {row["candidate_id"] for row in rows(other, "candidates", CANDIDATES)}
    assert not fresh & {row["candidate_id"] for row in before}
    assert {row["kind"] for row in rows(other, "plan", PLAN)} <= {"bottleneck", "foresee"}
    assert again.returncode == 0
    assert again.stdout.startswith("Nothing is left to do")


def test_a_night_that_is_killed_goes_on_and_measures_nothing_twice(tmp_path, nets):
    command = luigi_command("TuneModels", "--models", f"{nets}/a.onnx,{nets}/b.onnx", *TRIALS)
    kept: dict[str, float] = {}
    for after_s in (6.0, 14.0):
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for path in (tmp_path / "artifacts").glob("*/nights/*/runs/*/rounds/*/measurements.parquet"):
            for row in tables.read(path, MEASUREMENTS).to_pylist():
                assert kept.setdefault(row["candidate_id"], row["measured_at"]) == row["measured_at"]

    done = luigi(tmp_path, "TuneModels", "--models", f"{nets}/a.onnx,{nets}/b.onnx", *TRIALS)

    assert done.returncode == 0, done.stderr
    assert len(libraries(tmp_path)) == 2
    found = {row["candidate_id"]: row["measured_at"] for row in rows(night(tmp_path), "measurements", MEASUREMENTS)}
    assert {key: found.get(key) for key in kept} == kept


def test_a_list_that_is_none_is_refused_in_a_line(tmp_path):
    done = luigi(tmp_path, "TuneModels", "--models", str(tmp_path / "nowhere.toml"))

    assert done.returncode != 0
    assert "nowhere.toml" in done.stderr
    assert "Traceback" not in done.stderr
