"""Several models tuned as one, started as a user starts it."""

import json
import signal
import subprocess
import time
from urllib.parse import unquote

import onnx
import pytest
from onnx import numpy_helper

from lib.contracts import tables
from lib.contracts.files import ModelFiles, RunFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, MODELS, PLAN
from lib.report.text import milliseconds
from tests import helpers
from tests.helpers import ROOT, environment, luigi, luigi_command
from tests.lib.report.test_page import Parsed

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


def night(folder, n_models="*") -> RunFiles:
    [found] = (folder / "artifacts").glob(f"*/nights/{n_models}-models-*/runs/*")
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
    assert all(manifest["onnx"]["max_error"] < 1e-3 for manifest in manifests)


def test_the_page_of_a_night_leads_to_those_of_its_models_and_tells_what_failed(tuned):
    folder, done = tuned
    page = night(folder).night_page

    found = Parsed(page.read_text())

    assert f"page: {page}" in done.stdout
    assert len(found.links) == 2
    for link in found.links:
        assert "While it was tuned" in (page.parent / unquote(link)).read_text()
    assert "2 of 3 models have a library of this night" in found.text
    assert "c.onnx is damaged or no ONNX file" in found.text


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
    records = [json.loads(night(folder, n).summarized.read_text())["models"] for n in (3, 2)]
    told = Parsed(night(folder, 2).night_page.read_text()).text
    for before_s, now_s in zip(*(list(record.values()) for record in records), strict=True):
        assert f"{milliseconds(now_s)} {milliseconds(before_s)} {100 * (now_s / before_s - 1):+.1f} %" in told


def test_a_night_that_is_killed_goes_on_and_measures_nothing_twice(tmp_path, nets):
    command = luigi_command("TuneModels", "--models", f"{nets}/a.onnx,{nets}/b.onnx", *TRIALS)
    kept: dict[str, float] = {}
    for after_s in (6.0, 4.0):  # a night that is left alone takes 16 s on a fast machine
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(after_s)
        while process.poll() is None and not any(
            (tmp_path / "artifacts").glob("*/nights/*/runs/*/")
        ):  # on a busy machine
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for path in (tmp_path / "artifacts").glob("*/nights/*/runs/*/rounds/*/measurements.parquet"):
            for row in tables.read(path, MEASUREMENTS).to_pylist():
                assert kept.setdefault(row["candidate_id"], row["measured_at"]) == row["measured_at"]

    [of_a_model] = (tmp_path / "artifacts").glob("*/a-*/")
    left = of_a_model / "runs" / night(tmp_path).folder.name / "compiled" / "building-left"  # as by a kill meanwhile
    left.mkdir(parents=True, exist_ok=True)

    done = luigi(tmp_path, "TuneModels", "--models", f"{nets}/a.onnx,{nets}/b.onnx", *TRIALS)

    assert done.returncode == 0, done.stderr
    assert not left.exists()
    assert len(libraries(tmp_path)) == 2
    found = {row["candidate_id"]: row["measured_at"] for row in rows(night(tmp_path), "measurements", MEASUREMENTS)}
    assert {key: found.get(key) for key in kept} == kept


def test_a_list_that_is_none_is_refused_in_a_line(tmp_path):
    done = luigi(tmp_path, "TuneModels", "--models", str(tmp_path / "nowhere.toml"))

    assert done.returncode != 0
    assert "nowhere.toml" in done.stderr
    assert "Traceback" not in done.stderr
