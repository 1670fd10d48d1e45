"""Text that a person reads: tables, the report of a run, the summary of a night."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lib.report.nights import ModelRow, NightRows
from lib.report.rows import Accuracy, RunRows, SubgraphRow
from lib.tir.numerics import VANISHING

_WIDEST = 48  # characters of a name in a table
_OWN = ("extract", "recall", "worker start", "rest")  # seconds that no user asked for


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns under each other, the first row underlined: words to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = [all(row[i][:1].isdigit() or row[i] in ("-", "") for row in rows[1:]) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def report(run: RunRows) -> str:
    """All of a run."""
    threads = "" if run.facts["target"].get("kind") == "cuda" else f", {run.facts['threads']} threads"
    parts = [
        f"{run.title}\n{_cost(run)}; {run.facts['device']}{threads}",
        subgraph_table(run.subgraphs),
        model_lines(run),
        f"{accuracy_table(run.accuracies)}\n{learned(run)}",
        time_table(run.seconds) + (f"\nwarning: {run.company}" if run.company else ""),
    ]
    return "\n\n".join(parts)


def _cost(run: RunRows) -> str:
    """What a run measured, and what it knew before."""
    known = f", {run.n_recalled} recalled from earlier runs" if run.n_recalled else ""
    return f"{run.n_rounds} rounds, {run.n_trials} trials{known}"


def subgraph_table(subgraphs: Sequence[SubgraphRow]) -> str:
    """A line for each subgraph: where it stood, where it stands, and what it cost."""
    header = (
        "subgraph",
        "family",
        "calls",
        "trials",
        "recalled",
        "failed",
        "untuned us",
        "tuned us",
        "speed-up",
        "GFLOP/s",
        "from",
        "note",
    )
    return align([header, *map(_subgraph_line, subgraphs)])


def _subgraph_line(row: SubgraphRow) -> tuple[str, ...]:
    before, after = row.untuned_s, row.tuned_s
    return (
        _short(row.name),
        row.family_id or "-",
        str(row.calls),
        str(row.trials),
        str(row.recalled),
        counted(row.failures),
        f"{before * 1e6:,.1f}" if before else "-",
        f"{after * 1e6:,.1f}" if after else "-",
        f"{before / after:.1f}x" if before and after else "-",
        f"{row.flops / 1e9:,.1f}" if row.flops else "-",
        row.source,
        row.note,
    )


def _short(name: str) -> str:
    """Of a fused function that names all it computes, its beginning and its end, which tell it from others."""
    return name if len(name) <= _WIDEST else f"{name[: _WIDEST - 16]}...{name[-13:]}"


def counted(kinds: Mapping[str, int]) -> str:
    """E.g. `3 crash, 2 timeout`; `0` if there is nothing to count."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()) if count) or "0"


def model_lines(run: RunRows) -> str:
    """The model as a whole: both latencies with their spread, and what was verified."""
    facts, lines = run.facts, []
    for name in ("untuned", "tuned"):
        found = facts["latencies_s"][name]
        if not found:
            continue
        how = spread(found)
        if name == "untuned" and facts["untuned_estimated"]:
            how = "estimated from its subgraphs"
        if name == "untuned" and facts["untuned_is_lower_bound"]:
            how = "at least: estimated from those of its subgraphs that were timed"
        lines.append(f"model {name:8s} {median(found) * 1e3:10.2f} ms  ({how})")
    how = "" if facts["untuned_estimated"] else ", timed in turn in one process"
    least = "at least " if facts["untuned_is_lower_bound"] else ""
    ratio = (
        f"{least}{run.untuned_s / median(facts['latencies_s']['tuned']):.1f}x{how}" if run.untuned_s else "not known"
    )
    lines.append(f"speed-up {ratio}; shipped: {facts['shipped']}")
    lines += [run.never_ran] if run.never_ran else []
    if new := facts["latencies_s"].get("new"):
        lines.append(f"the library of before stays: a new one took {median(new) * 1e3:.2f} ms beside it")
    if facts["largest_output"] < VANISHING:
        lines.append(f"the outputs vanish (the largest is {facts['largest_output']:.0e}): nothing could be compared")
    elif not run.is_compared_with_file:
        lines.append(f"largest difference of the outputs {facts['max_error']:.1e} of their largest value")
    lines += _onnx_lines(run)
    lines += [f"of the file, {run.rest} (rest.onnx)"] if run.rest else []
    lines += on_precision(run)
    lines.append(f"failed candidates: {counted({failure.status: failure.count for failure in run.failures})}")
    return "\n".join(lines)


NARROW = ("_bf16", "_int8", "_int16")  # how operators end whose elements are


def narrow_kind(operator: str) -> str:
    """Which of these an operator ends in; empty: its elements are float32."""
    return next((kind for kind in NARROW if operator.endswith(kind)), "")


_WHY_WIDE = {"batch_matmul": "columns that fill no vectors", "group_conv2d": "groups of an odd number of channels",
             **{f"depthwise_conv{n}d": "a depthwise convolution" for n in (1, 2, 3)}}  # fmt: skip
_IN_SIX, _MUCH = ("matmul", "conv1d", "conv2d", "conv2d_1x1", "conv3d"), 0.3  # Winograd's convolutions may be slower so
_SPLIT, _TOO_FEW = ("bf16x3", "bf16x6"), "products too few to be split"
_NOT_QUANTIZED = "not quantised in the file, or not as instructions take it"


def on_precision(run: RunRows) -> list[str]:
    """What is to be said of the elements that contractions are computed in; empty if it is nothing."""
    return [told for told in (_in_floats(run), _in_six(run)) if told]


def _in_floats(run: RunRows) -> str:
    """Which contractions stayed in float32 where others are in bf16 or of bytes, and why; empty if there are none."""
    if not any(row.operator.endswith(NARROW) for row in run.subgraphs):
        return ""
    found: Counter[str] = Counter()
    is_quantized = any(row.operator.endswith(NARROW[1:]) for row in run.subgraphs)
    otherwise = _TOO_FEW if run.facts.get("precision") in _SPLIT else "not a form that bf16 has a kernel for"
    for row in run.subgraphs:
        is_contraction = "conv" in row.operator or "matmul" in row.operator
        if is_contraction and not row.operator.endswith(NARROW):
            why = _NOT_QUANTIZED if is_quantized else _WHY_WIDE.get(row.operator, otherwise)
            found[f"{row.operator}: {why}"] += row.calls
    return "in float32 stayed " + "; ".join(f"{n} of {told}" for told, n in found.items()) if found else ""


def _in_six(run: RunRows) -> str:
    """That products in float32 would be faster as six of bf16 each (`lib.graph.splitting`), where the CPU multiplies
    matrices of those and products take much of the time; empty elsewhere."""
    is_plain = run.facts.get("precision") == "model" and run.facts.get("multiplies_matrices", False)
    if not is_plain or any(row.operator.endswith(NARROW) for row in run.subgraphs):
        return ""
    total = sum(row.time_s for row in run.subgraphs)
    share = sum(row.time_s for row in run.subgraphs if row.operator in _IN_SIX) / total if total else 0.0
    if share < _MUCH:
        return ""
    told = f"{100 * share:.0f} % of the time are products that this CPU may compute sooner, and as exactly"
    return f"{told}: see --precision bf16x6"


def _onnx_lines(run: RunRows) -> list[str]:
    """What the file itself does, as ONNX or torch means it, where the model came from one."""
    onnx: Mapping[str, Any] | None = run.facts["onnx"]
    if onnx is None:
        return []
    if onnx["failure"]:
        return [f"not compared with its file: {onnx['failure']}"]
    lines = [f"largest difference to {onnx['by']} {onnx['max_error']:.1e} of the largest value"]
    if run.onnxruntime_s:
        found, times = run.facts["latencies_s"]["onnxruntime"], run.onnxruntime_s / run.tuned_s
        told = (
            f"{onnx['by']:14s} {run.onnxruntime_s * 1e3:10.2f} ms  ({spread(found)}), {times:.2f} times the tuned "
            "model's"
        )
        lines.insert(0, told)
    return lines


def spread(latencies_s: Sequence[float]) -> str:
    """How many, and from where to where."""
    return f"median of {len(latencies_s)}, {min(latencies_s) * 1e3:.2f} to {max(latencies_s) * 1e3:.2f}"


def accuracy_table(accuracies: Sequence[Accuracy]) -> str:
    """How well each family's model foretold the candidates of a round before it was trained on them."""
    rows: list[tuple[str, ...]] = [
        ("cost model of", "samples", "foretold", "pairs right", "of", "rank corr.", "top recall")
    ]
    rows += [
        (row.family_id, str(row.n_samples), str(row.n_foretold),
         *(_share(value) for value in (row.pairwise, row.ceiling, row.rank_correlation, row.top_recall)))
        for row in accuracies
    ]  # fmt: skip
    return f"{align(rows)}\nof: what noise leaves to be foretold; pairs that two repeats of a measurement order alike"


def learned(run: RunRows) -> str:
    """What models and memory saved of trials, and of seconds by what a trial of this run took."""
    seconds = f", about {run.n_spared * run.trial_s:,.0f} s" if run.trial_s else ""
    known = f", about {run.n_recalled * run.trial_s:,.0f} s" if run.trial_s and run.n_recalled else ""
    origins = Counter(row.origin for row in run.subgraphs if row.program)
    shipped = f"; of what is shipped: {counted(origins)}" if origins else ""
    return (
        f"saved by what was learned before: {run.n_spared} trials of first looks{seconds}, {run.n_recalled} trials "
        f"recalled{known}{shipped}"
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def time_table(seconds: Mapping[str, float]) -> str:
    """Where the hours went."""
    total = seconds["total"] or 1.0
    rows = [("time", "s", "share")]
    rows += [(kind, f"{value:,.1f}", f"{100 * value / total:.1f} %") for kind, value in seconds.items()]
    own = sum(seconds[kind] for kind in _OWN)
    return align(rows) + f"\nthe pipeline's own ({', '.join(_OWN)}): {100 * own / total:.1f} %"


def summary(night: NightRows) -> str:
    """All of a night."""
    totals = (
        f"{len(night.models)} models, {night.n_rounds} rounds, {night.n_trials} trials, {night.n_recalled} recalled "
        f"from before\nsubgraphs: {night.n_subgraphs} in all, {night.n_different} different ones, {night.n_known} of "
        "them known before"
    )
    header = ("model", "importance", "subgraphs", "trials", "recalled", "first ms", "now ms", "library ms",
              "last page ms", "untuned ms", "ONNX Runtime ms", "error")  # fmt: skip
    table = align([header, *map(_model_line, night.models)])
    how = (
        "first, now: estimates, sums over subgraphs, when all had been tried and at the end; the others are whole "
        "models, timed in turn, but for the last page's, which is of another time"
    )
    return "\n\n".join([totals, f"{table}\n{how}", *(_failure(row) for row in night.models if row.error)])


def _model_line(row: ModelRow) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.importance:g}",
        str(row.n_subgraphs),
        str(row.trials),
        str(row.recalled),
        *(
            milliseconds(seconds)
            for seconds in (
                row.first_s, row.now_s, row.library_s, row.page_before_s, row.untuned_s, row.onnxruntime_s,
            )
        ),
        "see below" if row.error else "-" if row.max_error is None else f"{row.max_error:.1e}",
    )  # fmt: skip


def milliseconds(seconds: float | None) -> str:
    """With two decimals, or three digits below one; `-` where there is no latency."""
    if seconds is None or seconds == math.inf:
        return "-"
    return f"{seconds * 1e3:,.2f}" if seconds >= 1e-3 else f"{seconds * 1e3:.3g}"


def _failure(row: ModelRow) -> str:
    """What failed, and whether a library of before is still there."""
    kept = f"\nIts library of before is kept: {row.kept}" if row.kept else ""
    return f"{row.name}: {row.error}{kept}"
