"""A MetaSchedule database in, its schedules measured here and kept in the memory: what it says of latencies is of
another lowering, and of another machine perhaps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import tvm_ffi

from lib.contracts import tables
from lib.contracts.errors import ModelError
from lib.contracts.schemas import MEASUREMENTS, SUBGRAPHS
from lib.contracts.statuses import Status
from lib.machine.targets import AnyTarget
from lib.measure.runner import Job, Measurement, Runner
from lib.search import candidates, interchange
from lib.search.evolution import Proposal
from lib.search.interchange import Record
from lib.tir.workload import load_module, workload_id
from lib.tuning import memory as remembered
from lib.tuning.memory import Memory

Say = Callable[[str], object]


@dataclass(slots=True)
class Imported:
    """What came of the records of a database."""

    foreign: int = 0  # of workloads that the model does not have
    unfit: int = 0  # whose trace cannot be replayed
    known: int = 0  # whose program the memory has
    left_out: int = 0  # slower, by what the database says, than as many as were asked for
    measured: int = 0
    failed: int = 0  # of the measured ones

    def __str__(self) -> str:
        return (
            f"{self.measured} schedules measured and remembered, {self.failed} of them failed; left out: "
            f"{self.foreign} of other workloads, {self.unfit} that do not fit, {self.known} known before, "
            f"{self.left_out} slower ones"
        )


def run(
    subgraphs: Path,
    database: Path,
    most: int,
    runner: Runner,
    memory: Memory,
    target: AnyTarget,
    *,
    session: str,
    say: Say = lambda _text: None,
) -> Imported:
    """Measure the schedules of a database that fit subgraphs of a model; each subgraph's are kept when they are done.

    Args:
        subgraphs: A SUBGRAPHS table.
        database: Its folder.
        most: Schedules of a subgraph that are measured, the fastest by what the database says.
        say: Told what is being done.

    Raises:
        ModelError: There is no such database, or nothing in it is of this model.
        DeviceError: Nothing is left to measure on; what was measured is kept.
    """
    rows = {row["subgraph_id"]: row for row in tables.read(subgraphs, SUBGRAPHS).to_pylist() if row["tunable"]}
    records = interchange.read(database)
    found, told = of_subgraphs(records, rows), Imported()
    told.foreign = len(records) - sum(map(len, found.values()))
    if not found:
        raise ModelError(f"--database {database}: none of its {len(records)} records is of a subgraph of this model.")
    for n, (subgraph_id, own) in enumerate(found.items(), start=1):
        say(f"measuring schedules of {rows[subgraph_id]['name']}, subgraph {n} of {len(found)}")
        _import(rows[subgraph_id], own, most, runner, memory, target, session, told, say)
    return told


def of_subgraphs(records: Sequence[Record], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Record]]:
    """Records by the subgraph whose workload is theirs, the fastest first.

    Workloads are equal if their structure is, whatever their buffers and blocks are called; traces refer to blocks by
    name, so some of them will not fit. One of other channels of an image (`lib.tir.workload`) has the same id.
    """
    by_hash = {tvm_ffi.structural_hash(load_module(row["workload"])["main"].without_attr("global_symbol")): key
               for key, row in rows.items()}  # fmt: skip
    found: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.seconds):
        function = record.workload["main"].without_attr("global_symbol")
        key = by_hash.get(tvm_ffi.structural_hash(function)) or workload_id(record.workload)
        if key in rows:
            found.setdefault(key, []).append(record)
    return found


def _import(
    row: Mapping[str, Any],
    records: Sequence[Record],
    most: int,
    runner: Runner,
    memory: Memory,
    target: AnyTarget,
    session: str,
    told: Imported,
    say: Say,
) -> None:
    """Those of one subgraph."""
    subgraph_id, operator = row["subgraph_id"], row["core_operator"]
    with memory.claimed({subgraph_id: operator}, lambda: say("waiting for another run that measures this subgraph")):
        known = set(memory.of(operator, subgraph_id)["program_hash"].to_pylist())
        fresh = _fresh(row, records, known, target, told)
        told.left_out += len(fresh[most:])
        table = candidates.table([(subgraph_id, "", proposal) for proposal in fresh[:most]])
        ids = table["candidate_id"].to_pylist()
        jobs = [Job(key, subgraph_id, row["workload"], p.trace) for key, p in zip(ids, fresh, strict=False)]
        measured = list(runner.run(jobs))
        if measured:
            memory.remember(remembered.rows(table, _table(measured), {subgraph_id: row}), session)
    told.measured += len(measured)
    told.failed += sum(each.status != Status.OK for each in measured)


def _fresh(
    row: Mapping[str, Any], records: Sequence[Record], known: set[str], target: AnyTarget, told: Imported
) -> list[Proposal]:
    """Programs that are not known yet, each once."""
    workload, found = load_module(row["workload"]), {}
    for record in records:
        try:
            proposal = interchange.proposal(workload, record.trace, target.tvm())
        except Exception:  # TVM's own errors have many types
            told.unfit += 1
            continue
        if proposal.program_hash in known or proposal.program_hash in found:
            told.known += 1
        else:
            found[proposal.program_hash] = proposal
    return list(found.values())


def _table(measured: Sequence[Measurement]) -> pa.Table:
    return pa.Table.from_pylist([asdict(each) for each in measured], schema=MEASUREMENTS)
