from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lib.report.treemap import Box, layout

EXTENTS = st.floats(0.1, 100)
FRAMES = st.builds(Box, st.floats(-10, 10), st.floats(-10, 10), EXTENTS, EXTENTS)
WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e9)), min_size=1, max_size=30).filter(any)


def area(box):
    return box.width * box.height


def overlap(a, b):
    width = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
    height = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
    return max(0.0, width) * max(0.0, height)


@given(WEIGHTS, FRAMES)
@example([1e9, 1.0, 1e-3], Box(0, 0, 1, 1))
def test_areas_are_proportional_to_weights(weights, frame):
    boxes = layout(weights, frame)

    shares = [area(box) / area(frame) for box in boxes]
    assert shares == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-6, abs=1e-7)


@given(WEIGHTS, FRAMES)
def test_boxes_do_not_overlap_and_fill_the_whole_frame(weights, frame):
    boxes = layout(weights, frame)

    assert sum(overlap(a, b) for a, b in combinations(boxes, 2)) <= 1e-6 * area(frame)
    assert sum(map(area, boxes)) == pytest.approx(area(frame))


@given(WEIGHTS, FRAMES)
def test_every_box_is_inside_the_frame(weights, frame):
    slack = 1e-9 * (frame.width + frame.height + abs(frame.x) + abs(frame.y))

    for box in layout(weights, frame):
        assert box.x >= frame.x - slack
        assert box.y >= frame.y - slack
        assert box.x + box.width <= frame.x + frame.width + slack
        assert box.y + box.height <= frame.y + frame.height + slack


def test_the_paper_s_example_is_laid_out_as_in_the_paper():
    """Figure 3 of Bruls, Huizing and van Wijk: 6 x 4 with areas 6, 6, 4, 3, 2, 2, 1."""
    boxes = layout([6, 6, 4, 3, 2, 2, 1], Box(0, 0, 6, 4))

    assert [(round(box.width, 2), round(box.height, 2)) for box in boxes] == [
        (3, 2), (3, 2), (1.71, 2.33), (1.29, 2.33), (1.2, 1.67), (1.2, 1.67), (0.6, 1.67),
    ]  # fmt: skip


def test_weights_of_zero_leave_the_frame_to_the_others():
    assert layout([0, 5, 0], Box(1, 2, 3, 4)) == [Box(1, 2, 0, 0), Box(1, 2, 3, 4), Box(1, 2, 0, 0)]
    assert layout([0, 0], Box(0, 0, 1, 1)) == [Box(0, 0, 0, 0)] * 2
    assert layout([], Box(0, 0, 1, 1)) == []
