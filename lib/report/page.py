"""Pages: a run, a night, two runs side by side. Each is one HTML file that needs no network, rendered by Jinja."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from lib.report import ranges
from lib.report.nights import ModelRow, NightRows
from lib.report.ranges import RangeRows
from lib.report.rows import RunRows, SubgraphRow
from lib.report.text import NARROW, counted, learned, milliseconds, narrow_kind, on_precision
from lib.report.treemap import Box, layout
from lib.tir.numerics import ONES, VANISHING

_GOLDEN_ANGLE = 137.508  # degrees: hues of neighbours in a list are far apart
_FRAME = Box(0, 0, 220, 100)  # of the treemap, in any unit; its boxes are placed by shares of it

_MOST_SCHEDULES = 1 << 20  # characters of schedules on a page: it is to open at once on a phone

_AXES = (("seconds", "seconds of tuning"), ("trials", "trials"))

Differences = Sequence[tuple[str, str, str]]  # a setting, and what the first and the second run have

_CODE = """\
import numpy as np
from family_tuner_runtime import Model  # pip install path/to/clone/lib/runtime

model = Model({folder!r})
{inputs}
outputs = model({names})"""

_GPU_CODE = """\
import json, pathlib
import numpy as np, tvm
from safetensors.numpy import load_file

folder = pathlib.Path({folder!r})
manifest = json.loads((folder / "manifest.json").read_text())
machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(folder / manifest["library"])), tvm.cuda())
weights = sorted(load_file(folder / manifest["params"]).items())  # names that begin with __ fill gaps
params = [tvm.runtime.tensor(value, tvm.cuda()) for name, value in weights if not name.startswith("__")]
{inputs}
outputs = machine[manifest["entry"]](*[tvm.runtime.tensor(x, tvm.cuda()) for x in [{names}]], *params)"""


def run_page(run: RunRows, folder: Path) -> str:
    """A run.

    Args:
        folder: Of the compiled library.
    """
    from lib.report import drawings  # with Matplotlib, for which commands that draw nothing need not wait

    def peak_of(row: SubgraphRow) -> float | None:
        found: float | None = run.facts.get(f"peak_flops{narrow_kind(row.operator)}")
        return found

    curves = [
        Markup(drawings.curves_svg([drawings.Curve("", run.curve, run.tuned_s)], column, label))
        for column, label in _AXES
        if len(run.curve)
    ]
    return _render(
        "run.html.j2",
        title=run.title,
        run=run,
        verdict=verdict(run),
        cost=_cost(run),
        learned=learned(run),
        precision=", ".join(run.dtypes) or "no floats",
        noted=on_precision(run),
        map=treemap(run.subgraphs),
        ranked=_with_room(sorted(run.subgraphs, key=lambda row: -row.time_s)),
        total_s=sum(row.time_s for row in run.subgraphs),
        peak=run.facts.get("peak_flops"),
        peaks_of_narrow=[(kind[1:], run.facts[name]) for kind in NARROW if run.facts.get(name := f"peak_flops{kind}")],
        peak_of=peak_of,
        curves=curves,
        conditions=_conditions(run),
        code=code(run.facts, folder),
        row_facts=lambda row: _row_facts(row, peak_of(row)),
    )


def _with_room(ranked: Sequence[SubgraphRow]) -> list[SubgraphRow]:
    """The rows, without the schedules of those that come after a megabyte of schedules; their loops stay."""
    found, room = [], _MOST_SCHEDULES
    for row in ranked:
        room -= len(row.program.schedule) if row.program else 0
        found.append(row if room >= 0 else _without_schedule(row))
    return found


def _without_schedule(row: SubgraphRow) -> SubgraphRow:
    return replace(row, program=replace(row.program, schedule="")) if row.program else row


def night_page(night: NightRows, folder: Path) -> str:
    """A night.

    Args:
        folder: Where the page will lie: its links to the models' pages are relative.
    """
    known, new = night.n_recalled, night.n_trials
    return _render(
        "night.html.j2",
        title=night.title,
        night=night,
        n_done=sum(not row.error for row in night.models),
        n_failed=sum(bool(row.error) for row in night.models),
        reused=known / max(1, known + new),
        links={row.name: quote(os.path.relpath(row.page, folder)) for row in night.models if row.page},
    )


def range_page(found: RangeRows, folder: Path) -> str:
    """A model that was compiled for a range of shapes.

    Args:
        folder: Of its bundle.
    """
    return _render("range.html.j2", title=found.title, found=found, folder=folder, share=ranges.share)


def comparison_page(first: RunRows, second: RunRows, folders: tuple[Path, Path], settings: Differences) -> str:
    """Two runs side by side.

    Args:
        folders: Of the runs.
        settings: That differ between them.
    """
    from lib.report import drawings  # see `run_page`

    runs = {"first": first, "second": second}
    drawn = [drawings.Curve(name, run.curve, run.tuned_s) for name, run in runs.items() if len(run.curve)]
    sides = [
        {"name": name, "colour": name, "run": run, "verdict": verdict(run), "cost": _cost(run), "folder": folder}
        for (name, run), folder in zip(runs.items(), folders, strict=True)
    ]
    same = {row.subgraph_id for row in first.subgraphs} == {row.subgraph_id for row in second.subgraphs}
    ratio = first.tuned_s / second.tuned_s
    faster = f"The second is {ratio:.2f} times as fast as the first; they were timed at different times."
    if math.isnan(ratio):
        faster = "Not both of them ever ran."
    return _render(
        "comparison.html.j2",
        title=f"{first.title} beside {second.title}" if first.title != second.title else f"{first.title}, two runs",
        sides=sides,
        told=faster if same else "They compute different things.",
        differences=[*_different_conditions(first, second), *settings],
        curves=[Markup(drawings.curves_svg(drawn, column, label)) for column, label in _AXES if drawn],
        pairs=_pairs(first, second),
    )


def _different_conditions(first: RunRows, second: RunRows) -> list[tuple[str, str, str]]:
    both = [asdict(run.conditions) if run.conditions else {} for run in (first, second)]
    return [(name, str(both[0].get(name, "-")), str(both[1].get(name, "-")))
            for name in dict.fromkeys([*both[0], *both[1]]) if both[0].get(name) != both[1].get(name)]  # fmt: skip


def _pairs(first: RunRows, second: RunRows) -> list[dict[str, Any]]:
    """A row for each subgraph of either run, what the second saves most first."""
    sides = [{row.subgraph_id: row for row in run.subgraphs} for run in (first, second)]
    found = []
    for subgraph_id in dict.fromkeys([*sides[0], *sides[1]]):
        rows = [side.get(subgraph_id) for side in sides]
        one = next(row for row in rows if row)
        before, after = (row.tuned_s if row else None for row in rows)
        found.append({
            "name": one.name, "calls": one.calls, "first_s": before, "second_s": after,
            "saved_s": one.calls * (before - after) if before and after else None,
            "trials": [row.trials + row.recalled if row else "-" for row in rows],
            "tiles": [row.program.tile if row and row.program else "" for row in rows],
        })  # fmt: skip
    return sorted(found, key=lambda pair: -(pair["saved_s"] if pair["saved_s"] is not None else -math.inf))


def verdict(run: RunRows) -> str:
    """How fast beside what, and how right; follows the latency."""
    told = [run.never_ran or "an inference"]
    onnx = run.facts["onnx"]
    if run.onnxruntime_s:
        told.append(
            f", {run.onnxruntime_s / run.tuned_s:.2f} times as fast as {onnx['by']} ({run.onnxruntime_s * 1e3:,.2f} ms)"
        )
    if run.facts["shipped"] == "untuned":
        told.append("; nothing faster than the untuned model was found")
    elif run.untuned_s:
        least = "at least " if run.facts["untuned_is_lower_bound"] else ""
        estimated = ", estimated" if run.facts["untuned_estimated"] else ""
        told.append(
            f"; {least}{run.untuned_s / run.tuned_s:.1f} times as fast as untuned "
            f"({run.untuned_s * 1e3:,.2f} ms{estimated})"
        )
    if run.facts["largest_output"] < VANISHING:
        told.append(". The outputs vanish, so nothing could be compared")
    else:
        told.append(f". Largest error {run.facts['max_error']:.1e} of the largest output")
        if run.facts.get("precision") == "bf16" or any(row.operator.endswith(NARROW[1:]) for row in run.subgraphs):
            told.append(f" ({run.facts['tolerance']:.2g} is allowed in this precision)")
    if onnx and onnx["failure"]:
        told.append(f"; not compared with its file: {onnx['failure']}")
    elif onnx and run.is_compared_with_file:
        told.append(f", to {onnx['by']}")
    elif onnx:
        told.append(f", {onnx['max_error']:.1e} to {onnx['by']}")
    told.append(f". Of the file, {run.rest}" if run.rest else "")
    return "".join(told) + "."


def _cost(run: RunRows) -> str:
    known = f", {run.n_recalled:,} measurements recalled" if run.n_recalled else ""
    took = f"{run.n_trials:,} trials in {run.n_rounds} rounds{known}, {duration(run.seconds['total'])} in all."
    return f"{took} {run.company}".strip()


def treemap(subgraphs: Sequence[SubgraphRow]) -> dict[str, Any]:
    """Boxes as large as what subgraphs take of an inference, those of a family together, as the template wants them."""
    members: dict[str, list[SubgraphRow]] = {}
    for row in subgraphs:
        if row.time_s:
            members.setdefault(row.family_id or "not tuned", []).append(row)
    times = {family: sum(row.time_s for row in rows) for family, rows in members.items()}
    ranked = sorted(members, key=lambda family: (-times[family], family))
    total = sum(times.values()) or 1.0
    hues = {family: round(n * _GOLDEN_ANGLE % 360) for n, family in enumerate(ranked)}
    frames = layout([times[family] for family in ranked], _FRAME)
    boxes = [
        {"name": row.name.removeprefix("fused_"), "link": link(row.subgraph_id), "place": _place(box),
         "hue": hues[family], "share": row.time_s / total,
         "told": f"{row.calls} x {_us(row.tuned_s)} µs, {_percent(row.time_s / total)}"}
        for family, frame in zip(ranked, frames, strict=True)
        for row, box in zip(members[family], layout([row.time_s for row in members[family]], frame), strict=True)
    ]  # fmt: skip
    families = [{"name": family, "hue": hues[family], "share": times[family] / total} for family in ranked]
    return {"boxes": boxes, "frames": [_place(frame) for frame in frames], "families": families}


def _place(box: Box) -> str:
    """As CSS, in shares of the frame."""
    x, y, width, height = (
        100 * value / side
        for value, side in (
            (box.x, _FRAME.width), (box.y, _FRAME.height), (box.width, _FRAME.width), (box.height, _FRAME.height),
        )
    )  # fmt: skip
    return f"left:{x:.3f}%;top:{y:.3f}%;width:{width:.3f}%;height:{height:.3f}%"


def _row_facts(row: SubgraphRow, peak: float | None) -> list[tuple[str, str]]:
    """What stands above the programs of a subgraph."""
    facts = [("operator", f"{row.operator}; family {row.family_id}" if row.family_id else row.operator)]
    if row.flops:
        share = f", {_percent(row.flops / peak)} of the peak" if peak else ""
        facts.append(("computes", f"{row.flop / 1e6:,.2f} MFLOP a call: {_giga(row.flops)} GFLOP/s{share}"))
    facts.append(("moves", f"at least {row.moved_bytes / 1e6:,.3f} MB a call"))
    known = f", {row.recalled} recalled" if row.recalled else ""
    failed = f"; failed: {counted(row.failures)}" if row.failures else ""
    facts.append(("measured", f"{row.trials} new trials{known}{failed}"))
    if row.program:
        facts.append(("shipped", row.source + (f", register tile {row.program.tile}" if row.program.tile else "")))
    if row.max_error is not None:
        facts.append(("error", f"{row.max_error:.1e} of the largest value"))
    if row.note:
        facts.append(("note", row.note))
    return [*facts, ("identity", row.subgraph_id)]


def _conditions(run: RunRows) -> list[tuple[str, str]]:
    """Under which latencies were measured, and what the library is for."""
    found = asdict(run.conditions) if run.conditions else {}
    inputs = [f"{each['dtype']} {tuple(each['shape'])}" for each in run.facts["model_inputs"]]
    return [
        *((name, str(value)) for name, value in found.items()),
        ("host", str(run.facts["host"])),
        ("inputs of the model", "; ".join(inputs)),
    ]


def code(facts: Mapping[str, Any], folder: Path) -> str:
    """Python that runs a library once, on random inputs."""
    lines, names = [], []
    for n, each in enumerate(facts["model_inputs"]):
        shape, dtype, most = tuple(each["shape"]), each["dtype"], each["bound"] or 4
        values = f"np.random.randint({most}, size={shape})" if most != ONES else f"np.ones({shape})"
        if dtype.startswith(("float", "bfloat")):
            values = f"np.random.rand{shape}"
        lines.append(f"x{n} = {values}.astype({dtype!r})" if shape else f"x{n} = np.array(1, {dtype!r})")
        names.append(f"x{n}")
    code = _CODE if facts["target"]["kind"] == "llvm" else _GPU_CODE
    return code.format(folder=str(folder), inputs="\n".join(lines), names=", ".join(names))


def link(subgraph_id: str) -> str:
    """The name of its part of the page."""
    return f"subgraph-{subgraph_id}"


def duration(seconds: float) -> str:
    """E.g. `45 s`, `12 min 5 s`, `8 h 4 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _us(seconds: float | None) -> str:
    if not seconds:
        return "-"
    return f"{seconds * 1e6:,.1f}" if seconds >= 1e-6 else f"{seconds * 1e6:.2g}"


def _ms(seconds: float | None) -> str:
    return (
        "not timed:"
        if seconds is not None and math.isnan(seconds)
        else f"{milliseconds(seconds)} ms"
        if seconds
        else "-"
    )


def _change(row: ModelRow) -> Markup:
    """Of a library since the page before, in colour: less is better."""
    if row.library_s is None or row.page_before_s is None:
        return Markup("-")
    change = row.library_s / row.page_before_s - 1
    colour = "good" if change < -0.005 else "bad" if change > 0.005 else "faint"
    return Markup('<span class="{}">{}</span>').format(colour, f"{100 * change:+.1f} %")


def _giga(value: float | None) -> str:
    return f"{value / 1e9:,.1f}" if value else "-"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.0005 or share == 0 else "< 0.1 %"


def _two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _times(value: float) -> str:
    return f"{value:,.1f}x"


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        us=_us,
        ms=_ms,
        plain_ms=milliseconds,
        change=_change,
        giga=_giga,
        percent=_percent,
        share=_two_digits,
        times=_times,
        link=link,
        seconds=duration,
    )
    return found
