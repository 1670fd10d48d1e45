"""Measurements of some shapes of a model in, programs for its other shapes out: adapted from those, nothing measured.

A subgraph of another shape takes over what its relatives have: subgraphs that read the same weights, or, where it reads
none, the nearest of its family. Of what becomes of their best programs at its own extents, the model that was trained
on them chooses; weights are packed as the relatives agreed to pack them.
"""

from collections.abc import Sequence
from pathlib import Path

from lib import foretelling
from lib.contracts import digests, tables
from lib.contracts.clock import Clock
from lib.contracts.files import ModelFiles, RoundFiles
from lib.contracts.schemas import FAMILIES, SHARED, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.machine import host
from lib.machine.targets import AnyTarget
from lib.search.evolution import Proposal, SearchConfig
from lib.searching import Known, Searcher
from lib.shapes import agreed_of
from lib.tuning import history
from lib.tuning.base import BaseModels
from lib.tuning.members import groups_of

_WORTH_A_PROCESS = 100  # subgraphs: of 50 ms each, where a process takes two seconds to begin

# A subgraph, those whose programs it may take over, and how weights are packed.
_Task = tuple[str, set[str], str | None]


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
    described, clustered = tables.read(joint.subgraphs, SUBGRAPHS), tables.read(families, FAMILIES)
    so_far, group_of = history.load(past), groups_of(tables.read(joint.shared, SHARED))
    packed, agreed = agreed_of(joint, families, so_far)
    with clock.spent("search"):
        known = Known(described, clustered, past, agreed, bases)
        relatives: dict[str, set[str]] = {}
        for subgraph_id, group in group_of.items():
            relatives.setdefault(group, set()).add(subgraph_id)
        unknown = [each for each in known.subgraphs if foretelling.is_unknown(so_far.of(each.subgraph_id))]
        tasks = [
            (each.subgraph_id, relatives.get(group_of.get(each.subgraph_id, ""), set()), packed.get(each.subgraph_id))
            for each in unknown
        ]
        taken = _all_taken_over(known.searcher(target, config, digests.seed(seed, "adapted")), tasks)
        found = list(zip(unknown, taken, strict=True))
    return foretelling.write(found, past, "from other shapes", provenance=provenance, clock=clock, out=out)


def _all_taken_over(searcher: Searcher, tasks: Sequence[_Task]) -> list[list[Proposal]]:
    """Of each; by several processes where they are many. Each subgraph has a seed of its own, whoever looks for it."""
    width = max(1, min(host.physical_cores(), len(tasks) // _WORTH_A_PROCESS))
    shares = [tasks[place::width] for place in range(width)]
    with host.processes(width) as executor:
        others = [executor.submit(_taken_over, searcher, share) for share in shares[1:]]
        parts = [_taken_over(searcher, shares[0]), *(other.result() for other in others)]
    return [parts[n % width][n // width] for n in range(len(tasks))]


def _taken_over(searcher: Searcher, tasks: Sequence[_Task]) -> list[list[Proposal]]:
    return [searcher.take_over(name, foretelling.CHOICES, donors, packing) for name, donors, packing in tasks]
