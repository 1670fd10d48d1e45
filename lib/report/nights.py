"""What came of several models that were tuned together, as rows: for a text and a page."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lib.contracts import manifest, tables
from lib.contracts.errors import TunerError
from lib.contracts.files import ModelFiles, RoundFiles, RunFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, MODELS, PLAN, SUBGRAPHS, TRAINING
from lib.report import accounting
from lib.report.rows import Facts, Failure, clocks, failures
from lib.tuning import history, planning
from lib.tuning.history import History
from lib.tuning.members import first_latency_s, latency_s
from lib.tuning.planning import Member, PlanConfig

_PROSPECTS = 8  # subgraphs of which it is told what more time may save


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one model: why it has no library, or empty; and where its files lie, if it could be imported."""

    error: str
    model: ModelFiles | None = None
    run: RunFiles | None = None


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model; latencies are of whole compiled models, but for the estimates."""

    name: str
    importance: float
    error: str  # empty if it has a library of this night
    kept: str  # folder of the library of before, where there is an error
    n_subgraphs: int  # tunable ones
    trials: int  # new ones; what models share counts for each
    recalled: int
    first_s: float  # estimate when all its subgraphs had been tried; infinity if they were not
    now_s: float
    library_s: float | None
    untuned_s: float | None
    onnxruntime_s: float | None
    max_error: float | None
    page_before_s: float | None  # its library when a page told of it last
    seconds: float  # of tuning: its part of what its subgraphs took
    page: Path | None

    @property
    def reused(self) -> float:
        """Share of its measurements that were known before."""
        return self.recalled / max(1, self.recalled + self.trials)


@dataclass(frozen=True, slots=True)
class Prospect:
    """A subgraph that more trials may make faster."""

    name: str
    models: tuple[str, ...]
    share: float  # of what is to be minimised, the weighted mean of relative latencies
    promise: float  # what the next round may save, by Ansor's gradient; a share as well
    trials: int  # so far, recalled ones included


@dataclass(frozen=True, slots=True)
class NightRows:
    """All of a night."""

    title: str
    models: tuple[ModelRow, ...]
    n_rounds: int
    n_trials: int
    n_recalled: int  # of the subgraphs that are tuned
    n_subgraphs: int  # tunable ones, of each model
    n_different: int
    n_known: int  # of which something was known before
    failures: tuple[Failure, ...]
    prospects: tuple[Prospect, ...]
    seconds: Mapping[str, float]


def collect(
    title: str,
    joint: ModelFiles,
    families: Path,
    members: Sequence[Member],
    past: Sequence[RoundFiles],
    outcomes: Mapping[str, Outcome],
    config: PlanConfig,
    earlier: Sequence[Path],
) -> NightRows:
    """Read them.

    Args:
        joint: Has the MODELS table and the SUBGRAPHS of all; `families`: their FAMILIES.
        past: What was recalled, and the finished rounds.
        outcomes: Of each model, by name.
        earlier: Records (see `record`) of pages before.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    rows, so_far = tables.read(joint.models, MODELS).to_pylist(), history.load(past)
    facts = {name: _facts(outcome) for name, outcome in outcomes.items()}
    subgraphs = tables.read(joint.subgraphs, SUBGRAPHS).select(["subgraph_id", "name"]).to_pylist()
    names = {row["subgraph_id"]: row["name"] for row in subgraphs}
    counts = Counter(subgraph_id for row in rows for subgraph_id in row["subgraphs"])
    spent = _seconds_of(past, counts)
    extracted = [joint.subgraphs, *(o.model.subgraphs for o in outcomes.values() if o.model)]
    records = clocks(extracted, families, past, [found for found in facts.values() if found])
    before = _before(earlier)
    return NightRows(
        title=title,
        models=tuple(_model_row(row, outcomes[row["name"]], facts[row["name"]], so_far, spent, before) for row in rows),
        n_rounds=so_far.n_rounds,
        n_trials=so_far.n_trials,
        n_recalled=sum(so_far.of(subgraph_id).n_recalled for subgraph_id in counts),
        n_subgraphs=counts.total(),
        n_different=len(counts),
        n_known=sum(so_far.of(subgraph_id).n_recalled > 0 for subgraph_id in counts),
        failures=tuple(failures(past, names)),
        prospects=tuple(_prospects(members, names, rows, so_far, config)),
        seconds=accounting.spent(records),
    )


def record(night: NightRows, written_at: float) -> dict[str, Any]:
    """What a later page needs of this one.

    Args:
        written_at: Unix time.
    """
    return {"written_at": written_at, "models": {row.name: row.library_s for row in night.models if row.library_s}}


def _before(earlier: Sequence[Path]) -> dict[str, float]:
    """Latency of each model's library when a page told of it last; pages that cannot be read tell nothing."""
    found: dict[str, tuple[float, float]] = {}
    for path in earlier:
        try:
            facts = manifest.read(path)
        except TunerError:
            continue
        for name, seconds in facts["models"].items():
            found[name] = max(found.get(name, (0.0, 0.0)), (facts["written_at"], seconds))
    return {name: seconds for name, (_, seconds) in found.items()}


def _facts(outcome: Outcome) -> Facts:
    """Of the library that is there; empty if there is none."""
    if outcome.run is None or not outcome.run.compiled.manifest.exists():
        return {}
    return manifest.read(outcome.run.compiled.manifest)


def _model_row(
    row: Mapping[str, Any],
    outcome: Outcome,
    facts: Facts,
    so_far: History,
    spent: Mapping[str, float],
    before: Mapping[str, float],
) -> ModelRow:
    past = [so_far.of(subgraph_id) for subgraph_id in row["subgraphs"]]
    recalled = sum(each.n_recalled for each in past)
    found = facts.get("latencies_s", {})
    shipped = "untuned" if facts.get("shipped") == "untuned" else "tuned"
    page = outcome.run.page if outcome.run and outcome.run.page.exists() else None
    return ModelRow(
        name=row["name"],
        importance=row["importance"],
        error=outcome.error,
        kept=str(outcome.run.compiled.folder) if outcome.error and outcome.run and facts else "",
        n_subgraphs=len(past),
        trials=sum(each.n_trials for each in past) - recalled,
        recalled=recalled,
        first_s=first_latency_s(row, so_far) if past and all(each.was_tried for each in past) else math.inf,
        now_s=latency_s(row, so_far) if past else math.inf,
        library_s=_median(found.get(shipped)),
        untuned_s=_median(found.get("untuned")),
        onnxruntime_s=_median(found.get("onnxruntime")),
        max_error=facts.get("max_error"),
        page_before_s=before.get(row["name"]),
        seconds=sum(spent.get(subgraph_id, 0.0) for subgraph_id in row["subgraphs"]),
        page=page,
    )


def _median(latencies_s: Sequence[float] | None) -> float | None:
    return median(latencies_s) if latencies_s else None


def _seconds_of(past: Sequence[RoundFiles], counts: Mapping[str, int]) -> dict[str, float]:
    """Seconds of tuning of each subgraph: those of a round by what was asked for; for each of the models that have it.

    Args:
        counts: In how many models a subgraph is.
    """
    found: Counter[str] = Counter()
    for files in past:
        if not files.is_round:
            continue
        plan = tables.read(files.plan, PLAN).to_pylist()
        asked = sum(row["num_trials"] for row in plan) or 1
        parts = ((files.candidates, CANDIDATES), (files.measurements, MEASUREMENTS), (files.training, TRAINING))
        seconds = sum(tables.stamp(path, schema).clock["total"] for path, schema in parts)
        for row in plan:
            found[row["subgraph_id"]] += seconds * row["num_trials"] / asked
    return {subgraph_id: seconds / max(1, counts[subgraph_id]) for subgraph_id, seconds in found.items()}


def _prospects(
    members: Sequence[Member],
    names: Mapping[str, str],
    models: Sequence[Mapping[str, Any]],
    so_far: History,
    config: PlanConfig,
) -> list[Prospect]:
    """The most promising first; none if none is left that can improve."""
    costs = {m.subgraph_id: m.weight * so_far.of(m.subgraph_id).best_s for m in members}
    total = sum(cost for cost in costs.values() if cost < math.inf)
    promises = {m.subgraph_id: planning.promise(so_far.of(m.subgraph_id), m.weight, config)
                for m in members if not planning.dead(so_far.of(m.subgraph_id), config)}  # fmt: skip
    ranked = sorted((key for key, promise in promises.items() if promise > 0), key=lambda key: -promises[key])
    return [
        Prospect(
            names[key].split("/")[-1],
            tuple(row["name"] for row in models if key in row["subgraphs"]),
            costs[key] / total,
            promises[key] / total,
            so_far.of(key).n_trials,
        )
        for key in ranked[:_PROSPECTS]
    ]
