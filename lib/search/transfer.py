"""Traces of other workloads, adapted to one: structure and decisions kept, loop factors fitted to other extents.

Source: Transfer-Tuning (Gibson and Cano, CC 2023). Unlike there, a trace is not applied as it stands, which fails where
extents differ, but its decisions are made again in the sketch of the workload's own space that is most like it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.search import evolution, features, nest
from lib.search.evolution import DesignSpace, Proposal, Scorer
from lib.search.points import Point
from lib.tir import packings

_NEAREST = 4  # donors of what is not measured


@dataclass(frozen=True, slots=True)
class Donor:
    """The best known program of another subgraph."""

    subgraph_id: str
    trace: str  # JSON
    context: np.ndarray  # of its workload: one value for each of `nest.CONTEXT`


def adapted(space: DesignSpace, donors: Sequence[Donor], n: int) -> list[Proposal]:
    """Programs made of the traces of the donors whose workloads are most like this one: up to n."""
    if not donors or n <= 0:
        return []
    found = space.own or space.metaschedules
    context = found.points.described.context
    made: dict[str, Proposal] = {}
    for donor in sorted(donors, key=lambda donor: (distance(donor.context, context), donor.subgraph_id)):
        if len(made) >= n:
            break
        for proposal in evolution.realized(found, found.points.adapted(donor.trace), 1, made, "adapted"):
            made[proposal.program_hash] = replace(proposal, donor=donor.subgraph_id)
    return list(made.values())


def taken_over(
    space: DesignSpace, donors: Sequence[Donor], n: int, model: Scorer | None, packing: str | None
) -> list[Proposal]:
    """Up to n programs for a workload that is not measured: what becomes of the traces of the nearest donors, in all
    sketches that are like theirs, the one that the model likes best first; without a model, of the nearest donor first.

    Args:
        packing: Of weights (`tir.packings`), that all are to have; None: any.
    """
    found = space.own or space.metaschedules
    context = found.points.described.context
    nearest = sorted(donors, key=lambda donor: (distance(donor.context, context), donor.subgraph_id))[:_NEAREST]
    origins: dict[object, str] = {}
    points: dict[object, Point] = {}
    for donor in nearest:
        for point in found.points.adapted(donor.trace):
            points.setdefault(point.key, point)
            origins.setdefault(point.key, donor.subgraph_id)
    ranked = list(points.values())
    scores = dict.fromkeys(points, 0.0)
    if model is not None and ranked and space.own:  # of MetaSchedule's points no features are known before
        predicted = model.predict(features.padded([point.features for point in ranked]))
        scores = {point.key: float(score) for point, score in zip(ranked, predicted, strict=True)}
        ranked.sort(key=lambda point: -scores[point.key])
    made: dict[str, Proposal] = {}
    for point in ranked:
        if len(made) >= n:
            break
        for proposal in evolution.realized(found, [point], 1, made, "adapted"):
            if packing is None or packings.packing(proposal.trace) == packing:
                score = scores[point.key] if model is not None else None
                made[proposal.program_hash] = replace(proposal, donor=origins[point.key], score=score)
    return list(made.values())


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Between the shapes of two workloads: the sum of the differences of their logarithms; what only one of them has
    counts as much as a factor of 16."""
    difference = np.abs(first[: len(nest.CONTEXT)] - second)
    one_has = np.isnan(first[: len(nest.CONTEXT)]) != np.isnan(second)
    return float(np.nansum(difference) + 4 * one_has.sum())
