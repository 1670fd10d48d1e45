"""A model tuned for a range of shapes, started as a user starts it."""

import json
import signal
import subprocess
import time

import numpy as np
import onnxruntime
import pytest

from lib.contracts.files import CompiledFiles, ModelFiles, RunFiles
from lib.report.text import milliseconds
from lib.runtime.family_tuner_runtime import Model
from tests import range_files
from tests.helpers import ROOT, environment, luigi, luigi_command

SHAPE = ("--shape", "batch=1 sequence=8,24")
LIMITS = ("--trials", "20")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for kind in ("mask", "causal", "open"):
        range_files.attention(folder / f"{kind}.onnx", kind)
    return folder


def run_of(folder) -> RunFiles:
    [found] = (folder / "artifacts").glob("*/*/runs/*")
    return RunFiles(found)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, files):
    """Killed in the middle, and continued by the same command."""
    folder = tmp_path_factory.mktemp("tuned")
    command = luigi_command("TuneModel", "--model", str(files / "mask.onnx"), *SHAPE, *LIMITS)
    first = subprocess.Popen(command, cwd=ROOT, env=environment(folder), start_new_session=True)
    deadline = time.monotonic() + 120
    while not list((folder / "artifacts").glob("*/*/runs/*/rounds/0000/measurements.parquet")):
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = next((folder / "artifacts").glob("*/*/runs/*/rounds/0000/measurements.parquet")).read_bytes()
    done = luigi(folder, "TuneModel", "--model", str(files / "mask.onnx"), *SHAPE, *LIMITS)
    return folder, done, kept


def test_one_bundle_computes_all_lengths_as_the_file_means_them(tuned, files):
    folder, done, kept = tuned
    assert done.returncode == 0, done.stderr
    run = run_of(folder)
    assert (run.round(0).measurements).read_bytes() == kept
    model = Model(run.compiled.folder)
    session = onnxruntime.InferenceSession(files / "mask.onnx")
    rng = np.random.default_rng(0)

    for sequence in range(1, 25):
        ids = rng.integers(0, range_files.VOCABULARY, (1, sequence))
        mask = np.ones_like(ids)
        mask[:, 1 + sequence // 2 :] = rng.integers(0, 2, mask[:, 1 + sequence // 2 :].shape)
        [expected] = session.run(None, {"ids": ids, "mask": mask})
        np.testing.assert_allclose(model(ids, mask), expected, atol=2e-5)


def test_weights_stand_once_and_the_report_says_what_that_costs(tuned):
    folder, done, _ = tuned
    run = run_of(folder)
    facts = json.loads(run.compiled.manifest.read_text())

    assert facts["weights_bytes"]["all"] < 1.1 * facts["weights_bytes"]["one_shape"]
    [one, other] = [{name for name, _ in bucket["weights"]} for bucket in facts["buckets"]]
    assert len(one & other) > 0.7 * len(one)
    report = run.report.read_text()
    assert report in done.stdout
    assert "one bundle for sequence from 1 to 24: 2 shapes" in report
    for bucket, cost in zip(facts["buckets"], facts["agreement"], strict=True):
        assert milliseconds(bucket["latency_s"]) in report
        assert milliseconds(cost["agreed_s"]) in report
        assert cost["agreed_s"] >= cost["alone_s"]
    page = run.page.read_text()
    assert "compiled in 2 shapes" in page
    assert "sequence=24" in page


def test_nothing_is_done_twice(tuned, files):
    folder, _, _ = tuned
    before = run_of(folder).compiled.manifest.read_bytes()

    done = luigi(folder, "TuneModel", "--model", str(files / "mask.onnx"), *SHAPE, *LIMITS)

    assert "Nothing is left to do; the report is" in done.stdout
    assert run_of(folder).compiled.manifest.read_bytes() == before


def test_a_range_that_padding_would_falsify_is_refused_before_it_is_tuned(files, tmp_path):
    done = luigi(tmp_path, "TuneModel", "--model", str(files / "open.onnx"), *SHAPE, *LIMITS)

    assert done.returncode != 0
    assert "changes the output states by" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "artifacts").glob("*/*/runs/*"))


def test_a_causal_model_needs_no_mask(files, tmp_path):
    done = luigi(tmp_path, "TuneModel", "--model", str(files / "causal.onnx"), *SHAPE, *LIMITS)
    assert done.returncode == 0, done.stderr
    model, session = Model(run_of(tmp_path).compiled.folder), onnxruntime.InferenceSession(files / "causal.onnx")

    for sequence in (1, 7, 11, 24):
        ids = np.random.default_rng(sequence).integers(0, range_files.VOCABULARY, (1, sequence))
        np.testing.assert_allclose(model(ids), session.run(None, {"ids": ids})[0], atol=2e-5)


def test_files_of_a_range_lie_where_the_map_says(tuned):
    run = run_of(tuned[0])
    joint = ModelFiles(run.folder.parents[1])

    assert joint.shared.exists()
    assert joint.probed.exists()
    assert sorted(path.name for path in CompiledFiles(run.compiled.folder).folder.glob("*.so")) == [
        "model-24.so", "model-8.so",
    ]  # fmt: skip
