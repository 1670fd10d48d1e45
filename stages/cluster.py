"""Subgraphs in, the family of each tunable one out: static, no measurements needed."""

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa

from lib import families, tables
from lib.clock import Clock
from lib.schemas import FAMILIES, SUBGRAPHS
from lib.tables import Origin


def run(subgraphs: Path, algorithm: str, *, origin: Origin, out: Path) -> Path:
    """Group the subgraphs that can be tuned.

    Args:
        subgraphs: A SUBGRAPHS table.
        algorithm: A name that `lib.families` knows.
        out: Where the FAMILIES table goes.

    Raises:
        ConfigError: The algorithm is unknown.
        ContractError: `subgraphs` does not match its schema.
    """
    clock = Clock()
    table = cluster(tables.read(subgraphs, SUBGRAPHS), algorithm)
    return tables.write(table, out, FAMILIES, origin, clock=clock.read())


def cluster(subgraphs: pa.Table, algorithm: str) -> pa.Table:
    """A FAMILIES table for the tunable rows of a SUBGRAPHS table, in their order."""
    rows = [row for row in subgraphs.select(["subgraph_id", "core_operator", "operators", "tunable"]).to_pylist()
            if row.pop("tunable")]  # fmt: skip
    family_ids = families.cluster([SimpleNamespace(**row) for row in rows], algorithm)
    return pa.table({"subgraph_id": [row["subgraph_id"] for row in rows], "family_id": family_ids}).cast(FAMILIES)
