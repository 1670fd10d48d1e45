import json

import matplotlib.image
import numpy as np
import pyarrow as pa
import pytest

from lib import history, tables
from lib.accounting import Record
from lib.layout import CompiledFiles
from lib.schemas import MEASUREMENTS, RESULTS, SUBGRAPHS
from lib.tables import Origin
from stages import compile, report
from tests.stages.conftest import ORIGIN
from tests.stages.test_compile import QUICK


@pytest.fixture(scope="module")
def reported(started, cpu, pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reported")
    compiled = CompiledFiles(folder / "compiled")
    rounds = started.run.rounds(1)
    compile.run(started.model, started.families, rounds, cpu, QUICK, pool, origin=ORIGIN, out=compiled)
    report.run(
        started.model, started.families, rounds, compiled, "tiny_cnn", origin=Origin("the digest"),
        out=folder / "report.txt", curve=folder / "report.png",
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


def test_the_report_ends_with_the_digest_of_what_it_was_made_from(reported):
    assert (reported[0] / "report.txt").read_text().rstrip().endswith("made from the digest")


def test_the_times_add_up(reported, started):
    folder, compiled = reported
    records = report.clocks(
        started.model, started.families, started.run.rounds(1), json.loads(compiled.manifest.read_text())
    )
    lines = (folder / "report.txt").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("time "))
    shares = [line.split() for line in lines[start + 2 : lines.index("", start) - 1]]
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


def test_the_picture_shows_something(reported):
    picture = matplotlib.image.imread(reported[0] / "report.png")

    assert picture.shape[0] > 300
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 10


def test_a_curve_without_points_is_drawn_too(tmp_path):
    empty = pa.table({"seconds": pa.array([], pa.float64()), "trials": pa.array([], pa.int64()),
                      "latency_s": pa.array([], pa.float64())})  # fmt: skip

    report.draw(empty, {"tuned": [1.0], "untuned": [2.0]}, "t", tmp_path / "c.png")

    assert (tmp_path / "c.png").stat().st_size > 1000
