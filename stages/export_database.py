"""The memory's best of a model's subgraphs, as a database that stock TVM compiles with."""

from pathlib import Path
from statistics import median

import pyarrow as pa

from lib.contracts import tables
from lib.contracts.errors import ModelError
from lib.contracts.schemas import SUBGRAPHS
from lib.contracts.statuses import Status
from lib.machine.targets import AnyTarget
from lib.search import interchange
from lib.tir.traces import EMPTY_TRACE
from lib.tuning.memory import Memory


def run(subgraphs: Path, memory: Memory, target: AnyTarget, *, out: Path) -> int:
    """Write the fastest candidate of each subgraph; returns of how many there was one.

    Args:
        subgraphs: A SUBGRAPHS table.
        out: Folder of the database; one that is there is replaced.

    Raises:
        ModelError: Nothing is known of it; nothing is written.
        MissingInput, ContractError: The table is not there, or not what it should be.
    """
    rows = tables.read(subgraphs, SUBGRAPHS).to_pylist()
    found = [(row["workload"], fastest(memory.of(row["core_operator"], row["subgraph_id"]))) for row in rows]
    if not any(best for _, best in found):
        raise ModelError("Nothing is known of this model's subgraphs under these conditions. Run `TuneModel` first.")
    return interchange.write(out, [(text, *best) for text, best in found if best], target.tvm())


def fastest(known: pa.Table) -> tuple[str, float] | None:
    """Trace and median seconds of the fastest of rows of REMEMBERED, untuned programs left out; none if none worked."""
    columns = known.select(["trace", "status", "latencies"]).to_pylist()
    timed = [(median(row["latencies"]), row["trace"]) for row in columns
             if row["status"] == Status.OK and row["trace"] != EMPTY_TRACE]  # fmt: skip
    if not timed:
        return None
    seconds, trace = min(timed)
    return trace, seconds
