"""A round of which nothing is measured: programs that were chosen by model, or taken over, of what no round tried."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from lib.contracts import tables
from lib.contracts.clock import Clock
from lib.contracts.files import RoundFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, PLAN, TRAINING
from lib.contracts.tables import Provenance
from lib.search.candidates import table
from lib.search.evolution import Proposal
from lib.searching import Searched
from lib.tuning.history import FORETOLD, SubgraphHistory
from lib.tuning.planning import PlanRow

CHOICES = 2  # programs of a subgraph: the second is for where the first does not work


def write(
    found: Sequence[tuple[Searched, Sequence[Proposal]]],
    past: Sequence[RoundFiles],
    note: str,
    *,
    provenance: Provenance,
    clock: Clock,
    out: RoundFiles,
) -> Path:
    """Write the programs that were chosen of each subgraph, those of a subgraph in the order of their scores.

    Args:
        past: What was recalled and the finished rounds, with the models trained on them.
        note: How they were chosen.
        clock: Of the choice.
        out: Is read like a round in which nothing was measured; gets the PLAN, MEASUREMENTS, TRAINING and, last, the
            CANDIDATES table.

    Raises:
        MissingInput, ContractError: The last round's models are not there, or not what they should be.
    """
    rows = [PlanRow(each.subgraph_id, each.family_id, FORETOLD, len(part), None, note) for each, part in found]
    tables.write(pa.Table.from_pylist([asdict(row) for row in rows], schema=PLAN), out.plan, PLAN, provenance)
    tables.write(MEASUREMENTS.empty_table(), out.measurements, MEASUREMENTS, provenance, clock=Clock().read())
    trained = tables.read(past[-1].training, TRAINING)
    tables.write(trained, out.training, TRAINING, provenance, clock=Clock().read())
    proposals = [(each.subgraph_id, each.family_id, proposal) for each, part in found for proposal in part]
    return tables.write(
        table(proposals), out.candidates, CANDIDATES, provenance, clock=clock.read(),
        files=[out.plan, out.measurements, out.training],
    )  # fmt: skip


def is_unknown(past: SubgraphHistory) -> bool:
    """Whether nothing that works was recalled, and this run measured nothing either."""
    return not past.fastest and past.n_trials == past.n_recalled
