"""Shapes of one model in, which of their subgraphs read the same weights out: these are to pack them alike."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from lib.contracts import arrays, tables
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import SHARED, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.graph.readers import readers
from lib.tir.workload import load_module


def run(shapes: Sequence[ModelFiles], *, provenance: Provenance, out: ModelFiles) -> Path:
    """Write the groups of subgraphs that read the same weights.

    Args:
        shapes: The model's files in each of its shapes.
        out: Gets the SHARED table.

    Raises:
        MissingInput, ContractError: A table is not there, or not what it should be.
    """
    read_by: dict[str, set[str]] = {}
    for files in shapes:
        of_function = readers(load_module(files.module.read_text()))
        contents = arrays.contents(files.weights)  # two that only look alike would be packed alike for nothing
        for row in tables.read(files.subgraphs, SUBGRAPHS).select(["subgraph_id", "functions", "tunable"]).to_pylist():
            names = {name for function in row["functions"] for name in of_function.get(function, ())}
            if row["tunable"] and names:
                read_by.setdefault(row["subgraph_id"], set()).update(contents[name] for name in names)
    rows = [
        {"subgraph_id": subgraph_id, "group": n} for n, group in enumerate(groups(read_by)) for subgraph_id in group
    ]
    return tables.write(pa.Table.from_pylist(rows, schema=SHARED), out.shared, SHARED, provenance)


def groups(read_by: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Sets of subgraphs that hang together by a weight, sorted.

    Args:
        read_by: The weights of each.
    """
    found: list[tuple[set[str], set[str]]] = []
    for subgraph_id, weights in sorted(read_by.items()):
        members, own = {subgraph_id}, set(weights)
        for other in [each for each in found if each[1] & own]:
            found.remove(other)
            members, own = members | other[0], own | other[1]
        found.append((members, own))
    return sorted(sorted(members) for members, _ in found)
