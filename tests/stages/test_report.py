import json
from itertools import combinations

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
        out=folder / "report.txt", curve=folder / "report.png", treemap=folder / "families.png",
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


@pytest.mark.parametrize("name", ["report.png", "families.png"])
def test_the_pictures_show_something(reported, name):
    picture = matplotlib.image.imread(reported[0] / name)

    assert picture.shape[0] > 300
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 10


def test_a_curve_without_points_is_drawn_too(tmp_path):
    empty = pa.table({"seconds": pa.array([], pa.float64()), "trials": pa.array([], pa.int64()),
                      "latency_s": pa.array([], pa.float64())})  # fmt: skip

    report.draw(empty, {"tuned": [1.0], "untuned": [2.0]}, "t", tmp_path / "c.png")

    assert (tmp_path / "c.png").stat().st_size > 1000


def rows(*flop, name="fused_conv2d{}_add_multiply_erf_multiply"):
    return [
        {"subgraph_id": str(n), "name": name.format(n), "weight": 1 + n % 3, "flop": f} for n, f in enumerate(flop)
    ]  # fmt: skip


PICTURES = {
    "one": (rows(5.0), {"0": "conv2d"}),
    "many families": (rows(*range(1, 60)), {str(n): f"family-{n}-of-a-very-long-name-indeed" for n in range(59)}),
    "many members": (rows(*[1e9] * 80), {str(n): f"family{n % 3}" for n in range(80)}),
    "no FLOP": (rows(0.0, 0.0), {"0": "gather"}),
    "some not tuned": (rows(3.0, 2.0, 1.0, 0.0), {"1": "matmul"}),
}


@pytest.mark.parametrize(("subgraphs", "family_of"), PICTURES.values(), ids=PICTURES)
def test_no_two_texts_of_the_picture_of_families_overlap_and_none_is_cut_off(subgraphs, family_of):
    figure = report.picture_of_families(subgraphs, family_of, "a model on a target, a run")
    figure.draw_without_rendering()

    texts = [*figure.texts, *figure.axes[0].texts, *figure.legends[0].get_texts()]
    extents = [text.get_window_extent() for text in texts]
    assert not [(a, b) for a, b in combinations(extents, 2) if a.padded(-0.5).overlaps(b.padded(-0.5))]
    assert all(figure.bbox.count_contains(extent.corners()) == 4 for extent in extents)


def test_the_picture_of_families_names_each_with_its_share():
    figure = report.picture_of_families(*PICTURES["some not tuned"], "t")

    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["not tuned, 60.0 %", "matmul, 40.0 %"]


def test_a_family_is_as_large_in_the_picture_as_its_share():
    figure = report.picture_of_families(*PICTURES["some not tuned"], "t")

    colour = figure.legends[0].get_patches()[1].get_facecolor()
    boxes = [box for box in figure.axes[0].patches if box.get_fill()]
    areas = {box: box.get_width() * box.get_height() for box in boxes}
    own = [area for box, area in areas.items() if box.get_facecolor() == colour]
    assert sum(own) / sum(areas.values()) == pytest.approx(0.4)
