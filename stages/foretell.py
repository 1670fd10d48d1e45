"""What the models like best of each subgraph that was never measured: a library before the first measurement, or before
all were looked at."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from lib.contracts import digests, tables
from lib.contracts.clock import Clock
from lib.contracts.files import RoundFiles
from lib.contracts.schemas import CANDIDATES, FAMILIES, MEASUREMENTS, PLAN, SUBGRAPHS, TRAINING
from lib.contracts.tables import Provenance
from lib.machine.targets import AnyTarget
from lib.search.candidates import table
from lib.search.evolution import SearchConfig
from lib.searching import Known
from lib.tuning import history
from lib.tuning.base import BaseModels
from lib.tuning.history import FORETOLD, SubgraphHistory
from lib.tuning.planning import PlanRow

_CHOICES = 2  # candidates of a subgraph: the second is for where the first cannot be compiled


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
        unknown = [each for each in known.subgraphs if _is_unknown(so_far.of(each.subgraph_id))]
        found = [(each, searcher.foretell(each.subgraph_id, _CHOICES)) for each in unknown]
    rows = [PlanRow(each.subgraph_id, each.family_id, FORETOLD, len(part), None, "by model") for each, part in found]
    tables.write(pa.Table.from_pylist([asdict(row) for row in rows], schema=PLAN), out.plan, PLAN, provenance)
    tables.write(MEASUREMENTS.empty_table(), out.measurements, MEASUREMENTS, provenance, clock=Clock().read())
    trained = tables.read(past[-1].training, TRAINING)
    tables.write(trained, out.training, TRAINING, provenance, clock=Clock().read())
    proposals = [(each.subgraph_id, each.family_id, proposal) for each, part in found for proposal in part]
    return tables.write(
        table(proposals), out.candidates, CANDIDATES, provenance, clock=clock.read(),
        files=[out.plan, out.measurements, out.training],
    )  # fmt: skip


def _is_unknown(past: SubgraphHistory) -> bool:
    """Whether nothing that works was recalled, and this run measured nothing either."""
    return not past.fastest and past.n_trials == past.n_recalled
