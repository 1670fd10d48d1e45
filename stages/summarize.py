"""What came of several models that were tuned together, as a table."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lib.contracts import manifest, tables
from lib.contracts.files import CompiledFiles, RoundFiles
from lib.contracts.schemas import MODELS
from lib.report.text import align
from lib.tuning import history
from lib.tuning.history import History
from lib.tuning.members import first_latency_s, latency_s

Outcome = tuple[str, CompiledFiles | None]  # why a model has no library, or empty; and where it lies, if it has one


def run(models: Path, past: Sequence[RoundFiles], outcomes: Mapping[str, Outcome], *, out: Path) -> Path:
    """Write the summary of a night.

    Args:
        models: A MODELS table.
        past: What was recalled, and the finished rounds.
        outcomes: Of each model, by name.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    rows = tables.read(models, MODELS).to_pylist()
    so_far = history.load(past)
    text = "\n\n".join([_totals(rows, so_far), _table(rows, outcomes, so_far), *_failures(outcomes)])
    with tables.written_whole(out) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
    return out


def failed(outcomes: Mapping[str, Outcome]) -> str:
    """Which models failed, in a line; empty if none did."""
    names = [name for name, (error, _) in outcomes.items() if error]
    return f"{len(names)} of {len(outcomes)} models failed: {', '.join(names)}" if names else ""


def _totals(rows: Sequence[Mapping[str, Any]], so_far: History) -> str:
    """What was measured, and what sharing saved."""
    counts = Counter(subgraph_id for row in rows for subgraph_id in row["subgraphs"])
    known = sum(so_far.of(subgraph_id).n_recalled > 0 for subgraph_id in counts)
    recalled = sum(so_far.of(subgraph_id).n_recalled for subgraph_id in counts)
    return (
        f"{len(rows)} models, {so_far.n_rounds} rounds, {so_far.n_trials} trials, {recalled} recalled from before\n"
        f"subgraphs: {counts.total()} in all, {len(counts)} different ones, {known} of them known before"
    )


def _table(rows: Sequence[Mapping[str, Any]], outcomes: Mapping[str, Outcome], so_far: History) -> str:
    """A line for each model."""
    lines = [("model", "importance", "subgraphs", "trials", "recalled", "first ms", "now ms", "library ms",
              "untuned ms", "ONNX Runtime ms", "error")]  # fmt: skip
    for row in rows:
        error, compiled = outcomes[row["name"]]
        facts = manifest.read(compiled.manifest) if compiled and compiled.manifest.exists() else {}
        past = [so_far.of(subgraph_id) for subgraph_id in row["subgraphs"]]
        recalled = sum(each.n_recalled for each in past)
        lines.append((
            row["name"], f"{row['importance']:g}", str(len(past)), str(sum(each.n_trials for each in past) - recalled),
            str(recalled), _ms(first_latency_s(row, so_far) if past else math.inf),
            _ms(latency_s(row, so_far) if past else math.inf), *_latencies(facts),
            "see below" if error else _error(facts),
        ))  # fmt: skip
    return (
        f"{align(lines)}\nfirst, now: estimates, sums over subgraphs, when all had been tried and at the end; the "
        "others are whole models, timed in turn"
    )


def _latencies(facts: Mapping[str, Any]) -> list[str]:
    """Columns of a model's own latencies."""
    found = facts.get("latencies_s", {})
    shipped = "untuned" if facts.get("shipped") == "untuned" else "tuned"
    return [_ms(median(found[name])) if found.get(name) else "-" for name in (shipped, "untuned", "onnxruntime")]


def _error(facts: Mapping[str, Any]) -> str:
    return f"{facts['max_error']:.1e}" if facts else "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}" if seconds < math.inf else "-"


def _failures(outcomes: Mapping[str, Outcome]) -> list[str]:
    """What failed, and whether a library of before is still there."""
    told = []
    for name, (error, compiled) in outcomes.items():
        if error:
            kept = (
                f"\nIts library of before is kept: {compiled.folder}" if compiled and compiled.manifest.exists() else ""
            )
            told.append(f"{name}: {error}{kept}")
    return told
