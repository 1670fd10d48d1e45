"""Several models in, their subgraphs as those of one out: what they share is tuned once, and counts for all."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from lib.contracts import tables
from lib.contracts.clock import Clock
from lib.contracts.errors import ModelError
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import MODELS, SUBGRAPHS
from lib.contracts.tables import Provenance


@dataclass(frozen=True, slots=True)
class Part:
    """A model of the list: its SUBGRAPHS table, or why there is none."""

    name: str
    importance: float
    subgraphs: Path | None
    error: str = ""


def run(parts: Sequence[Part], *, provenance: Provenance, out: ModelFiles) -> Path:
    """Join the subgraphs of models.

    Args:
        parts: In the order in which they are to be tried first.
        out: Gets the MODELS and, last, the SUBGRAPHS table.

    Raises:
        ModelError: Not one of the models could be imported.
        MissingInput, ContractError: A table is not there, or not what it should be.
    """
    clock = Clock()
    rows = [(part, tables.read(part.subgraphs, SUBGRAPHS).to_pylist() if part.subgraphs else []) for part in parts]
    if not any(found for _, found in rows):
        raise ModelError("None of the models can be tuned:\n" + "\n".join(f"  {p.name}: {p.error}" for p in parts))
    models = pa.Table.from_pylist([_model(part, found) for part, found in rows], schema=MODELS)
    tables.write(models, out.models, MODELS, provenance)
    joined = pa.Table.from_pylist(joint_subgraphs(rows), schema=SUBGRAPHS)
    return tables.write(joined, out.subgraphs, SUBGRAPHS, provenance, clock=clock.read(), files=[out.models])


def _model(part: Part, subgraphs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row of MODELS."""
    own = {key: value for key, value in asdict(part).items() if key != "subgraphs"}
    tunable = [row for row in subgraphs if row["tunable"]]
    return {**own, "subgraphs": [row["subgraph_id"] for row in tunable], "calls": [row["weight"] for row in tunable]}


def joint_subgraphs(rows: Sequence[tuple[Part, Sequence[Mapping[str, Any]]]]) -> list[dict[str, Any]]:
    """Rows of SUBGRAPHS: each subgraph once, named after the first model that has it, with the calls of all of them."""
    joined: dict[str, dict[str, Any]] = {}
    for part, subgraphs in rows:
        for row in subgraphs:
            if row["subgraph_id"] in joined:
                joined[row["subgraph_id"]]["weight"] += row["weight"]
            else:
                joined[row["subgraph_id"]] = {**row, "name": f"{part.name}/{row['name']}", "functions": []}
    return list(joined.values())
