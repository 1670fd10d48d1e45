"""What the models like best of each subgraph that was never measured: a library before the first measurement, or before
all were looked at."""

from collections.abc import Sequence
from pathlib import Path

from lib import foretelling
from lib.contracts import digests, tables
from lib.contracts.clock import Clock
from lib.contracts.files import RoundFiles
from lib.contracts.schemas import FAMILIES, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.machine.targets import AnyTarget
from lib.search.evolution import SearchConfig
from lib.searching import Known
from lib.tuning import history
from lib.tuning.base import BaseModels


def run(
    subgraphs: Path,
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
    """Foretell the best candidates of the subgraphs that no round tried, and of which nothing that works was recalled.

    Args:
        subgraphs: A SUBGRAPHS table; `families`: the FAMILIES table made from it.
        past: What was recalled and the finished rounds, with the models trained on them.
        out: Is read like a round in which nothing was measured; gets the PLAN, MEASUREMENTS, TRAINING and, last, the
            CANDIDATES table. Those of a subgraph stand in the order of their scores.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    described, clustered = tables.read(subgraphs, SUBGRAPHS), tables.read(families, FAMILIES)
    so_far = history.load(past)
    with clock.spent("search"):
        known = Known(described, clustered, past, so_far, bases)
        searcher = known.searcher(target, config, digests.seed(seed, "foretold"))
        unknown = [each for each in known.subgraphs if foretelling.is_unknown(so_far.of(each.subgraph_id))]
        found = [(each, searcher.foretell(each.subgraph_id, foretelling.CHOICES)) for each in unknown]
    return foretelling.write(found, past, "by model", provenance=provenance, clock=clock, out=out)
