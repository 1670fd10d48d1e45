import json

import matplotlib.image
import numpy as np
import pytest

from lib.contracts import manifest, tables
from lib.contracts.files import RunFiles
from lib.contracts.schemas import MEASUREMENTS, RESULTS, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.report.accounting import Record
from lib.tuning import history
from stages import compile, report
from tests.stages.conftest import PROVENANCE
from tests.stages.test_compile import QUICK


@pytest.fixture(scope="module")
def reported(started, cpu, pool, tmp_path_factory):
    files = RunFiles(tmp_path_factory.mktemp("reported"))
    folder, compiled = files.folder, files.compiled
    rounds = started.run.rounds(1)
    compile.run(started.model, started.families, rounds, cpu, QUICK, pool, provenance=PROVENANCE, out=compiled)
    report.run(
        started.model, started.families, rounds, compiled, "tiny_cnn", provenance=Provenance("the digest"), out=files,
    )  # fmt: skip
    return folder, compiled


def test_the_report_has_a_line_for_each_subgraph_with_what_the_tables_say(started, reported):
    folder, compiled = reported
    text = (folder / "report.txt").read_text()
    subgraphs = tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()
    results = tables.read(compiled.results, RESULTS).to_pylist()

    for subgraph, result in zip(subgraphs, results, strict=True):
        [line] = [line for line in text.splitlines() if line.startswith(subgraph["name"] + " ")]
        assert f"{result['tuned_s'] * 1e6:,.1f}" in line.split()
        assert result["family_id"] in line.split()


@pytest.mark.parametrize("name", ["report.txt", "report.png", "families.png"])
def test_a_report_is_current_while_all_of_it_is_whole(reported, name):
    folder, _ = reported
    path, whole = folder / name, (folder / name).read_bytes()
    assert manifest.is_current(folder / "report.json", "the digest")
    assert not manifest.is_current(folder / "report.json", "another digest")

    path.write_bytes(whole[:-1] + b"?")
    assert not manifest.is_current(folder / "report.json", "the digest")

    path.write_bytes(whole)
    assert manifest.is_current(folder / "report.json", "the digest")


def test_outputs_that_vanish_are_told_as_not_compared(started, reported):
    _, compiled = reported
    facts = manifest.read(compiled.manifest)
    so_far = history.load(started.run.rounds(1))

    assert "largest difference of the outputs" in report.model_lines(facts, so_far)
    assert "the outputs vanish (the largest is 1e-40): nothing could be compared" in report.model_lines(
        {**facts, "largest_output": 1e-40}, so_far
    )


def test_the_latency_of_onnx_runtime_stands_beside_ours(started, reported):
    _, compiled = reported
    facts = manifest.read(compiled.manifest)
    so_far = history.load(started.run.rounds(1))
    peer = {"by": "ONNX Runtime 1.31.1", "max_error": 3e-6, "failure": ""}
    latencies = {**facts["latencies_s"], "tuned": [0.010], "onnxruntime": [0.012, 0.011, 0.013]}

    text = report.model_lines({**facts, "onnx": peer, "latencies_s": latencies}, so_far)
    failed = report.model_lines({**facts, "onnx": {**peer, "failure": "it takes more than 60 s"}}, so_far)

    assert "ONNX Runtime 1.31.1      12.00 ms  (median of 3, 11.00 to 13.00), 1.20 times the tuned model's" in text
    assert "largest difference to ONNX Runtime 1.31.1 3.0e-06 of the largest value" in text
    assert "not compared with the ONNX file: it takes more than 60 s" in failed
    assert "ONNX" not in report.model_lines(facts, so_far)


def test_the_times_add_up(reported, started):
    folder, compiled = reported
    records = report.clocks(
        started.model, started.families, started.run.rounds(1), json.loads(compiled.manifest.read_text())
    )
    lines = (folder / "report.txt").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("time "))
    shares = [line.split() for line in lines[start + 2 : -1]]
    seconds = {" ".join(words[:-3]): float(words[-3].replace(",", "")) for words in shares}

    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total, abs=1.0)
    assert seconds["build"] > 0
    assert {record.stage for record in records} == {"extract", "cluster", "generate", "measure", "train", "compile"}


def test_the_curve_falls_and_ends_at_the_sum_of_the_best(started):
    rounds = started.run.rounds(1)
    weights = {r["subgraph_id"]: r["weight"] for r in tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()}
    row = tables.read(rounds[0].measurements, MEASUREMENTS).to_pylist()
    record = Record("s", "measure", {"started": row[0]["measured_at"] - 1, "total": 1000.0})

    points = report.curve_points(rounds, weights, [record]).to_pandas()

    assert (points["latency_s"].diff().dropna() <= 0).all()
    assert (points["seconds"].diff().dropna() >= 0).all()
    assert points["trials"].iloc[-1] == len(row)
    assert points["latency_s"].iloc[-1] == pytest.approx(history.model_latency_s(history.load(rounds), weights))


@pytest.mark.parametrize("name", ["report.png", "families.png"])
def test_the_pictures_show_something(reported, name):
    picture = matplotlib.image.imread(reported[0] / name)

    assert picture.shape[0] > 300
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 10
