"""What the memory knows of a run's subgraphs, and of others like them, as a round before the first: pinned for good."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lib.contracts import tables
from lib.contracts.clock import Clock
from lib.contracts.files import RoundFiles
from lib.contracts.schemas import CANDIDATES, FAMILIES, MEASUREMENTS, PLAN, REMEMBERED, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.tuning.families import cluster
from lib.tuning.history import EXHAUSTED
from lib.tuning.members import join
from lib.tuning.memory import Memory
from lib.tuning.planning import PlanRow

_ENOUGH = 1000  # samples to begin with: of a family that has as many of its own, others are not read


def run(
    subgraphs: Path,
    families: Path,
    algorithm: str,
    memory: Memory | None,
    max_samples: int,
    *,
    provenance: Provenance,
    out: RoundFiles,
) -> Path:
    """Copy from the memory what a run begins with: later measurements of other runs change nothing in it.

    Args:
        subgraphs: A SUBGRAPHS table; `families`: the FAMILIES table that this algorithm made of it.
        memory: None: nothing is recalled.
        max_samples: Programs of a family, of its own subgraphs first and the newest, that keep their features.
        out: Gets the PLAN, MEASUREMENTS and, last, the CANDIDATES table.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be. What cannot be read of the memory
            is left out.
    """
    clock = Clock()
    members = [row for row in join(tables.read(subgraphs, SUBGRAPHS), tables.read(families, FAMILIES))
               if row["family_id"]]  # fmt: skip
    known = _of_members(members, memory) if memory else REMEMBERED.empty_table()
    family_of = {row["subgraph_id"]: row["family_id"] for row in members}
    others = _of_others(members, known, algorithm, memory, max_samples, family_of) if memory else []
    rows = pa.concat_tables([*others, known])
    family_ids = [family_of[subgraph_id] for subgraph_id in rows["subgraph_id"].to_pylist()]
    tables.write(_plan(known, members, memory), out.plan, PLAN, provenance)
    tables.write(rows.select(MEASUREMENTS.names), out.measurements, MEASUREMENTS, provenance)
    return tables.write(
        _candidates(rows, family_ids, max_samples), out.candidates, CANDIDATES, provenance, clock=clock.read(),
        files=[out.plan, out.measurements],
    )  # fmt: skip


def _of_members(members: Sequence[Mapping[str, Any]], memory: Memory) -> pa.Table:
    """All that is known of the run's own subgraphs."""
    found = [memory.of(row["core_operator"], row["subgraph_id"]) for row in members]
    return pa.concat_tables([REMEMBERED.empty_table(), *found])


def _of_others(
    members: Sequence[Mapping[str, Any]],
    known: pa.Table,
    algorithm: str,
    memory: Memory,
    max_samples: int,
    family_of: dict[str, str],
) -> list[pa.Table]:
    """What is known of other subgraphs of the run's families, as long as these want for samples; oldest first.

    Args:
        family_of: By subgraph; gets those that are found.
    """
    wanted = dict.fromkeys(family_of.values(), min(max_samples, _ENOUGH))
    for subgraph_id, count in Counter(known["subgraph_id"].to_pylist()).items():
        wanted[family_of[subgraph_id]] -= count
    own = frozenset(family_of)
    found = []
    for operator in dict.fromkeys(row["core_operator"] for row in members):
        families = {row["family_id"] for row in members if row["core_operator"] == operator}
        parts = memory.like(operator, but=own)
        while any(wanted[family_id] > 0 for family_id in families) and (part := next(parts, None)) is not None:
            first = part.slice(0, 1).select(["subgraph_id", "core_operator", "operators"]).to_pylist()[0]
            [family_id] = cluster([SimpleNamespace(**first)], algorithm)
            if wanted.get(family_id, 0) > 0:
                wanted[family_id] -= len(part)
                family_of[first["subgraph_id"]] = family_id
                found.append(part)
    return found[::-1]


def _plan(known: pa.Table, members: Sequence[Mapping[str, Any]], memory: Memory | None) -> pa.Table:
    """A row for each subgraph of which something is known."""
    counts = Counter(known["subgraph_id"].to_pylist())
    rows = [
        PlanRow(subgraph_id, row["family_id"], _kind(row, memory), counts[subgraph_id], None, "known before")
        for row in members if counts[subgraph_id := row["subgraph_id"]]
    ]  # fmt: skip
    return pa.Table.from_pylist([asdict(row) for row in rows], schema=PLAN)


def _kind(row: Mapping[str, Any], memory: Memory | None) -> str:
    is_exhausted = memory is not None and memory.is_exhausted(row["core_operator"], row["subgraph_id"])
    return EXHAUSTED if is_exhausted else "recalled"


def _candidates(rows: pa.Table, family_ids: Sequence[str], max_samples: int) -> pa.Table:
    """A CANDIDATES table in which the last so many of each family have features."""
    families = np.array(family_ids, dtype=str)
    kept = np.zeros(len(families), bool)
    for family_id in np.unique(families):
        kept[np.flatnonzero(families == family_id)[-max_samples:]] = True
    field = CANDIDATES.field("features")
    none = pa.array([[]] * len(rows), field.type)
    features = pc.if_else(pa.array(kept), rows["features"].combine_chunks(), none)
    columns = {
        **{name: rows[name] for name in rows.column_names if name in CANDIDATES.names},
        "family_id": pa.array(family_ids, pa.string()),
        "score": pa.nulls(len(rows), pa.float32()),
        "features": features,
    }
    return pa.table({name: columns[name] for name in CANDIDATES.names}).cast(CANDIDATES)
