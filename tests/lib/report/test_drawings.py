from itertools import combinations

import pyarrow as pa
import pytest

from lib.report import drawings


def test_a_curve_without_points_is_drawn_too(tmp_path):
    empty = pa.table({"seconds": pa.array([], pa.float64()), "trials": pa.array([], pa.int64()),
                      "latency_s": pa.array([], pa.float64())})  # fmt: skip

    drawings.draw_curve(empty, {"tuned": [1.0], "untuned": [2.0]}, "t", tmp_path / "c.png")

    assert (tmp_path / "c.png").stat().st_size > 1000


def rows(*flop, name="fused_conv2d{}_add_multiply_erf_multiply"):
    return [
        {"subgraph_id": str(n), "name": name.format(n), "weight": 1 + n % 3, "flop": f} for n, f in enumerate(flop)
    ]  # fmt: skip


def grouped(subgraphs, family_of):
    return [{**row, "family_id": family_of.get(row["subgraph_id"], "")} for row in subgraphs]


PICTURES = {
    "one": grouped(rows(5.0), {"0": "conv2d"}),
    "many families": grouped(
        rows(*range(1, 60)), {str(n): f"family-{n}-of-a-very-long-name-indeed" for n in range(59)}
    ),
    "many members": grouped(rows(*[1e9] * 80), {str(n): f"family{n % 3}" for n in range(80)}),
    "no FLOP": grouped(rows(0.0, 0.0), {"0": "gather"}),
    "some not tuned": grouped(rows(3.0, 2.0, 1.0, 0.0), {"1": "matmul"}),
}


@pytest.mark.parametrize("subgraphs", PICTURES.values(), ids=PICTURES)
def test_no_two_texts_of_the_picture_of_families_overlap_and_none_is_cut_off(subgraphs):
    figure = drawings.picture_of_families(subgraphs, "a model on a target, a run")
    figure.draw_without_rendering()

    texts = [*figure.texts, *figure.axes[0].texts, *figure.legends[0].get_texts()]
    extents = [text.get_window_extent() for text in texts]
    assert not [(a, b) for a, b in combinations(extents, 2) if a.padded(-0.5).overlaps(b.padded(-0.5))]
    assert all(figure.bbox.count_contains(extent.corners()) == 4 for extent in extents)


def test_the_picture_of_families_names_each_with_its_share():
    figure = drawings.picture_of_families(PICTURES["some not tuned"], "t")

    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["not tuned, 60.0 %", "matmul, 40.0 %"]


def test_a_family_is_as_large_in_the_picture_as_its_share():
    figure = drawings.picture_of_families(PICTURES["some not tuned"], "t")

    colour = figure.legends[0].get_patches()[1].get_facecolor()
    boxes = [box for box in figure.axes[0].patches if box.get_fill()]
    areas = {box: box.get_width() * box.get_height() for box in boxes}
    own = [area for box, area in areas.items() if box.get_facecolor() == colour]
    assert sum(own) / sum(areas.values()) == pytest.approx(0.4)
