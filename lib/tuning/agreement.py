"""Weights that several shapes of a model share: which packing they agree on. Pure.

A library packs each weight in the order in which its programs read it (`lib.tir.packings`). Programs of different
shapes may like different orders best; a bundle in which weights stand once wants one. For each group of subgraphs that
read the same weights, the order is taken that costs least over all of them. Whoever has no measured program with that
order gets some (rounds of kind `refit`), so that the choice stands on measurements. Where there is none, as where four
rows want other register tiles than five hundred, weights would stand twice: an order that all can have is preferred,
if it costs little more.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lib.tir.packings import packing
from lib.tir.traces import EMPTY_TRACE
from lib.tuning.history import History, SubgraphHistory, TimedCandidate

_UNMEASURED = 1.1  # times a subgraph's best: what a program is taken to cost whose packing was not measured there
_TOLERATED = 1.1  # times the least cost: for a packing that more of a group have, or can have
_MOST_REFITS = 2  # rounds in which programs of a packing are looked for, of one subgraph


@dataclass(frozen=True, slots=True)
class Sharing:
    """A subgraph that shares weights with others."""

    subgraph_id: str
    group: str
    weight: float  # what a second of it counts


def best_by_packing(past: SubgraphHistory) -> dict[str, TimedCandidate]:
    """The fastest program with each packing, the fastest of them first; the untuned one left out."""
    found: dict[str, TimedCandidate] = {}
    for timed in past.fastest:
        if timed.trace != EMPTY_TRACE:
            found.setdefault(packing(timed.trace), timed)
    return found


def chosen(sharing: Sequence[Sharing], so_far: History, *, is_final: bool = False) -> dict[str, str]:
    """The packing that each subgraph is to have: one for a group. Groups of which nothing works have none.

    Args:
        is_final: Nothing will be measured any more: of the packings that cost about the same, that which the fewest of
            a group lack.
    """
    groups: defaultdict[str, list[Sharing]] = defaultdict(list)
    for each in sharing:
        groups[each.group].append(each)
    wanted: dict[str, str] = {}
    for members in groups.values():
        measured = {each.subgraph_id: best_by_packing(so_far.of(each.subgraph_id)) for each in members}
        packings = sorted({name for found in measured.values() for name in found})
        if packings:
            costs = {name: _cost(name, members, measured, so_far) for name in packings}
            least = min(cost.total for cost in costs.values())
            near = [name for name, cost in costs.items() if cost.total <= _TOLERATED * least]
            wanted |= dict.fromkeys(measured, min(near, key=lambda name: costs[name].rank(is_final=is_final)))
    return wanted


@dataclass(frozen=True, slots=True)
class _Cost:
    """What a packing costs a group."""

    total: float
    lacking: int  # members that have no program with it
    in_vain: int  # of these, those for which one was looked for in vain

    def rank(self, *, is_final: bool) -> tuple[int, float]:
        """The smaller, the better."""
        return (self.lacking if is_final else self.in_vain), self.total


def _cost(
    name: str, members: Sequence[Sharing], measured: Mapping[str, Mapping[str, TimedCandidate]], so_far: History
) -> _Cost:
    total, lacking, in_vain = 0.0, 0, 0
    for each in members:
        found = measured[each.subgraph_id]
        if name in found:
            total += each.weight * found[name].latency_s
        elif found:
            lacking += 1
            in_vain += so_far.of(each.subgraph_id).n_refits >= _MOST_REFITS
            total += each.weight * _UNMEASURED * next(iter(found.values())).latency_s
    return _Cost(total, lacking, in_vain)


def lacking(sharing: Sequence[Sharing], so_far: History) -> dict[str, str]:
    """Subgraphs of which no program was measured with the packing that their group likes best, with that packing; but
    for those in which it was looked for in vain."""
    wanted = chosen(sharing, so_far)
    return {
        subgraph_id: name
        for subgraph_id, name in wanted.items()
        if name not in best_by_packing(past := so_far.of(subgraph_id)) and past.n_refits < _MOST_REFITS
    }


def agreed(sharing: Sequence[Sharing], group_of: Mapping[str, str], so_far: History) -> tuple[dict[str, str], History]:
    """The packing that each subgraph has in the end, and what was measured, as if only programs with it had been.

    Args:
        sharing: The subgraphs that were measured, which decide.
        group_of: Their groups, and those of others.
    """
    wanted = chosen(sharing, so_far, is_final=True)
    by_group = {each.group: wanted[each.subgraph_id] for each in sharing if each.subgraph_id in wanted}
    packed = {subgraph_id: by_group[group] for subgraph_id, group in group_of.items() if group in by_group}
    found = {
        subgraph_id: restricted(past, packed[subgraph_id]) if subgraph_id in packed else past
        for subgraph_id, past in so_far.subgraphs.items()
    }
    return packed, replace(so_far, subgraphs=found)


def restricted(past: SubgraphHistory, name: str) -> SubgraphHistory:
    """A subgraph's past as if only programs with one packing had been measured; all of it, where there are none."""
    fastest = [timed for timed in past.fastest if packing(timed.trace) == name]
    return replace(past, fastest=fastest) if fastest else past
