"""The picture of the table beside the vendors."""

import ratios

from tests.benchmarks.test_versus import RACE


def test_each_bar_is_the_better_vendor_over_ours_the_smallest_first():
    found = ratios.ratios(RACE, "ours")

    assert [(name, round(estimate.value, 3)) for name, estimate in found.items()] == [("slow net", 0.333), ("net", 3.0)]
    assert list(ratios.ratios(RACE, "plain")) == ["net"]


def test_bars_begin_where_both_are_equally_fast_and_lie_within_the_picture():
    figure = ratios.draw(ratios.ratios(RACE, "ours"), "a title")
    figure.draw_without_rendering()

    [axes] = figure.axes
    spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert [(round(start, 3), round(end, 3)) for start, end in spans] == [(1.0, 0.333), (1.0, 3.0)]
    assert [text.get_text() for text in axes.texts] == ["0.33", "3.00"]
    assert all(figure.bbox.count_contains(text.get_window_extent().corners()) == 4 for text in axes.texts)
