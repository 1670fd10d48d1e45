"""Rectangles as large as their weights and as square as can be, that fill a frame.

The squarified treemap of Bruls, Huizing and van Wijk (2000): rows are laid along the shorter side of what is still
free, the largest weights first, and a row takes one more as long as its worst rectangle becomes no longer by that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_VISIBLE = 1e-9  # share of the frame; what is smaller would drown in rounding errors


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: its upper left corner, with y downwards, and its extents."""

    x: float
    y: float
    width: float
    height: float

    def inset(self, left: float = 0.0, top: float = 0.0, right: float = 0.0, bottom: float = 0.0) -> "Box":
        """What is left inside of margins."""
        width, height = max(0.0, self.width - left - right), max(0.0, self.height - top - bottom)
        return Box(self.x + left, self.y + top, width, height)


def layout(weights: Sequence[float], frame: Box) -> list[Box]:
    """A box for each weight, in the order of the weights, with its share of the frame as area.

    Args:
        weights: At least 0. One of 0, or of less than a billionth of all, gets a box without area.
    """
    visible = [i for i, weight in enumerate(weights) if weight > _VISIBLE * sum(weights)]
    visible.sort(key=lambda i: -weights[i])
    placed = dict(zip(visible, _fill([weights[i] for i in visible], frame), strict=True))
    return [placed.get(i, Box(frame.x, frame.y, 0.0, 0.0)) for i in range(len(weights))]


def _fill(weights: Sequence[float], frame: Box) -> list[Box]:
    boxes: list[Box] = []
    while weights:
        n = _row_length(weights, frame)
        share = sum(weights[:n]) / sum(weights)
        if frame.width > frame.height:
            boxes += _slices(weights[:n], Box(frame.x, frame.y, frame.width * share, frame.height), upright=True)
            frame = frame.inset(left=frame.width * share)
        else:
            boxes += _slices(weights[:n], Box(frame.x, frame.y, frame.width, frame.height * share), upright=False)
            frame = frame.inset(top=frame.height * share)
        weights = weights[n:]
    return boxes


def _row_length(weights: Sequence[float], frame: Box) -> int:
    """How many of the weights, which fall, stand best in one row along the shorter side of the frame."""
    side, scale = min(frame.width, frame.height), frame.width * frame.height / sum(weights)

    def worst(n: int) -> float:
        """The largest ratio of two sides in a row of the first n."""
        depth = sum(weights[:n]) * scale / side
        lengths = (weights[0] * scale / depth, weights[n - 1] * scale / depth)
        return max(*(length / depth for length in lengths), *(depth / length for length in lengths))

    n = 1
    while n < len(weights) and worst(n + 1) <= worst(n):
        n += 1
    return n


def _slices(weights: Sequence[float], row: Box, *, upright: bool) -> list[Box]:
    """A row cut into boxes: one below the other if it stands upright, else one beside the other."""
    boxes, before, total = [], 0.0, sum(weights)
    for weight in weights:
        start, part = before / total, weight / total
        if upright:
            boxes.append(Box(row.x, row.y + start * row.height, row.width, part * row.height))
        else:
            boxes.append(Box(row.x + start * row.width, row.y, part * row.width, row.height))
        before += weight
    return boxes
