"""Subgraphs in, the family of each tunable one out: static, no measurements needed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from lib.contracts import tables
from lib.contracts.clock import Clock
from lib.contracts.schemas import FAMILIES, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.report.text import align
from lib.tuning import families
from lib.tuning.members import join


def run(subgraphs: Path, algorithm: str, *, provenance: Provenance, out: Path) -> Path:
    """Group the subgraphs that can be tuned.

    Args:
        subgraphs: A SUBGRAPHS table.
        algorithm: A name that `lib.tuning.families` knows.
        out: Where the FAMILIES table goes.

    Raises:
        ConfigError: The algorithm is unknown.
        ContractError: `subgraphs` does not match its schema.
    """
    clock = Clock()
    table = cluster(tables.read(subgraphs, SUBGRAPHS), algorithm)
    return tables.write(table, out, FAMILIES, provenance, clock=clock.read())


def cluster(subgraphs: pa.Table, algorithm: str) -> pa.Table:
    """A FAMILIES table for the tunable rows of a SUBGRAPHS table, in their order."""
    rows = [row for row in subgraphs.select(["subgraph_id", "core_operator", "operators", "tunable"]).to_pylist()
            if row.pop("tunable")]  # fmt: skip
    family_ids = families.cluster([SimpleNamespace(**row) for row in rows], algorithm)
    return pa.table({"subgraph_id": [row["subgraph_id"] for row in rows], "family_id": family_ids}).cast(FAMILIES)


def describe(subgraphs: pa.Table, families: pa.Table) -> str:
    """The families as a person wants to see them: those with most FLOP first, each with its members.

    Args:
        subgraphs: A SUBGRAPHS table. Those that are in no family come last, with the reason.
        families: The FAMILIES table made from it.
    """
    joined = join(subgraphs.drop_columns(["workload"]), families)
    others = [row for row in joined if not row["family_id"]]
    members: dict[str, list[dict[str, Any]]] = {}
    for row in joined:
        if row["family_id"]:
            members.setdefault(row["family_id"], []).append(row)
    total = _flop([*(row for rows in members.values() for row in rows), *others]) or 1.0
    lines = [("family", "subgraphs", "calls", "MFLOP a call", "share", "operators")]
    for family_id, rows in sorted(members.items(), key=lambda item: (-_flop(item[1]), item[0])):
        calls = sum(row["weight"] for row in rows)
        lines.append((family_id, str(len(rows)), str(calls), "", f"{100 * _flop(rows) / total:.1f} %", ""))
        for row in sorted(rows, key=lambda row: (-_flop([row]), row["name"])):
            operators = ", ".join(row["operators"]) or "copy"
            lines.append((f"  {row['name']}", "", str(row["weight"]), f"{row['flop'] / 1e6:,.3f}", "", operators))
    if not others:
        return align(lines)
    untuned = [(row["name"], str(row["weight"]), row["note"]) for row in others]
    return f"{align(lines)}\n\n{align([('compiled as TVM lowers it', 'calls', 'why'), *untuned])}"


def _flop(rows: Sequence[Mapping[str, Any]]) -> float:
    """Of one inference."""
    return sum(row["weight"] * row["flop"] for row in rows)
