"""Traces of other workloads, adapted to one: structure and decisions kept, loop factors fitted to other extents.

Source: Transfer-Tuning (Gibson and Cano, CC 2023). Unlike there, a trace is not applied as it stands, which fails where
extents differ, but its decisions are made again in the sketch of the workload's own space that is most like it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.search import evolution, nest
from lib.search.evolution import DesignSpace, Proposal


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


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Between the shapes of two workloads: the sum of the differences of their logarithms; what only one of them has
    counts as much as a factor of 16."""
    difference = np.abs(first[: len(nest.CONTEXT)] - second)
    one_has = np.isnan(first[: len(nest.CONTEXT)]) != np.isnan(second)
    return float(np.nansum(difference) + 4 * one_has.sum())
