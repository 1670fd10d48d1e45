"""A round's candidates in, one measurement for each out; what was measured, by this run or another, is not again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lib.contracts import digests, tables
from lib.contracts.clock import Clock
from lib.contracts.conditions import Conditions
from lib.contracts.files import RoundFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, PLAN, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.measure import journal
from lib.measure.runner import Job, Measurement, Runner
from lib.tuning import history
from lib.tuning import memory as remembered
from lib.tuning.memory import Memory

Watcher = Callable[[Measurement], None]
Say = Callable[[str], object]

_DESCRIBED = ["subgraph_id", "workload", "core_operator", "operators"]
_OTHERS = "waiting for another run that measures one of these subgraphs"


def run(
    subgraphs: Path,
    runner: Runner,
    *,
    provenance: Provenance,
    out: RoundFiles,
    memory: Memory | None = None,
    watch: Watcher | None = None,
    say: Say = lambda _text: None,
) -> Path:
    """Measure the candidates of one round.

    Args:
        subgraphs: A SUBGRAPHS table, whose workloads the candidates' traces apply to.
        runner: Builds and times; a candidate's failure comes back as a row with a status.
        out: Has the CANDIDATES table, gets the MEASUREMENTS table. What is measured is in its journal at once,
            so a run that was interrupted goes on where it stood.
        memory: Knows what other runs measured since this one began, and keeps what this one does.
        watch: Told of each measurement, those of an interrupted run included.
        say: Told why something that was measured before is measured again.

    Raises:
        DeviceError: Nothing is left to measure on; what was measured is kept.
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    rows = tables.read(subgraphs, SUBGRAPHS).select(_DESCRIBED).to_pylist()
    described = {row.pop("subgraph_id"): row for row in rows}
    candidates = tables.read(out.candidates, CANDIDATES)
    jobs = jobs_of(candidates, {subgraph_id: row["workload"] for subgraph_id, row in described.items()})
    operators = {job.subgraph_id: described[job.subgraph_id]["core_operator"] for job in jobs}
    with memory.claimed(operators, lambda: say(_OTHERS)) if memory else nullcontext():
        recalled = _recalled(jobs, operators, memory) if memory else {}
        done = {**_known(jobs, runner.conditions, out, say), **recalled}
        with journal.appending(out.journal) as book:
            for measurement in measure(jobs, done, runner):
                if measurement.candidate_id not in done:
                    book.add(measurement)
                    done[measurement.candidate_id] = measurement
                if watch:
                    watch(measurement)
        table = _table([done[job.candidate_id] for job in jobs if job.candidate_id in done])
        if memory:
            new = pc.invert(pc.is_in(table["candidate_id"], pa.array(list(recalled), pa.string())))
            memory.remember(remembered.rows(candidates, table.filter(new), described), provenance.session)
            for subgraph_id in history.exhausted(tables.read(out.plan, PLAN), candidates):
                memory.exhaust(described[subgraph_id]["core_operator"], subgraph_id)
    for kind, seconds in runner.clock.items():
        clock.add(kind, seconds)
    tables.write(table, out.measurements, MEASUREMENTS, provenance, clock=clock.read())
    out.journal.unlink(missing_ok=True)
    return out.measurements


def _recalled(jobs: Sequence[Job], operators: Mapping[str, str], memory: Memory) -> dict[str, Measurement]:
    """What other runs measured of a round's candidates."""
    found: list[dict[str, Any]] = []
    for subgraph_id, operator in operators.items():
        wanted = [job.candidate_id for job in jobs if job.subgraph_id == subgraph_id]
        found += memory.known(operator, subgraph_id, wanted).select(MEASUREMENTS.names).to_pylist()
    return {row["candidate_id"]: Measurement.of(row) for row in found}


def describe(subgraphs: Path, files: RoundFiles) -> str:
    """What a round measures, for people."""
    plan = tables.read(files.plan, PLAN).to_pylist()
    names = dict(tables.read(subgraphs, SUBGRAPHS).select(["subgraph_id", "name"]).to_pandas().to_numpy())
    what = names[plan[0]["subgraph_id"]] if len(plan) == 1 else f"{len(plan)} subgraphs"
    return f"measuring {what} ({plan[0]['kind']})"


def jobs_of(candidates: pa.Table, texts: dict[str, str]) -> list[Job]:
    """What a runner needs of a CANDIDATES table, in its order."""
    columns = candidates.select(["candidate_id", "subgraph_id", "trace"]).to_pylist()
    return [Job(row["candidate_id"], row["subgraph_id"], texts[row["subgraph_id"]], row["trace"]) for row in columns]


def measure(jobs: Sequence[Job], done: dict[str, Measurement], runner: Runner) -> Iterator[Measurement]:
    """Each job's measurement: the known ones first, then what the runner finds for the others."""
    yield from [done[job.candidate_id] for job in jobs if job.candidate_id in done]
    yield from runner.run([job for job in jobs if job.candidate_id not in done])


def _known(jobs: Sequence[Job], conditions: Conditions, out: RoundFiles, say: Say) -> dict[str, Measurement]:
    """What was measured of this round before, by an interrupted run or for candidates since made again.

    What cannot be used, of other candidates or of other conditions, is kept in a table beside.
    """
    written = journal.read(out.journal)
    if written.damaged:
        say(f"{out.journal} has {written.damaged} damaged lines: their candidates are measured again")
    rows = written.rows
    if out.measurements.exists():
        rows += [Measurement.of(row) for row in tables.read(out.measurements, MEASUREMENTS).to_pylist()]
    wanted = {job.candidate_id for job in jobs}
    usable = {row.candidate_id: row for row in rows if row.candidate_id in wanted and row.conditions == conditions}
    others = [row for row in rows if usable.get(row.candidate_id) != row]
    if others:
        _set_aside(others, out)
    foreign = [row.conditions for row in others if row.conditions != conditions]
    for each in dict.fromkeys(foreign):
        say(f"{foreign.count(each)} candidates are measured again: before they were with "
            f"{'; '.join(each.differences(conditions))}")  # fmt: skip
    return usable


def _set_aside(rows: Sequence[Measurement], out: RoundFiles) -> None:
    """Keep what the table will not have; the same rows go into the same file."""
    table = _table(rows)
    name = f"measurements-{digests.of_text(*(f'{row.candidate_id} {row.measured_at}' for row in rows))[:8]}.parquet"
    tables.write(table, out.measurements.with_name(name), MEASUREMENTS, Provenance())


def _table(rows: Sequence[Measurement]) -> pa.Table:
    return pa.Table.from_pylist([asdict(row) for row in rows], schema=MEASUREMENTS)
