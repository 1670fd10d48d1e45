"""A run's tables in, a text table and pictures of the tuning curve and of the families out."""

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lib import accounting, history, tables
from lib.accounting import Record
from lib.history import History
from lib.layout import CompiledFiles, ModelFiles, RoundFiles
from lib.schemas import CANDIDATES, FAMILIES, MEASUREMENTS, RESULTS, SUBGRAPHS, TRAINING
from lib.tables import Origin
from lib.text import align
from lib.treemap import Box, layout

_DPI = 110
_PALE = [colormaps["Set3"](i) for i in range(12)]  # black text stands on them
_GREY = _PALE.pop(8)  # for all families that find no colour of their own
_FONTS = (9.0, 8.0, 7.0, 6.0)  # sizes of labels, in points


def run(
    model: ModelFiles,
    families: Path,
    past: Sequence[RoundFiles],
    compiled: CompiledFiles,
    title: str,
    *,
    origin: Origin,
    out: Path,
    curve: Path,
    treemap: Path,
) -> Path:
    """Write the report of a compiled run.

    Args:
        title: What was tuned, and for what.
        out: Gets the text; its last line holds the digest of the inputs.
        curve: Gets the picture of the tuning curve (PNG), before `out`.
        treemap: Gets the picture of the families (PNG), before `out`.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    subgraphs = tables.read(model.subgraphs, SUBGRAPHS).to_pylist()
    results = tables.read(compiled.results, RESULTS).to_pylist()
    manifest = json.loads(compiled.manifest.read_text())
    so_far = history.load(past)
    records = clocks(model, families, past, manifest)
    text = "\n\n".join(
        [
            f"{title}\n{len(past)} rounds, {so_far.n_trials} trials; "
            f"{manifest['device']}, {manifest['threads']} threads",
            subgraph_table(subgraphs, results, so_far),
            model_lines(manifest, so_far),
            accuracy_table(past),
            time_table(records),
            f"made from {origin.inputs}",
        ]
    )
    points = curve_points(past, {s["subgraph_id"]: s["weight"] for s in subgraphs if s["tunable"]}, records)
    with tables.written_whole(curve) as partial:
        draw(points, manifest["latencies_s"], title, partial)
    family_of = dict(tables.read(families, FAMILIES).select(["subgraph_id", "family_id"]).to_pandas().to_numpy())
    with tables.written_whole(treemap) as partial:
        picture_of_families(subgraphs, family_of, title).savefig(partial)
    with tables.written_whole(out) as partial:
        partial.write_text(text + "\n")
    return out


def subgraph_table(
    subgraphs: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], so_far: History
) -> str:
    """A line for each subgraph: where it stood, where it stands, and what it cost."""
    header = (
        "subgraph",
        "family",
        "calls",
        "trials",
        "failed",
        "untuned us",
        "tuned us",
        "speed-up",
        "GFLOP/s",
        "note",
    )
    rows = [header]
    for subgraph, result in zip(subgraphs, results, strict=True):
        past = so_far.of(subgraph["subgraph_id"])
        before, after = result["untuned_s"], result["tuned_s"]
        rows.append(
            (
                subgraph["name"],
                result["family_id"] or "-",
                str(subgraph["weight"]),
                str(past.n_trials),
                _failures(past.statuses),
                f"{before * 1e6:,.1f}" if before else "-",
                f"{after * 1e6:,.1f}" if after else "-",
                f"{before / after:.1f}x" if before and after else "-",
                f"{subgraph['flop'] / after / 1e9:,.1f}" if after and subgraph["flop"] else "-",
                result["note"],
            )
        )
    return align(rows)


def model_lines(manifest: Mapping[str, Any], so_far: History) -> str:
    """The model as a whole: both latencies with their spread, and what was verified."""
    lines = []
    for name in ("untuned", "tuned"):
        found = manifest["latencies_s"][name]
        spread = f"median of {len(found)}, {min(found) * 1e3:.2f} to {max(found) * 1e3:.2f}"
        how = "estimated from its subgraphs" if name == "untuned" and manifest.get("untuned_estimated") else spread
        lines.append(f"model {name:8s} {median(found) * 1e3:10.2f} ms  ({how})")
    ratio = median(manifest["latencies_s"]["untuned"]) / median(manifest["latencies_s"]["tuned"])
    failures = sum((past.statuses for past in so_far.subgraphs.values()), Counter())
    how = "" if manifest.get("untuned_estimated") else ", timed in turn in one process"
    lines.append(f"speed-up {ratio:.1f}x{how}; shipped: {manifest['shipped']}")
    lines.append(f"largest difference of the outputs {manifest['max_error']:.1e} of their largest value")
    lines.append(f"failed candidates: {_failures(failures)}")
    return "\n".join(lines)


def accuracy_table(past: Sequence[RoundFiles]) -> str:
    """How well each family's model foretold the candidates of a round before it was trained on them."""
    rows: list[tuple[str, ...]] = [("cost model of", "samples", "foretold", "pairs right", "rank corr.", "top recall")]
    columns = [f.name for f in TRAINING if f.name not in ("model", "model_digest")]
    found: dict[str, list[dict[str, Any]]] = {}
    for files in past:
        for row in tables.read(files.training, TRAINING).select(columns).to_pylist():
            found.setdefault(row["family_id"], []).append(row)
    for family_id, family_rows in sorted(found.items(), key=lambda item: -item[1][-1]["num_samples"]):
        scored = [row for row in family_rows if row["num_predicted"]]
        means = [
            _mean([row[column] for row in scored if row[column] is not None])
            for column in ("pairwise_accuracy", "rank_correlation", "top_recall")
        ]
        n = sum(row["num_predicted"] for row in scored)
        rows.append((family_id, str(family_rows[-1]["num_samples"]), str(n), *means))
    return align(rows)


def time_table(records: Sequence[Record]) -> str:
    """Where the hours went."""
    seconds = accounting.spent(records)
    total = seconds["total"] or 1.0
    rows = [("time", "s", "share")]
    rows += [(kind, f"{value:,.1f}", f"{100 * value / total:.1f} %") for kind, value in seconds.items()]
    own = sum(seconds[kind] for kind in ("extract", "worker start", "rest"))
    return align(rows) + f"\nthe pipeline's own (extract, worker start, rest): {100 * own / total:.1f} %"


def clocks(model: ModelFiles, families: Path, past: Sequence[RoundFiles], manifest: Mapping[str, Any]) -> list[Record]:
    """The clocks of all stages of a run."""
    found = [("extract", model.subgraphs, SUBGRAPHS), ("cluster", families, FAMILIES)]
    for files in past:
        found.append(("generate", files.candidates, CANDIDATES))
        found.append(("measure", files.measurements, MEASUREMENTS))
        found.append(("train", files.training, TRAINING))
    stamps = [(stage, tables.stamp(path, schema)) for stage, path, schema in found]
    records = [Record(stamp.session, stage, stamp.clock) for stage, stamp in stamps]
    # The model may have been extracted for an earlier run: that time is not this run's.
    sessions = {record.session for record in records if record.stage == "generate"} | {manifest["session"]}
    records = [record for record in records if record.session in sessions]
    return [*records, Record(manifest["session"], "compile", manifest["clock"])]


def curve_points(past: Sequence[RoundFiles], weights: Mapping[str, int], records: Sequence[Record]) -> pa.Table:
    """Columns `seconds`, `trials` and `latency_s`: the model's estimated latency after each measurement.

    Starts when every subgraph has a program that works.
    """
    best: dict[str, float] = {}
    moments, trials, latencies, n = [], [], [], 0
    for files in past:
        rows = tables.read(files.measurements, MEASUREMENTS).select(["subgraph_id", "latencies", "measured_at"])
        for row in sorted(rows.to_pylist(), key=lambda row: row["measured_at"]):
            n += 1
            if row["latencies"]:
                latency = median(row["latencies"])
                best[row["subgraph_id"]] = min(latency, best.get(row["subgraph_id"], latency))
            if len(best) == len(weights):
                moments.append(row["measured_at"])
                trials.append(n)
                latencies.append(sum(weight * best[subgraph_id] for subgraph_id, weight in weights.items()))
    seconds = accounting.active_seconds(records, moments)
    return pa.table({"seconds": pa.array(seconds, pa.float64()), "trials": pa.array(trials, pa.int64()),
                     "latency_s": pa.array(latencies, pa.float64())})  # fmt: skip


def draw(points: pa.Table, measured: Mapping[str, Sequence[float]], title: str, out: Path) -> None:
    """The tuning curve over seconds and over trials, with what the compiled model took in the end."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    tuned_ms = median(measured["tuned"]) * 1e3
    latency_ms = points["latency_s"].to_numpy() * 1e3
    for axes, column, label in zip(
        figure.subplots(1, 2, sharey=True),
        ("seconds", "trials"),
        ("seconds of tuning", "trials"),
        strict=True,
    ):
        axes.step(points[column].to_numpy(), latency_ms, where="post", label="estimate: sum over subgraphs")
        axes.axhline(tuned_ms, color="tab:green", linestyle="--", label=f"compiled and measured: {tuned_ms:.2f} ms")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.grid(which="both", alpha=0.3)
    figure.axes[0].set_ylabel("latency of the model, ms")
    figure.axes[1].legend(loc="upper right")
    figure.suptitle(f"{title} (untuned: {median(measured['untuned']) * 1e3:,.1f} ms)")
    figure.savefig(out, dpi=_DPI)


def picture_of_families(subgraphs: Sequence[Mapping[str, Any]], family_of: Mapping[str, str], title: str) -> Figure:
    """Each subgraph as a box, by its share of the FLOP of one inference; those of a family together, in its colour.

    Args:
        subgraphs: Rows of a SUBGRAPHS table.
        family_of: Family by subgraph, of those that are tuned.
    """
    members: dict[str, list[Mapping[str, Any]]] = {}
    for subgraph in subgraphs:
        members.setdefault(family_of.get(subgraph["subgraph_id"], "not tuned"), []).append(subgraph)
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


def _failures(statuses: Counter[str]) -> str:
    kinds = [f"{count} {status}" for status, count in sorted(statuses.items()) if status != "ok" and count]
    return ", ".join(kinds) or "0"


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f}" if values else "-"
