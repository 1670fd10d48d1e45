"""The memory's best of a model's subgraphs, as a database that stock TVM compiles with."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pyarrow as pa
import tvm
import tvm_ffi

from lib.contracts import tables
from lib.contracts.errors import ModelError
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import SUBGRAPHS
from lib.contracts.statuses import Status
from lib.machine.targets import AnyTarget
from lib.search import interchange
from lib.tir.traces import EMPTY_TRACE
from lib.tir.workload import as_workload, load_module
from lib.tuning.memory import Memory


def run(model: ModelFiles, memory: Memory, target: AnyTarget, *, out: Path) -> int:
    """Write the fastest candidate of each subgraph, for all functions that it stands for: these may read and write
    other channels (`lib.tir.workload`). Returns how many schedules that are.

    Args:
        model: Has the module and the SUBGRAPHS table.
        out: Folder of the database; one that is there is replaced.

    Raises:
        ModelError: Nothing is known of it; nothing is written.
        MissingInput, ContractError: The table is not there, or not what it should be.
    """
    rows = tables.read(model.subgraphs, SUBGRAPHS).to_pylist()
    found = [(row, best) for row in rows if (best := fastest(memory.of(row["core_operator"], row["subgraph_id"])))]
    if not found:
        raise ModelError("Nothing is known of this model's subgraphs under these conditions. Run `TuneModel` first.")
    module = load_module(model.module.read_text())
    schedules = [(workload, *best) for row, best in found for workload in workloads(module, row["functions"])]
    return interchange.write(out, schedules, target.tvm())


def workloads(module: tvm.IRModule, names: Sequence[str]) -> list[tvm.IRModule]:
    """Those of some functions, equal ones once."""
    found = [as_workload(module[name]) for name in names]
    return list({tvm_ffi.structural_hash(each, map_free_vars=True): each for each in found}.values())


def fastest(known: pa.Table) -> tuple[str, float] | None:
    """Trace and median seconds of the fastest of rows of REMEMBERED, untuned programs left out; none if none worked."""
    columns = known.select(["trace", "status", "latencies"]).to_pylist()
    timed = [(median(row["latencies"]), row["trace"]) for row in columns
             if row["status"] == Status.OK and row["trace"] != EMPTY_TRACE]  # fmt: skip
    if not timed:
        return None
    seconds, trace = min(timed)
    return trace, seconds
