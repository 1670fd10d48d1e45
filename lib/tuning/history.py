"""What a run has measured so far, folded round by round: all that planning and search look back on."""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lib.contracts import digests, tables
from lib.contracts.conditions import Conditions, require_equal
from lib.contracts.files import RoundFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, N_FEATURES, PLAN, TRAINING
from lib.contracts.statuses import Status

FORETOLD = "foretold"  # kind of a plan's row: nothing of it is measured
REFIT = "refit"  # kind of a plan's row: programs with a given packing of weights
EXHAUSTED = "exhausted"  # kind of a plan's row: recalled, and the search has no more of it
_LEAST_FILL = 0.25  # below it the space of a subgraph counts as exhausted
_KEPT_PARENTS = 64  # fastest programs of a subgraph that a search may start from


@dataclass(frozen=True, slots=True)
class TimedCandidate:
    """A candidate that works, with its median latency; ordered by it."""

    latency_s: float
    candidate_id: str
    trace: str


@dataclass(frozen=True, slots=True)
class Foretold:
    """A candidate that was never measured."""

    candidate_id: str
    trace: str
    origin: str


@dataclass(slots=True)
class SubgraphHistory:
    """One subgraph's past."""

    n_trials: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    best_after: list[float] = field(default_factory=list)  # s, after each of its rounds; inf while nothing works
    trials_after: list[int] = field(default_factory=list)  # counted with `best_after`
    fill: float = 1.0  # of its last round: candidates found / asked for
    known: set[str] = field(default_factory=set)  # of all that was measured: hashes of programs, and digests of traces
    fastest: list[TimedCandidate] = field(default_factory=list)  # the best few, fastest first
    foretold: list[Foretold] = field(default_factory=list)  # the best by score, when nothing was measured
    untuned_s: float | None = None
    n_recalled: int = 0  # of its trials, those of earlier runs
    n_refits: int = 0  # rounds that asked for programs with a given packing of weights

    @property
    def is_exhausted(self) -> bool:
        """Whether a search finds hardly any more."""
        return self.fill < _LEAST_FILL

    @property
    def was_tried(self) -> bool:
        """Whether a round asked for it, or something of it was recalled; nothing may have been found."""
        return bool(self.best_after)

    @property
    def unmeasured(self) -> list[Foretold]:
        """What was foretold and not measured since: the best by score first."""
        return [each for each in self.foretold if digests.of_trace(each.trace) not in self.known]

    @property
    def best_s(self) -> float:
        """Lowest median latency; infinity while nothing works."""
        return self.best_after[-1] if self.best_after else float("inf")


@dataclass(slots=True)
class History:
    """All rounds of a run so far, by subgraph; and what it recalled, which counts as none."""

    subgraphs: dict[str, SubgraphHistory] = field(default_factory=dict)
    n_rounds: int = 0
    n_trials: int = 0
    last_kind: str = ""
    last_subgraph: str = ""
    last_family: str = ""
    conditions: Conditions | None = None  # under which all of it was measured; none yet if nothing was
    failures: Counter[str] = field(default_factory=Counter)  # trials by status, but for those that worked
    measured_s: float = 0.0  # what builds and runs of all of them took, those of earlier runs included

    def of(self, subgraph_id: str) -> SubgraphHistory:
        """A subgraph's past; empty if it has none."""
        return self.subgraphs.get(subgraph_id) or SubgraphHistory()

    def add_round(
        self, plan: pa.Table, candidates: pa.Table, measurements: pa.Table, *, is_recalled: bool = False
    ) -> None:
        """Take in a finished round, or what was recalled: rows of PLAN, CANDIDATES and MEASUREMENTS."""
        found = Counter(candidates["subgraph_id"].to_pylist())
        if FORETOLD in plan["kind"].to_pylist():
            for row in candidates.select(["subgraph_id", "candidate_id", "trace", "origin"]).to_pylist():
                past = self.subgraphs.setdefault(row.pop("subgraph_id"), SubgraphHistory())
                past.foretold.append(Foretold(**row))
            return
        by_id = {row["candidate_id"]: row for row in candidates.drop_columns(["features"]).to_pylist()}
        self.measured_s += sum(pc.sum(measurements[column]).as_py() or 0.0 for column in ("build_s", "run_s"))
        for row in measurements.select(["candidate_id", "subgraph_id", "status", "latencies"]).to_pylist():
            self._add_measurement(by_id[row["candidate_id"]], row["status"], row["latencies"])
            if not is_recalled:
                self.n_trials += 1
                self.failures.update([row["status"]] if row["status"] != Status.OK else [])
        for row in plan.to_pylist():
            past = self.subgraphs.setdefault(row["subgraph_id"], SubgraphHistory())
            past.best_after.append(past.fastest[0].latency_s if past.fastest else float("inf"))
            past.trials_after.append(past.n_trials)
            past.n_recalled += past.n_trials if is_recalled else 0
            if row["kind"] == REFIT:  # says nothing of how much else there is
                past.n_refits += 1
            else:
                past.fill = 0.0 if row["kind"] == EXHAUSTED else _fill(row, found)
            self.last_kind, self.last_subgraph, self.last_family = (
                row["kind"],
                row["subgraph_id"],
                row["family_id"],
            )
        self.n_rounds += not is_recalled

    def _add_measurement(self, candidate: Mapping[str, str], status: str, latencies: Sequence[float]) -> None:
        past = self.subgraphs.setdefault(candidate["subgraph_id"], SubgraphHistory())
        past.n_trials += 1
        past.statuses[status] += 1
        past.known |= {candidate["program_hash"], digests.of_trace(candidate["trace"])}
        if status != Status.OK:
            return
        latency_s = median(latencies)
        if candidate["origin"] == "untuned":
            past.untuned_s = latency_s
        timed = TimedCandidate(latency_s, candidate["candidate_id"], candidate["trace"])
        fastest = heapq.merge(past.fastest, [timed], key=lambda p: (p.latency_s, p.candidate_id))
        past.fastest = list(fastest)[:_KEPT_PARENTS]


def exhausted(plan: pa.Table, candidates: pa.Table) -> list[str]:
    """The subgraphs of which a round's search found hardly any of the candidates that it was to find."""
    found = Counter(candidates["subgraph_id"].to_pylist())
    asked = [row for row in plan.to_pylist() if row["kind"] != REFIT]
    return [row["subgraph_id"] for row in asked if _fill(row, found) < _LEAST_FILL]


def _fill(row: Mapping[str, Any], found: Mapping[str, int]) -> float:
    """How many of the candidates that a row of a plan asks for were found, as a share.

    Args:
        found: A count by subgraph; 0 for those of which nothing was.
    """
    return found[row["subgraph_id"]] / max(1, int(row["num_trials"]))


def model_latency_s(history: History, weights: Mapping[str, float]) -> float:
    """Estimated latency of the model, in seconds: the best of each subgraph times how often it is called."""
    return sum(weight * history.of(subgraph_id).best_s for subgraph_id, weight in weights.items())


def modelled(rounds: Sequence[RoundFiles]) -> set[str]:
    """The families that have a model after these rounds.

    Raises:
        MissingInput, ContractError: The last TRAINING table is not there, or not what it should be.
    """
    trained = tables.read(rounds[-1].training, TRAINING).select(["family_id", "model"]).to_pylist() if rounds else []
    return {row["family_id"] for row in trained if row["model"]}


@dataclass(frozen=True, slots=True)
class RoundSamples:
    """What one round taught, ready for training; failures have NaN for a latency."""

    families: np.ndarray  # family_id of each program
    subgraphs: np.ndarray  # subgraph_id of each program
    latencies_s: np.ndarray
    repeats_s: np.ndarray  # n x 2: the first and the last latency of each; NaN where there is only one
    scores: np.ndarray  # as predicted before; NaN if there was no model
    features: np.ndarray  # n x N_FEATURES
    conditions: frozenset[Conditions]  # under which they were measured


def load(rounds: Sequence[RoundFiles]) -> History:
    """Fold finished rounds. A process that folded the first of them before only reads the new ones.

    The result is extended in place by the next call for the same run.

    Raises:
        MissingInput, ContractError: A table of one of the rounds is not there, or not what it should be, or was
            measured under other conditions than the rounds before.
    """
    if not rounds:
        return History()
    states = [_state(files) for files in rounds]
    known, history = _folds.pop(rounds[0].run, ([], History()))  # put back when the fold is whole again
    if states[: len(known)] != known:
        known, history = [], History()
    for files in rounds[len(known) :]:
        measurements = tables.read(files.measurements, MEASUREMENTS)
        history.conditions = require_equal(_conditions(measurements), history.conditions, files.measurements)
        plan, candidates = tables.read(files.plan, PLAN), tables.read(files.candidates, CANDIDATES)
        history.add_round(plan, candidates, measurements, is_recalled=not files.is_round)
    _folds[rounds[0].run] = (states, history)
    return history


_folds: dict[Path, tuple[list[tuple[str, ...]], History]] = {}  # by run: what was folded, and the result


def samples(files: RoundFiles) -> RoundSamples:
    """One round as training data; read once for one state of its files."""
    return _samples(files, _state(files))


@lru_cache(maxsize=4096)
def _samples(files: RoundFiles, _current: tuple[str, ...]) -> RoundSamples:
    candidates = tables.read(files.candidates, CANDIDATES)
    measurements = tables.read(files.measurements, MEASUREMENTS)
    rows = measurements.select(["candidate_id", "status", "latencies"]).to_pylist()
    latency = {
        row["candidate_id"]: latency_s
        for row, latency_s in zip(rows, latencies_s(measurements), strict=True)
        if row["status"] != Status.MISS  # of which nothing is known, neither that it fails
    }
    ends = {
        row["candidate_id"]: (row["latencies"][0], row["latencies"][-1])
        if len(row["latencies"]) > 1
        else (np.nan, np.nan)
        for row in rows
    }
    measured = pa.array([key in latency for key in candidates["candidate_id"].to_pylist()], pa.bool_())
    described = pc.greater(pc.list_value_length(candidates["features"]), 0)  # of old ones only the program is recalled
    candidates = candidates.filter(pc.and_(measured, described)).combine_chunks()
    return RoundSamples(
        families=np.array(candidates["family_id"].to_pylist(), dtype=str),
        subgraphs=np.array(candidates["subgraph_id"].to_pylist(), dtype=str),
        repeats_s=np.array([ends[key] for key in candidates["candidate_id"].to_pylist()], np.float64).reshape(-1, 2),
        latencies_s=np.array([latency[key] for key in candidates["candidate_id"].to_pylist()], dtype=np.float64),
        scores=candidates["score"].to_numpy().astype(np.float32),
        features=matrix(candidates["features"]),
        conditions=frozenset(_conditions(measurements)),
    )


def latencies_s(measurements: pa.Table) -> list[float]:
    """The median latency of each row of a MEASUREMENTS table, in seconds; NaN for what failed."""
    rows = zip(measurements["status"].to_pylist(), measurements["latencies"].to_pylist(), strict=True)
    return [median(latencies) if status == Status.OK else np.nan for status, latencies in rows]


def _conditions(measurements: pa.Table) -> list[Conditions]:
    """The different ones of a MEASUREMENTS table."""
    rows = pa.Table.from_struct_array(measurements["conditions"])
    return [Conditions.of(row) for row in rows.group_by(rows.column_names).aggregate([]).to_pylist()]


def matrix(column: pa.ChunkedArray) -> np.ndarray:
    """A column of lists as the rows of one matrix, NaN after their ends."""
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    found = np.full((len(array), N_FEATURES), np.nan, np.float32)
    found[np.arange(N_FEATURES) < lengths[:, None]] = array.flatten().to_numpy(zero_copy_only=False)
    return found


def _state(files: RoundFiles) -> tuple[str, ...]:
    """Changes when a table of the round does."""
    return (
        str(files.folder),
        tables.stamp(files.plan, PLAN).content,
        tables.stamp(files.candidates, CANDIDATES).content,
        tables.stamp(files.measurements, MEASUREMENTS).content,
    )
