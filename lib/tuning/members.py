"""Subgraphs with the families they are in: the one join of SUBGRAPHS and FAMILIES."""

from typing import Any

import pyarrow as pa

from lib.tuning.planning import Member


def join(subgraphs: pa.Table, families: pa.Table) -> list[dict[str, Any]]:
    """Rows of a SUBGRAPHS table, in their order, each with its `family_id`; empty where it is in no family.

    Args:
        families: The FAMILIES table made from it.
    """
    family_of = dict(zip(families["subgraph_id"].to_pylist(), families["family_id"].to_pylist(), strict=True))
    return [{**row, "family_id": family_of.get(row["subgraph_id"], "")} for row in subgraphs.to_pylist()]


def members(subgraphs: pa.Table, families: pa.Table) -> list[Member]:
    """What planning needs to know of the subgraphs that are tuned."""
    columns = subgraphs.select(["subgraph_id", "weight"])
    return [Member(row["subgraph_id"], row["family_id"], row["weight"])
            for row in join(columns, families) if row["family_id"]]  # fmt: skip
