"""Measurements of some shapes of a model in, programs for its other shapes out: adapted from those, nothing measured.

A subgraph of another shape takes over what its relatives have: subgraphs that read the same weights, or, where it reads
none, the nearest of its family. Of what becomes of their best programs at its own extents, the model that was trained
on them chooses; weights are packed as the relatives agreed to pack them.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from lib import foretelling
from lib.contracts import digests, tables
from lib.contracts.clock import Clock
from lib.contracts.files import ModelFiles, RoundFiles
from lib.contracts.schemas import FAMILIES, SHARED, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.machine import host
from lib.machine.targets import AnyTarget
from lib.search.evolution import Proposal, SearchConfig
from lib.searching import Known
from lib.shapes import agreed_of
from lib.tuning import history
from lib.tuning.base import BaseModels
from lib.tuning.members import groups_of

_WORTH_A_PROCESS = 100  # subgraphs: of 50 ms each, where a process takes two seconds to begin


def run(
    joint: ModelFiles,
    families: Path,
    past: Sequence[RoundFiles],
    target: AnyTarget,
    config: SearchConfig,
    bases: BaseModels,
    *,
    seed: int,
    provenance: Provenance,
    out: RoundFiles,
) -> Path:
    """Adapt programs to the subgraphs that no round tried, and of which nothing that works was recalled.

    Args:
        joint: Has the SUBGRAPHS of all shapes, the MODELS and SHARED tables; `families`: their FAMILIES.
        past: What was recalled and the finished rounds, with the models trained on them.
        out: See `foretelling.write`.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    asked = joint, families, past, target, config, bases, seed
    with clock.spent("search"):
        adapter = _Adapter(*asked)
        width = max(1, min(host.physical_cores(), len(adapter.unknown) // _WORTH_A_PROCESS))
        context = multiprocessing.get_context("spawn")  # a fork would take TVM's threads for its own
        with ProcessPoolExecutor(width, context) as executor:
            others = [executor.submit(_every, asked, place, width) for place in range(1, width)]
            parts = [adapter.every(0, width), *(other.result() for other in others)]
        found = [(each, parts[k % width][k // width]) for k, each in enumerate(adapter.unknown)]
    return foretelling.write(found, past, "from other shapes", provenance=provenance, clock=clock, out=out)


class _Adapter:
    """What is taken over for each subgraph; equal however they are shared out, since each has a seed of its own."""

    def __init__(
        self,
        joint: ModelFiles,
        families: Path,
        past: Sequence[RoundFiles],
        target: AnyTarget,
        config: SearchConfig,
        bases: BaseModels,
        seed: int,
    ) -> None:
        described, clustered = tables.read(joint.subgraphs, SUBGRAPHS), tables.read(families, FAMILIES)
        so_far, self._group_of = history.load(past), groups_of(tables.read(joint.shared, SHARED))
        self._packed, agreed = agreed_of(joint, families, so_far)
        known = Known(described, clustered, past, agreed, bases)
        self.unknown = [each for each in known.subgraphs if foretelling.is_unknown(so_far.of(each.subgraph_id))]
        self._searcher = known.searcher(target, config, digests.seed(seed, "adapted"))
        self._relatives: dict[str, set[str]] = {}
        for subgraph_id, group in self._group_of.items():
            self._relatives.setdefault(group, set()).add(subgraph_id)

    def every(self, place: int, width: int) -> list[list[Proposal]]:
        """Of every `width`-th subgraph that nobody knows, from a place on."""
        found = []
        for each in self.unknown[place::width]:
            donors = self._relatives.get(self._group_of.get(each.subgraph_id, ""), set())
            packing = self._packed.get(each.subgraph_id)
            found.append(self._searcher.take_over(each.subgraph_id, foretelling.CHOICES, donors, packing))
        return found


def _every(asked: tuple[Any, ...], place: int, width: int) -> list[list[Proposal]]:
    """`_Adapter.every`, in a process of its own."""
    return _Adapter(*asked).every(place, width)
