"""Pictures of a run: the tuning curve, and the subgraphs by family."""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator

from lib.report.treemap import Box, layout

_TITLE = 110  # characters of a line of it
_DPI = 110
_PALE = [colormaps["Set3"](i) for i in range(12)]  # black text stands on them
_GREY = _PALE.pop(8)  # for all families that find no colour of their own
_FONTS = (9.0, 8.0, 7.0, 6.0)  # sizes of labels, in points


# Colours that an SVG leaves to the page, by those that Matplotlib writes in their place.
_OF_THE_PAGE = {
    "#010203": "currentColor",
    "#010204": "var(--line)",
    "#010205": "var(--first)",
    "#010206": "var(--second)",
}


@dataclass(frozen=True, slots=True)
class Curve:
    """A tuning curve: its points as `rows.curve_points` has them, and what the compiled model took in the end."""

    name: str  # empty if there is only one
    points: pa.Table
    tuned_s: float


def curves_svg(curves: Sequence[Curve], column: str, label: str) -> str:
    """Up to two curves over a column, `seconds` or `trials`, as an SVG element in colours of the page around it."""
    text, line, *colours = _OF_THE_PAGE
    style = {"svg.fonttype": "none", "svg.hashsalt": label, "text.color": text, "axes.labelcolor": text,
             "xtick.color": text, "ytick.color": text, "axes.edgecolor": line, "font.size": 9}  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.subplots()
        for curve, colour in zip(curves, colours, strict=False):
            at, latency_ms = _corners(curve.points, column)
            named = f"{curve.name}: " if curve.name else ""
            axes.step(at, latency_ms, where="post", color=colour, label=f"{named}sum over subgraphs")
            measured = f"{named}measured, {curve.tuned_s * 1e3:.2f} ms"
            axes.axhline(curve.tuned_s * 1e3, color=colour, linestyle="--", linewidth=1, label=measured)
        _log_scale(axes)
        axes.set(xlabel=label, ylabel="latency, ms")
        axes.set_xlim(left=0)
        axes.grid(which="both", color=line, linewidth=0.5)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    for placeholder, colour in _OF_THE_PAGE.items():
        svg = svg.replace(placeholder, colour)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)  # which a second curve on the page has as well
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="latency over {label}"', 1)


def _log_scale(axes: Axes) -> None:
    """Of latencies: labels at 1, 2 and 5 of each decade, or at all digits where there is less than one decade."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 8 * low else range(1, 10)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    if high < 1.3 * low:  # hardly a tick would be left
        axes.yaxis.set_major_locator(MaxNLocator(5))


def _corners(points: pa.Table, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Where a curve changes, its first and its last point: thousands of trials have some dozens of these."""
    at, latency_ms = points[column].to_numpy(), points["latency_s"].to_numpy() * 1e3
    kept = np.concatenate([[True], latency_ms[1:] != latency_ms[:-1]])
    kept[-1] = True
    return at[kept], latency_ms[kept]


_NO_ESTIMATE = "no estimate: some subgraphs were not measured"


def draw_curve(points: pa.Table, measured: Mapping[str, Sequence[float]], title: str, out: Path) -> None:
    """The tuning curve over seconds and over trials, with what the compiled model took in the end."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    tuned_ms = median(measured["tuned"]) * 1e3 if measured["tuned"] else None  # of a CPU that is not there
    latency_ms = points["latency_s"].to_numpy() * 1e3
    for axes, column, label in zip(
        figure.subplots(1, 2, sharey=True),
        ("seconds", "trials"),
        ("seconds of tuning", "trials"),
        strict=True,
    ):
        if len(points):
            axes.step(points[column].to_numpy(), latency_ms, where="post", label="estimate: sum over subgraphs")
        else:
            axes.text(0.5, 0.75, _NO_ESTIMATE, transform=axes.transAxes, ha="center", color="gray")
            axes.set_xticks([])
        if tuned_ms is not None:
            axes.axhline(tuned_ms, color="tab:green", linestyle="--", label=f"compiled and measured: {tuned_ms:.2f} ms")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.grid(which="both", alpha=0.3)
    figure.axes[0].set_ylabel("latency of the model, ms")
    figure.axes[1].legend(loc="upper right")
    before = measured.get("untuned")
    untuned = f"\nuntuned: {median(before) * 1e3:,.1f} ms" if before else ""
    figure.suptitle(f"{textwrap.fill(title, _TITLE)}{untuned}", fontsize=11)
    figure.savefig(out, dpi=_DPI)


def picture_of_families(subgraphs: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Each subgraph as a box, by its share of the FLOP of one inference; those of a family together, in its colour.

    Args:
        subgraphs: Rows of a SUBGRAPHS table with their `family_id`, as `members.join` has them.
    """
    members: dict[str, list[Mapping[str, Any]]] = {}
    for subgraph in subgraphs:
        members.setdefault(subgraph["family_id"] or "not tuned", []).append(subgraph)
    total = _flop(subgraphs) or 1.0
    ranked = sorted(members, key=lambda family: (-_flop(members[family]), family))
    shares = {family: _flop(members[family]) / total for family in ranked}
    colours = dict(zip(ranked, _PALE, strict=False))

    figure = Figure(figsize=(12, 6.5), dpi=_DPI)
    axes = figure.add_axes((0.01, 0.02, 0.74, 0.87))
    frame = Box(0, 0, 0.74 * 12 * _DPI, 0.87 * 6.5 * _DPI)  # in pixels, as texts are measured in
    axes.set(xlim=(0, frame.width), ylim=(frame.height, 0))
    axes.axis("off")
    for family, outer in zip(ranked, layout(list(shares.values()), frame), strict=True):
        inner = layout([_flop([subgraph]) for subgraph in members[family]], outer)
        for subgraph, box in zip(members[family], inner, strict=True):
            _draw_box(axes, box, facecolor=colours.get(family, _GREY), edgecolor="gray", linewidth=0.6)
            _label(axes, box, subgraph, _flop([subgraph]) / total)
        _draw_box(axes, outer, fill=False, edgecolor="black", linewidth=1.8)
    figure.legend(**_legend(shares, colours), loc="upper left", bbox_to_anchor=(0.755, 0.9), frameon=False, fontsize=9)
    figure.suptitle(f"{title}\nfamilies and their subgraphs by FLOP of one inference", fontsize=11)
    return figure


def _flop(subgraphs: Sequence[Mapping[str, Any]]) -> float:
    """Of one inference."""
    return float(sum(subgraph["weight"] * subgraph["flop"] for subgraph in subgraphs))


def _draw_box(axes: Axes, box: Box, **style: Any) -> None:
    if box.width and box.height:
        axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, clip_on=False, **style))


def _label(axes: Axes, box: Box, subgraph: Mapping[str, Any], share: float) -> None:
    """Write into a box the most that fits, in the largest letters that do."""
    room = box.inset(4, 3, 4, 3)
    text = axes.text(room.x, room.y, "", va="top", linespacing=1.2)
    for labels in _labels(subgraph["name"].removeprefix("fused_"), subgraph["weight"], _percent(share)):
        for size, label in product(_FONTS, labels):
            text.set(text=label, fontsize=size)
            extent = text.get_window_extent()
            if extent.width <= room.width and extent.height <= room.height:
                return
    text.remove()


def _labels(name: str, calls: int, percent: str) -> tuple[list[str], list[str], list[str]]:
    """What may stand in a box, the best first: the whole name, broken after underscores; a part of it; none of it."""
    numbers = f"{calls} calls, {percent}" if calls > 1 else percent
    whole = []
    for columns in (60, 30, 20, 15, 10):
        lines = [line.replace("_ ", "_") for line in textwrap.wrap(name.replace("_", "_ "), columns)]
        whole.append("\n".join([*lines, *textwrap.wrap(numbers, max(columns, len(percent)))]))
    parts = [f"{_cut(name, columns)}\n{numbers}" for columns in (30, 20, 15, 10)]
    return whole, parts, [percent]


def _legend(shares: Mapping[str, float], colours: Mapping[str, Any]) -> dict[str, Any]:
    """Handles and labels: each coloured family with its share, then the grey ones and those without FLOP together."""
    entries = [(f"{_cut(family)}, {_percent(share)}", colours[family])
               for family, share in shares.items() if share and family in colours]  # fmt: skip
    grey = [share for family, share in shares.items() if share and family not in colours]
    if grey:
        entries.append((f"{len(grey)} more families, {_percent(sum(grey))}", _GREY))
    bare = [family for family, share in shares.items() if not share]
    if len(bare) > len(_PALE):
        bare = [f"{len(bare)} families"]
    entries += [(f"{_cut(family)}, no FLOP", "white") for family in bare]
    return {
        "handles": [Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="black") for _, colour in entries],
        "labels": [label for label, _ in entries],
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.0005 else "< 0.1 %"


def _cut(text: str, length: int = 24) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
