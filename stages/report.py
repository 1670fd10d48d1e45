"""A run's tables in, a text table and pictures of the tuning curve and of the families out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from lib.contracts import manifest, tables
from lib.contracts.files import CompiledFiles, ModelFiles, RoundFiles, RunFiles
from lib.contracts.schemas import CANDIDATES, FAMILIES, MEASUREMENTS, RESULTS, SUBGRAPHS, TRAINING
from lib.contracts.statuses import Status
from lib.contracts.tables import Provenance
from lib.report import accounting
from lib.report.accounting import Record
from lib.report.text import align
from lib.tir.numerics import VANISHING
from lib.tuning import history
from lib.tuning.history import History
from lib.tuning.members import join


def run(
    model: ModelFiles,
    families: Path,
    past: Sequence[RoundFiles],
    compiled: CompiledFiles,
    title: str,
    *,
    provenance: Provenance,
    out: RunFiles,
) -> Path:
    """Write the report of a compiled run.

    Args:
        title: What was tuned, and for what.
        out: Gets the text, the pictures of the tuning curve and of the families (PNG) and, last, their manifest.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    subgraphs = join(tables.read(model.subgraphs, SUBGRAPHS), tables.read(families, FAMILIES))
    results = tables.read(compiled.results, RESULTS).to_pylist()
    facts = manifest.read(compiled.manifest)
    so_far = history.load(past)
    records = clocks(model, families, past, facts)
    text = "\n\n".join(
        [
            f"{title}\n{_cost(so_far)}; {facts['device']}, {facts['threads']} threads",
            subgraph_table(subgraphs, results, so_far),
            model_lines(facts, so_far),
            accuracy_table(past),
            time_table(records),
        ]
    )
    points = curve_points(past, {s["subgraph_id"]: s["weight"] for s in subgraphs if s["tunable"]}, records)
    from lib.report import drawings  # with Matplotlib, for which commands that draw nothing need not wait

    with tables.written_whole(out.curve) as partial:
        drawings.draw_curve(points, facts["latencies_s"], title, partial)
    with tables.written_whole(out.treemap) as partial:
        drawings.picture_of_families(subgraphs, title).savefig(partial)
    with tables.written_whole(out.report) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
    return manifest.write(out.reported, provenance.inputs, {}, [out.report, out.curve, out.treemap])


def _cost(so_far: History) -> str:
    """What a run measured, and what it knew before."""
    recalled = sum(past.n_recalled for past in so_far.subgraphs.values())
    known = f", {recalled} recalled from earlier runs" if recalled else ""
    return f"{so_far.n_rounds} rounds, {so_far.n_trials} trials{known}"


def shown(files: RunFiles) -> str:
    """A report for the terminal, with where everything lies."""
    places = f"library, parameters and manifest: {files.compiled.folder}\ncurve: {files.curve}"
    return f"{files.report.read_text(encoding='utf-8')}\n{places}\nfamilies: {files.treemap}"


def subgraph_table(
    subgraphs: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], so_far: History
) -> str:
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
                str(past.n_trials - past.n_recalled),
                str(past.n_recalled),
                _failures(past.statuses),
                f"{before * 1e6:,.1f}" if before else "-",
                f"{after * 1e6:,.1f}" if after else "-",
                f"{before / after:.1f}x" if before and after else "-",
                f"{subgraph['flop'] / after / 1e9:,.1f}" if after and subgraph["flop"] else "-",
                result["note"],
            )
        )
    return align(rows)


def model_lines(facts: Mapping[str, Any], so_far: History) -> str:
    """The model as a whole: both latencies with their spread, and what was verified."""
    lines = []
    for name in ("untuned", "tuned"):
        found = facts["latencies_s"][name]
        how = _spread(found)
        if name == "untuned" and facts["untuned_estimated"]:
            how = "estimated from its subgraphs"
        if name == "untuned" and facts["untuned_is_lower_bound"]:
            how = "at least: estimated from those of its subgraphs that could be timed"
        lines.append(f"model {name:8s} {median(found) * 1e3:10.2f} ms  ({how})")
    ratio = median(facts["latencies_s"]["untuned"]) / median(facts["latencies_s"]["tuned"])
    how = "" if facts["untuned_estimated"] else ", timed in turn in one process"
    lines.append(f"speed-up {ratio:.1f}x{how}; shipped: {facts['shipped']}")
    if new := facts["latencies_s"].get("new"):
        lines.append(f"the library of before stays: a new one took {median(new) * 1e3:.2f} ms beside it")
    if facts["largest_output"] < VANISHING:
        lines.append(f"the outputs vanish (the largest is {facts['largest_output']:.0e}): nothing could be compared")
    else:
        lines.append(f"largest difference of the outputs {facts['max_error']:.1e} of their largest value")
    lines += _onnx_lines(facts)
    lines.append(f"failed candidates: {_failures(so_far.failures)}")
    return "\n".join(lines)


def _onnx_lines(facts: Mapping[str, Any]) -> list[str]:
    """What the file itself does, as ONNX means it, where the model came from one."""
    onnx, found = facts["onnx"], facts["latencies_s"].get("onnxruntime")
    if onnx is None:
        return []
    if onnx["failure"]:
        return [f"not compared with the ONNX file: {onnx['failure']}"]
    lines = [f"largest difference to {onnx['by']} {onnx['max_error']:.1e} of the largest value"]
    if found:
        times = median(found) / median(facts["latencies_s"]["tuned"])
        told = (
            f"{onnx['by']:14s} {median(found) * 1e3:10.2f} ms  ({_spread(found)}), {times:.2f} times the tuned model's"
        )
        lines.insert(0, told)
    return lines


def _spread(latencies_s: Sequence[float]) -> str:
    return f"median of {len(latencies_s)}, {min(latencies_s) * 1e3:.2f} to {max(latencies_s) * 1e3:.2f}"


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
    own = sum(seconds[kind] for kind in ("extract", "recall", "worker start", "rest"))
    return align(rows) + f"\nthe pipeline's own (extract, recall, worker start, rest): {100 * own / total:.1f} %"


def clocks(model: ModelFiles, families: Path, past: Sequence[RoundFiles], facts: Mapping[str, Any]) -> list[Record]:
    """The clocks of all stages of a run."""
    found = [("extract", model.subgraphs, SUBGRAPHS), ("cluster", families, FAMILIES)]
    for files in past:
        found.append(("recall" if files.is_recalled else "generate", files.candidates, CANDIDATES))
        if not files.is_recalled:
            found.append(("measure", files.measurements, MEASUREMENTS))
        found.append(("train", files.training, TRAINING))
    stamps = [(stage, tables.stamp(path, schema)) for stage, path, schema in found]
    records = [Record(stamp.session, stage, stamp.clock) for stage, stamp in stamps]
    # The model may have been extracted for an earlier run: that time is not this run's.
    sessions = {record.session for record in records if record.stage == "generate"} | {facts["session"]}
    records = [record for record in records if record.session in sessions]
    return [*records, Record(facts["session"], "compile", facts["clock"])]


def curve_points(past: Sequence[RoundFiles], weights: Mapping[str, int], records: Sequence[Record]) -> pa.Table:
    """Columns `seconds`, `trials` and `latency_s`: the model's estimated latency after each measurement of the run.

    Starts when every subgraph has a program that works; with what was recalled, if that is of all.
    """
    best: dict[str, float] = {}
    moments: list[float] = []
    trials: list[int] = []
    latencies: list[float] = []
    n = 0

    def add(moment: float) -> None:
        moments.append(moment)
        trials.append(n)
        latencies.append(sum(weight * best[subgraph_id] for subgraph_id, weight in weights.items()))

    for files in past:
        rows = tables.read(files.measurements, MEASUREMENTS).select(["subgraph_id", "latencies", "measured_at"])
        for row in sorted(rows.to_pylist(), key=lambda row: row["measured_at"]):
            n += not files.is_recalled
            if row["latencies"] and row["subgraph_id"] in weights:
                latency = median(row["latencies"])
                best[row["subgraph_id"]] = min(latency, best.get(row["subgraph_id"], latency))
            if len(best) == len(weights) and not files.is_recalled:
                add(row["measured_at"])
        if files.is_recalled and len(best) == len(weights):
            add(min(record.clock["started"] for record in records))
    seconds = accounting.active_seconds(records, moments)
    return pa.table({"seconds": pa.array(seconds, pa.float64()), "trials": pa.array(trials, pa.int64()),
                     "latency_s": pa.array(latencies, pa.float64())})  # fmt: skip


def _failures(statuses: Counter[str]) -> str:
    kinds = [f"{count} {status}" for status, count in sorted(statuses.items()) if status != Status.OK and count]
    return ", ".join(kinds) or "0"


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f}" if values else "-"
