from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest

from lib.contracts import manifest, tables
from lib.contracts.files import RunFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, RESULTS, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.report import rows, text
from lib.report.accounting import Record
from lib.tir import analysis
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


@pytest.fixture(scope="module")
def found(started, reported):
    return rows.collect(started.model, started.families, started.run.rounds(1), reported[1], "tiny_cnn")


@pytest.mark.parametrize("name", ["report.txt", "report.html", "report.png", "families.png"])
def test_a_report_is_current_while_all_of_it_is_whole(reported, name):
    folder, _ = reported
    path, whole = folder / name, (folder / name).read_bytes()
    assert manifest.is_current(folder / "report.json", "the digest")
    assert not manifest.is_current(folder / "report.json", "another digest")

    path.write_bytes(whole[:-1] + b"?")
    assert not manifest.is_current(folder / "report.json", "the digest")

    path.write_bytes(whole)
    assert manifest.is_current(folder / "report.json", "the digest")


def test_rows_say_of_each_subgraph_what_the_tables_say(started, reported, found):
    measured = tables.read(started.run.round(0).measurements, MEASUREMENTS).to_pylist()
    made = tables.read(started.run.round(0).candidates, CANDIDATES).to_pylist()
    origins = {row["candidate_id"]: row["origin"] for row in made}
    results = {row["subgraph_id"]: row for row in tables.read(reported[1].results, RESULTS).to_pylist()}

    for row in found.subgraphs:
        own = [each for each in measured if each["subgraph_id"] == row.subgraph_id]
        fastest = sorted(np.median(each["latencies"]) for each in own if each["latencies"])
        shipped = results[row.subgraph_id]["candidate_id"]
        assert row.trials == len(own)
        assert row.recalled == 0
        assert [each.latency_s for each in row.best] == pytest.approx(fastest[:5])
        assert row.origin == (origins[shipped] if shipped else "untuned")
        assert (row.program is None) == (shipped is None)
    assert any(row.program and row.program.tile for row in found.subgraphs)


def test_rows_count_the_bytes_of_inputs_weights_and_results(started, found):
    [row] = [row for row in found.subgraphs if row.operator.startswith("matmul")]
    main = rows.tvm.ir.load_json(
        next(each["workload"] for each in tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()
             if each["subgraph_id"] == row.subgraph_id)
    )["main"]  # fmt: skip
    shapes = [[int(extent) for extent in param.ty.shape] for param in main.params]

    assert row.moved_bytes == 4 * sum(np.prod(shape) for shape in shapes)
    assert found.dtypes == ("float32",)


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("int8", 1), ("bool", 1), ("float8_e4m3fn", 1), ("int64", 8)]
)
def test_the_size_of_an_element_is_told_by_its_kind(dtype, size):
    assert analysis.itemsize(dtype) == size


def test_what_was_recalled_is_of_the_memory(started, tmp_path):
    recalled = RunFiles(tmp_path).recalled
    recalled.folder.mkdir(parents=True)
    first = started.run.round(0)
    recalled.candidates.write_bytes(first.candidates.read_bytes())
    made = tables.read(first.candidates, CANDIDATES).select(["candidate_id", "origin"]).to_pylist()

    found = rows._made({row["candidate_id"] for row in made}, [recalled])

    assert {row["origin"] for row in made} > {"untuned"}
    assert {row["origin"] for row in found.values()} == {"untuned", "memory"}


def test_failures_are_told_by_kind_with_an_example(started, tmp_path):
    first, spoilt = started.run.round(0), RunFiles(tmp_path).round(0)
    measured = tables.read(first.measurements, MEASUREMENTS).to_pylist()
    for n, row in enumerate(measured[:3]):
        row.update(status="crash" if n else "timeout", latencies=[], error=f"error {min(n, 1)}")
    tables.write(rows.pa.Table.from_pylist(measured, schema=MEASUREMENTS), spoilt.measurements, MEASUREMENTS,
                 Provenance())  # fmt: skip
    names = {row["subgraph_id"]: "a subgraph" for row in measured}

    crash, timeout = rows.failures([spoilt], names)

    assert (crash.status, crash.count, crash.subgraphs, crash.example) == ("crash", 2, ("a subgraph",), "error 1")
    assert (timeout.status, timeout.count) == ("timeout", 1)


def test_a_schedule_that_cannot_be_replayed_is_no_reason_to_write_no_page(started):
    workload = tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()[0]["workload"]

    found = rows._program(rows.tvm.ir.load_json(workload)["main"], '[[["NoSuchInstruction", [], [], []]], []]')

    assert found.tile == ""
    assert found.loops[0].startswith("cannot be shown: ")


def test_outputs_that_vanish_are_told_as_not_compared(found):
    assert "largest difference of the outputs" in text.model_lines(found)
    assert "the outputs vanish (the largest is 1e-40): nothing could be compared" in text.model_lines(
        replace(found, facts={**found.facts, "largest_output": 1e-40})
    )


def test_the_latency_of_onnx_runtime_stands_beside_ours(found):
    peer = {"by": "ONNX Runtime 1.31.1", "max_error": 3e-6, "failure": ""}
    latencies = {**found.facts["latencies_s"], "tuned": [0.010], "onnxruntime": [0.012, 0.011, 0.013]}
    facts = {**found.facts, "onnx": peer, "latencies_s": latencies, "shipped": "tuned"}

    told = text.model_lines(replace(found, facts=facts))
    failed = text.model_lines(replace(found, facts={**facts, "onnx": {**peer, "failure": "it takes more than 60 s"}}))

    assert "ONNX Runtime 1.31.1      12.00 ms  (median of 3, 11.00 to 13.00), 1.20 times the tuned model's" in told
    assert "largest difference to ONNX Runtime 1.31.1 3.0e-06 of the largest value" in told
    assert "not compared with its file: it takes more than 60 s" in failed
    assert "ONNX" not in text.model_lines(found)


def test_the_times_add_up(reported, started):
    folder, compiled = reported
    facts = manifest.read(compiled.manifest)
    records = rows.clocks([started.model.subgraphs], started.families, started.run.rounds(1), [facts])
    lines = (folder / "report.txt").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("time "))
    end = next(n for n, line in enumerate(lines) if line.startswith("the pipeline's own"))
    shares = [line.split() for line in lines[start + 2 : end]]
    seconds = {" ".join(words[:-3]): float(words[-3].replace(",", "")) for words in shares}

    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total, abs=1.0)
    assert seconds["build"] > 0
    assert {record.stage for record in records} == {"extract", "cluster", "generate", "measure", "train", "compile"}


def test_the_curve_falls_and_ends_at_the_sum_of_the_best(started):
    rounds = started.run.rounds(1)
    weights = {r["subgraph_id"]: r["weight"] for r in tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()}
    measured = tables.read(rounds[0].measurements, MEASUREMENTS).to_pylist()
    record = Record("s", "measure", {"started": measured[0]["measured_at"] - 1, "total": 1000.0})

    points = rows.curve_points(rounds, weights, [record]).to_pandas()

    assert (points["latency_s"].diff().dropna() <= 0).all()
    assert (points["seconds"].diff().dropna() >= 0).all()
    assert points["trials"].iloc[-1] == len(measured)
    assert points["latency_s"].iloc[-1] == pytest.approx(history.model_latency_s(history.load(rounds), weights))


@pytest.mark.parametrize("name", ["report.png", "families.png"])
def test_the_pictures_show_something(reported, name):
    picture = matplotlib.image.imread(reported[0] / name)

    assert picture.shape[0] > 300
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 10
