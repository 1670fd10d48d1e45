"""What the tables of a run say, as rows: of the model, of each subgraph, of cost models, failures and seconds.

Texts and pages are rendered from the same ones.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tvm

from lib.contracts import manifest, tables
from lib.contracts.conditions import Conditions
from lib.contracts.files import CompiledFiles, ModelFiles, RoundFiles
from lib.contracts.schemas import CANDIDATES, FAMILIES, MEASUREMENTS, PLAN, RESULTS, SUBGRAPHS, TRAINING
from lib.contracts.statuses import Status
from lib.report import accounting
from lib.report.accounting import Record
from lib.tir import analysis, traces
from lib.tir.outline import outline
from lib.tir.workload import load_module
from lib.tuning import history
from lib.tuning.history import FORETOLD, History, SubgraphHistory, TimedCandidate
from lib.tuning.members import join

_BEST = 5  # candidates of a subgraph that are listed
_OF_TRIALS = ("search", "build", "run", "train")  # kinds of seconds
# Share of the time of measuring. On two cores of a Zen 5 it is below 0.01 while nothing else runs, and 0.35 to 0.45
# beside one busy process or several.
_COMPANY = 0.05
_ERROR_LENGTH = 400  # characters of an error message that are kept

Facts = Mapping[str, Any]  # a manifest's


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the fastest of a subgraph."""

    candidate_id: str
    latency_s: float  # when it was measured in its round
    origin: str  # memory, imported, sampled, evolved, adapted; foretold if never measured; or untuned
    space: str
    round: int
    score: float | None  # as its family's model foretold it


@dataclass(frozen=True, slots=True)
class Program:
    """A scheduled program, for people."""

    tile: str  # of registers, see `lib.tir.outline`
    loops: tuple[str, ...]
    schedule: str  # the primitives, as Python


@dataclass(frozen=True, slots=True)
class SubgraphRow:
    """Where a subgraph stood, where it stands, and what that took."""

    subgraph_id: str
    name: str
    family_id: str  # empty if it is not tunable
    operator: str
    calls: int
    flop: float  # a call
    moved_bytes: int  # a call: parameters and results, each once
    trials: int
    recalled: int
    statuses: Counter[str]  # of both
    untuned_s: float | None
    tuned_s: float | None
    max_error: float | None
    note: str
    origin: str  # of what is shipped, as in `Candidate`
    donor: str  # whose trace was adapted, if that was: its name, or the id of what is known from other models
    program: Program | None  # None: untuned
    best: tuple[Candidate, ...]

    @property
    def source(self) -> str:
        """Where what is shipped is from, with the donor if it has one."""
        return f"{self.origin} from {self.donor}" if self.donor else self.origin

    @property
    def time_s(self) -> float:
        """Of an inference."""
        return self.calls * (self.tuned_s or 0.0)

    @property
    def flops(self) -> float | None:
        """FLOP/s; None where nothing is computed, or it was not timed."""
        return self.flop / self.tuned_s if self.tuned_s and self.flop else None

    @property
    def failures(self) -> Counter[str]:
        """Trials by status, but for those that worked."""
        return Counter({status: n for status, n in self.statuses.items() if status != Status.OK})


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How well a family's model foretold the candidates of rounds before it was trained on them."""

    family_id: str
    n_samples: int
    n_foretold: int
    pairwise: float | None  # means over rounds
    ceiling: float | None  # that noise sets: how many of the pairs two repeats order alike
    rank_correlation: float | None
    top_recall: float | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Candidates that failed in one way."""

    status: str
    count: int
    subgraphs: tuple[str, ...]  # names
    example: str  # what was told of one


@dataclass(frozen=True, slots=True)
class RunRows:
    """A compiled run."""

    title: str
    facts: Facts
    n_rounds: int
    n_trials: int
    n_recalled: int
    n_spared: int  # trials of first looks that models made needless
    conditions: Conditions | None
    dtypes: tuple[str, ...]  # that its subgraphs compute in
    subgraphs: tuple[SubgraphRow, ...]
    accuracies: tuple[Accuracy, ...]
    failures: tuple[Failure, ...]
    seconds: Mapping[str, float]  # by kind, with `total`
    waited: float  # share of the time of measuring, see `accounting.waited`
    curve: pa.Table  # see `curve_points`

    @property
    def company(self) -> str:
        """What to say of other work on the machine; empty if there was hardly any."""
        if self.waited < _COMPANY:
            return ""
        return (
            f"Candidates had no core in {100 * self.waited:.0f} % of the time in which they were timed, since other "
            "work ran beside them: on an idle machine a faster library may be found."
        )

    @property
    def trial_s(self) -> float:
        """Seconds of a trial, all stages of a round together; 0 where there was none."""
        return sum(self.seconds.get(kind, 0.0) for kind in _OF_TRIALS) / self.n_trials if self.n_trials else 0.0

    @property
    def tuned_s(self) -> float:
        """Latency of what is shipped; NaN if it never ran: see `never_ran`."""
        found = self.facts["latencies_s"]["untuned" if self.facts["shipped"] == "untuned" else "tuned"]
        return median(found) if found else math.nan

    @property
    def never_ran(self) -> str:
        """Of a library that was compiled for another CPU, with no device of that: what was done instead; else empty."""
        if self.facts.get("ran", True):
            return ""
        told = (
            f"compiled for {self.facts['target'].get('mtriple', 'another CPU')}, on which it never ran: nothing was "
            "timed, and what was verified are the same programs, compiled for this machine "
            f"({self.facts['verified_on']})"
        )
        if emulated := self.facts.get("emulated"):
            told += (
                f", and the library itself by {emulated['by']}, with outputs that differ by {emulated['max_error']:.1e}"
            )
        return told

    @property
    def untuned_s(self) -> float | None:
        """None if nothing of it was timed, as without trials."""
        found = self.facts["latencies_s"]["untuned"]
        return median(found) if found else None

    @property
    def onnxruntime_s(self) -> float | None:
        """None if the model came from no ONNX file, or could not be timed there."""
        found = self.facts["latencies_s"].get("onnxruntime")
        return median(found) if found else None

    @property
    def rest(self) -> str:
        """What of the file is not in the library but left to ONNX Runtime, in words; empty if nothing is."""
        return str(self.facts.get("rest", {}).get("told", ""))

    @property
    def is_compared_with_file(self) -> bool:
        """Whether the library's outputs were compared with those of its ONNX file itself."""
        onnx = self.facts["onnx"]
        return bool(onnx and onnx["by"] and self.facts.get("compared_with") == onnx["by"])


def collect(
    model: ModelFiles, families: Path, past: Sequence[RoundFiles], compiled: CompiledFiles, title: str
) -> RunRows:
    """Read them.

    Args:
        families: A FAMILIES table.
        past: What was recalled, and the finished rounds.
        title: What was tuned, and for what.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    subgraphs = join(tables.read(model.subgraphs, SUBGRAPHS), tables.read(families, FAMILIES))
    facts, so_far = manifest.read(compiled.manifest), history.load(past)
    names = {row["subgraph_id"]: row["name"] for row in subgraphs}
    records = clocks([model.subgraphs], families, past, [facts])
    weights = {row["subgraph_id"]: row["weight"] for row in subgraphs if row["tunable"]}
    workloads = {row["subgraph_id"]: load_module(row["workload"])["main"] for row in subgraphs}
    return RunRows(
        title=title,
        facts=facts,
        n_rounds=so_far.n_rounds,
        n_trials=so_far.n_trials,
        n_recalled=sum(each.n_recalled for each in so_far.subgraphs.values()),
        n_spared=n_spared(past),
        conditions=so_far.conditions,
        dtypes=tuple(sorted({dtype for main in workloads.values() for dtype in _dtypes(main)})),
        subgraphs=tuple(_subgraph_rows(subgraphs, workloads, compiled, so_far, past)),
        accuracies=tuple(accuracies(past)),
        failures=tuple(failures(past, names)),
        seconds=accounting.spent(records),
        waited=accounting.waited(records),
        curve=curve_points(past, weights, records),
    )


def _subgraph_rows(
    subgraphs: Sequence[Mapping[str, Any]],
    workloads: Mapping[str, Any],
    compiled: CompiledFiles,
    so_far: History,
    past: Sequence[RoundFiles],
) -> list[SubgraphRow]:
    results = tables.read(compiled.results, RESULTS).to_pylist()
    fastest = {row["subgraph_id"]: so_far.of(row["subgraph_id"]).fastest for row in subgraphs}
    listed = {each.candidate_id for found in fastest.values() for each in found[:_BEST]}
    made = _made({*listed, *(result["candidate_id"] for result in results)}, past)
    names = {row["subgraph_id"]: row["name"] for row in subgraphs}
    return [
        _subgraph_row(
            subgraph, result, workloads[subgraph["subgraph_id"]], so_far.of(subgraph["subgraph_id"]), made, names
        )
        for subgraph, result in zip(subgraphs, results, strict=True)
    ]


def _subgraph_row(
    subgraph: Mapping[str, Any],
    result: Mapping[str, Any],
    main: Any,
    past: SubgraphHistory,
    made: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, str],
) -> SubgraphRow:
    shipped = made.get(result["candidate_id"])
    return SubgraphRow(
        subgraph_id=subgraph["subgraph_id"],
        name=subgraph["name"],
        family_id=result["family_id"],
        operator=subgraph["core_operator"],
        calls=subgraph["weight"],
        flop=subgraph["flop"],
        moved_bytes=moved_bytes(main),
        trials=past.n_trials - past.n_recalled,
        recalled=past.n_recalled,
        statuses=past.statuses,
        untuned_s=result["untuned_s"],
        tuned_s=result["tuned_s"],
        max_error=result["max_error"],
        note=result["note"],
        origin=shipped["origin"] if shipped else "untuned",
        donor=names.get(shipped["donor"], shipped["donor"]) if shipped else "",
        program=_program(main, shipped["trace"]) if shipped else None,
        best=tuple(_candidate(each, made[each.candidate_id]) for each in past.fastest[:_BEST]),
    )


def n_spared(past: Sequence[RoundFiles]) -> int:
    """How many trials first looks did without, since models told enough."""
    return sum(sum(tables.read(files.plan, PLAN)["num_spared"].to_pylist()) for files in past)


def _made(wanted: Collection[str | None], past: Sequence[RoundFiles]) -> dict[str, dict[str, Any]]:
    """Columns of some candidates, by id, with the number of their round; what was recalled is of the memory."""
    columns = ["candidate_id", "origin", "space", "score", "trace", "donor"]
    found: dict[str, dict[str, Any]] = {}
    values = pa.array([key for key in wanted if key], pa.string())
    for files in past:
        rows = tables.read(files.candidates, CANDIDATES).select(columns)
        for row in rows.filter(pc.is_in(rows["candidate_id"], values)).to_pylist():
            is_of_memory = files.is_recalled and row["origin"] != "untuned"
            origin = "memory" if is_of_memory else row["origin"]
            origin = FORETOLD if files.is_foretold and origin == "evolved" else origin
            found[row["candidate_id"]] = {**row, "origin": origin, "round": files.number}
    return found


def _candidate(timed: TimedCandidate, made: Mapping[str, Any]) -> Candidate:
    return Candidate(
        timed.candidate_id, timed.latency_s, made["origin"], made["space"], made["round"], made["score"]
    )  # fmt: skip


def _program(main: Any, trace: str) -> Program:
    """What a trace makes of a workload; a reason in its place where this TVM cannot replay it."""
    try:
        schedule = traces.apply(tvm.IRModule({"main": main}), trace)
    except Exception as error:  # TVM's own, of many kinds
        return Program("", (f"cannot be shown: {str(error).splitlines()[-1]}",), "")
    found = outline(schedule.mod)
    return Program(found.tile, found.lines, "\n".join(map(str, schedule.trace.as_python())))


def moved_bytes(main: Any) -> int:
    """Of a workload's function: its parameters and results, each once."""
    return sum(_bytes(param) for param in main.params)


def _bytes(param: Any) -> int:
    """Of a parameter; 0 where its shape is open, or it is no tensor."""
    shape = getattr(param.ty, "shape", None)
    if shape is None or not all(hasattr(extent, "value") for extent in shape):
        return 0
    return int(np.prod([int(extent) for extent in shape], dtype=np.int64)) * analysis.itemsize(param.ty.dtype)


def _dtypes(main: Any) -> set[str]:
    """The kinds of floats among a workload's parameters."""
    return {str(param.ty.dtype) for param in main.params if "float" in str(getattr(param.ty, "dtype", ""))}


def accuracies(past: Sequence[RoundFiles]) -> list[Accuracy]:
    """Of each family, the one with the most samples first."""
    columns = [f.name for f in TRAINING if f.name not in ("model", "model_digest")]
    found: dict[str, list[dict[str, Any]]] = {}
    for files in past:
        for row in tables.read(files.training, TRAINING).select(columns).to_pylist():
            found.setdefault(row["family_id"], []).append(row)
    ranked = sorted(found.items(), key=lambda item: -item[1][-1]["num_samples"])
    return [_accuracy(family_id, rows) for family_id, rows in ranked]


def _accuracy(family_id: str, rows: Sequence[Mapping[str, Any]]) -> Accuracy:
    scored = [row for row in rows if row["num_predicted"]]
    pairwise, ceiling, rank, recall = (
        _mean([row[column] for row in scored if row[column] is not None])
        for column in ("pairwise_accuracy", "noise_ceiling", "rank_correlation", "top_recall")
    )
    return Accuracy(
        family_id, rows[-1]["num_samples"], sum(row["num_predicted"] for row in scored), pairwise, ceiling, rank, recall
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def failures(past: Sequence[RoundFiles], names: Mapping[str, str]) -> list[Failure]:
    """Of the run's own trials on some subgraphs, the most frequent kind first."""
    rows = list(
        chain.from_iterable(
            tables.read(files.measurements, MEASUREMENTS).select(["subgraph_id", "status", "error"]).to_pylist()
            for files in past
            if files.is_round
        )
    )
    failed = [row for row in rows if row["status"] != Status.OK and row["subgraph_id"] in names]
    found = []
    for status, count in Counter(row["status"] for row in failed).most_common():
        own = [row for row in failed if row["status"] == status]
        touched = Counter(names[row["subgraph_id"]] for row in own)
        [(example, _)] = Counter(row["error"] or "" for row in own).most_common(1)
        found.append(Failure(status, count, tuple(name for name, _ in touched.most_common()), example[:_ERROR_LENGTH]))
    return found


def clocks(
    extracted: Sequence[Path], families: Path, past: Sequence[RoundFiles], compiled: Sequence[Facts]
) -> list[Record]:
    """The clocks of all stages of a run.

    Args:
        extracted: SUBGRAPHS tables.
        compiled: Manifests of libraries.
    """
    found = [*(("extract", path, SUBGRAPHS) for path in extracted), ("cluster", families, FAMILIES)]
    for files in past:
        found.append(("recall" if files.is_recalled else "generate", files.candidates, CANDIDATES))
        if files.is_round:
            found.append(("measure", files.measurements, MEASUREMENTS))
        found.append(("train", files.training, TRAINING))
    stamps = [(stage, tables.stamp(path, schema)) for stage, path, schema in found]
    records = [Record(stamp.session, stage, stamp.clock) for stage, stamp in stamps]
    # Models may have been extracted for an earlier run: that time is not this run's.
    sessions = {record.session for record in records if record.stage == "generate"}
    sessions |= {facts["session"] for facts in compiled}
    records = [record for record in records if record.session in sessions]
    libraries = [made for facts in compiled for made in (*facts.get("earlier", ()), facts)]
    return [*records, *(Record(made["session"], "compile", made["clock"]) for made in libraries)]


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
            n += files.is_round
            if row["latencies"] and row["subgraph_id"] in weights:
                latency = median(row["latencies"])
                best[row["subgraph_id"]] = min(latency, best.get(row["subgraph_id"], latency))
            if len(best) == len(weights) and files.is_round:
                add(row["measured_at"])
        if files.is_recalled and len(best) == len(weights):
            add(min(record.clock["started"] for record in records))
    seconds = accounting.active_seconds(records, moments)
    return pa.table({"seconds": pa.array(seconds, pa.float64()), "trials": pa.array(trials, pa.int64()),
                     "latency_s": pa.array(latencies, pa.float64())})  # fmt: skip
