"""Subgraphs with the families they are in, and what a second of each counts."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from lib.tuning.history import History
from lib.tuning.planning import Member


def join(subgraphs: pa.Table, families: pa.Table) -> list[dict[str, Any]]:
    """Rows of a SUBGRAPHS table, in their order, each with its `family_id`; empty where it is in no family.

    Args:
        families: The FAMILIES table made from it, or from that of several models with this one among them.
    """
    family_of = dict(zip(families["subgraph_id"].to_pylist(), families["family_id"].to_pylist(), strict=True))
    return [{**row, "family_id": family_of.get(row["subgraph_id"], "")} for row in subgraphs.to_pylist()]


def members(subgraphs: pa.Table, families: pa.Table) -> list[Member]:
    """What planning needs to know of the subgraphs that are tuned."""
    columns = subgraphs.select(["subgraph_id", "weight", "flop"])
    return [Member(row["subgraph_id"], row["family_id"], row["weight"], guess_s=guess_s(row["flop"]))
            for row in join(columns, families) if row["family_id"]]  # fmt: skip


def guess_s(flop: float) -> float:
    """Seconds of a subgraph that was never measured: enough to tell those that matter from those that do not."""
    return 2e-6 + flop / 1e11


def joint_members(
    subgraphs: pa.Table, families: pa.Table, models: pa.Table, so_far: History, shared: pa.Table | None = None
) -> list[Member]:
    """The same of several models that are tuned together.

    What is to become small is the mean of the models' latencies, each relative to what it was when all its subgraphs
    had been tried, weighted with importance (Ansor, OSDI 2020, section 6.1, with weights in place of its f1 to f4). So
    a second of a subgraph counts, for each model, its calls times the importance over that latency. The subgraphs of
    the first model are tried first, then what the second has besides, and so on: a library of each as early as can be.
    What only models of no importance have is left out.

    Args:
        subgraphs: The SUBGRAPHS table of all models; `families` as in `join`.
        models: A MODELS table.
        shared: A SHARED table, if the models are one in several shapes.
    """
    shares = groups_of(shared) if shared else {}
    counts: defaultdict[str, float] = defaultdict(float)
    groups: dict[str, int] = {}
    rows = models.to_pylist()
    total = sum(row["importance"] for row in rows if row["subgraphs"])
    for group, row in enumerate(rows):
        if not row["importance"]:
            continue
        at_first = first_latency_s(row, so_far)
        for subgraph_id, calls in _calls(row):
            groups.setdefault(subgraph_id, group)
            counts[subgraph_id] += row["importance"] / total * calls / at_first
    return [Member(m.subgraph_id, m.family_id, counts[m.subgraph_id], groups[m.subgraph_id], m.guess_s,
                   shares.get(m.subgraph_id, ""))
            for m in members(subgraphs, families) if m.subgraph_id in counts]  # fmt: skip


def groups_of(shared: pa.Table) -> dict[str, str]:
    """By subgraph: what is equal for those that read the same weights.

    Args:
        shared: A SHARED table.
    """
    return {row["subgraph_id"]: str(row["group"]) for row in shared.to_pylist()}


def first_latency_s(model: Mapping[str, Any], so_far: History) -> float:
    """Estimated latency of a model when all its subgraphs had been tried first, of those that worked then.

    Args:
        model: A row of MODELS.
    """
    found = [calls * so_far.of(subgraph_id).best_after[0] for subgraph_id, calls in _calls(model)
             if so_far.of(subgraph_id).was_tried]  # fmt: skip
    return sum(latency for latency in found if latency < math.inf) or 1.0


def is_tried(model: Mapping[str, Any], so_far: History) -> bool:
    """Whether a library of a model can be made: each of its subgraphs was tried."""
    return all(so_far.of(subgraph_id).was_tried for subgraph_id in model["subgraphs"])


def latency_s(model: Mapping[str, Any], so_far: History) -> float:
    """Its estimated latency now; infinity while some subgraph has no program that works."""
    return sum(calls * so_far.of(subgraph_id).best_s for subgraph_id, calls in _calls(model))


def _calls(model: Mapping[str, Any]) -> Sequence[tuple[str, int]]:
    return list(zip(model["subgraphs"], model["calls"], strict=True))
