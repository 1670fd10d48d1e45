"""A round's candidates in, one measurement for each out; nothing that was measured is measured again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from lib import digests, journal, tables
from lib.clock import Clock
from lib.layout import RoundFiles
from lib.runner import Job, Measurement, Runner
from lib.schemas import CANDIDATES, MEASUREMENTS, SUBGRAPHS
from lib.tables import Origin

Watcher = Callable[[Measurement], None]


def run(
    subgraphs: Path,
    runner: Runner,
    *,
    origin: Origin,
    out: RoundFiles,
    watch: Watcher | None = None,
) -> Path:
    """Measure the candidates of one round.

    Args:
        subgraphs: A SUBGRAPHS table, whose workloads the candidates' traces apply to.
        runner: Builds and times; a candidate's failure comes back as a row with a status.
        out: Has the CANDIDATES table, gets the MEASUREMENTS table. What is measured is in its journal at once,
            so a run that was interrupted goes on where it stood.
        watch: Told of each measurement, those of an interrupted run included.

    Raises:
        DeviceError: Nothing is left to measure on; what was measured is kept.
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    texts = tables.read(subgraphs, SUBGRAPHS).select(["subgraph_id", "workload"]).to_pylist()
    candidates = tables.read(out.candidates, CANDIDATES)
    jobs = jobs_of(candidates, {row["subgraph_id"]: row["workload"] for row in texts})
    done = _known(out)
    with journal.appending(out.journal) as book:
        for measurement in measure(jobs, done, runner):
            if measurement.candidate_id not in done:
                book.add(measurement)
                done[measurement.candidate_id] = measurement
            if watch:
                watch(measurement)
    for kind, seconds in runner.clock.items():
        clock.add(kind, seconds)
    order = {job.candidate_id: n for n, job in enumerate(jobs)}
    if not done.keys() <= order.keys():
        _set_aside(out)
    rows = sorted((m for m in done.values() if m.candidate_id in order), key=lambda m: order[m.candidate_id])
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=MEASUREMENTS)
    tables.write(table, out.measurements, MEASUREMENTS, origin, clock=clock.read())
    out.journal.unlink(missing_ok=True)
    return out.measurements


def jobs_of(candidates: pa.Table, texts: dict[str, str]) -> list[Job]:
    """What a runner needs of a CANDIDATES table, in its order."""
    columns = candidates.select(["candidate_id", "subgraph_id", "trace"]).to_pylist()
    return [Job(row["candidate_id"], row["subgraph_id"], texts[row["subgraph_id"]], row["trace"]) for row in columns]


def measure(jobs: Sequence[Job], done: dict[str, Measurement], runner: Runner) -> Iterator[Measurement]:
    """Each job's measurement: the known ones first, then what the runner finds for the others."""
    yield from [done[job.candidate_id] for job in jobs if job.candidate_id in done]
    yield from runner.run([job for job in jobs if job.candidate_id not in done])


def _known(out: RoundFiles) -> dict[str, Measurement]:
    """What was measured of this round before: by an interrupted run, or for candidates since made again."""
    rows = journal.read(out.journal)
    if out.measurements.exists():
        rows += [Measurement(**row) for row in tables.read(out.measurements, MEASUREMENTS).to_pylist()]
    return {row.candidate_id: row for row in rows}


def _set_aside(out: RoundFiles) -> None:
    """Keep a table that is about to be replaced: its candidates are gone, its measurements are not."""
    if out.measurements.exists():
        name = f"measurements-{digests.of_file(out.measurements)[:8]}.parquet"
        out.measurements.replace(out.measurements.with_name(name))
