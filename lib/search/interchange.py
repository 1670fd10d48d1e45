"""MetaSchedule's databases of tuning records: what stock TVM compiles with, and where others keep what they tuned.

A folder with `database_workload.json` and `database_tuning_record.json`, as `tvm.s_tir.meta_schedule` and
`relax.transform.MetaScheduleApplyDatabase` read and write them.
"""

import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from lib.contracts.errors import ModelError
from lib.contracts.tables import written_whole
from lib.machine import intrinsics
from lib.search.evolution import Lowered, Proposal
from lib.tir import traces
from lib.tir.workload import program_hash

FILES = ("database_workload.json", "database_tuning_record.json")  # as JSONDatabase calls them


@dataclass(frozen=True, slots=True)
class Record:
    """A schedule of a workload, and what was measured of it somewhere."""

    workload: tvm.IRModule
    trace: str  # JSON
    seconds: float  # infinity if it failed


def write(folder: Path, best: Iterable[tuple[tvm.IRModule, str, float]], target: Target) -> int:
    """Write a database, whole or not at all; returns how many records it has.

    Args:
        best: Workload, trace as JSON, and seconds.
    """
    intrinsics.load(target)
    count = 0
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        database = ms.database.JSONDatabase(work_dir=work)
        for workload, trace, seconds in best:
            arguments = ms.arg_info.ArgInfo.from_prim_func(workload["main"])
            token = database.commit_workload(workload)
            applied = traces.apply(workload, trace).trace
            database.commit_tuning_record(ms.database.TuningRecord(applied, token, [seconds], target, arguments))
            count += 1
        for name in FILES:
            found = Path(work, name)
            with written_whole(folder / name) as partial:
                partial.write_bytes(found.read_bytes() if found.exists() else b"")
    return count


def read(folder: Path) -> list[Record]:
    """All records of a database.

    Raises:
        ModelError: It is not there, or TVM cannot read it.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"--database {folder}: expected {' and '.join(FILES)} in it, but there is no {missing[0]}.")
    try:
        found = ms.database.JSONDatabase(*(str(folder / name) for name in FILES)).get_all_tuning_records()
        return [Record(r.workload.mod, traces.as_json(r.trace), _seconds(r)) for r in found]
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        reason = str(error).strip().rpartition("\n")[-1]
        raise ModelError(f"--database {folder} is no database of this TVM's MetaSchedule: {reason}") from error


def proposal(workload: tvm.IRModule, trace: str, target: Target) -> Proposal:
    """A record's program as a candidate.

    Raises:
        Exception: Whatever TVM raises when the trace does not fit, or computes no features.
    """
    intrinsics.load(target)
    schedule = traces.apply(workload, trace)
    [vector] = Lowered(workload, target).features([schedule])
    return Proposal(traces.to_json(schedule), program_hash(schedule.mod), "imported", "imported", None, vector)


def _seconds(record: ms.database.TuningRecord) -> float:
    """The mean, as MetaSchedule compares records."""
    found = [float(value) for value in record.run_secs or []]
    return sum(found) / len(found) if found else math.inf
