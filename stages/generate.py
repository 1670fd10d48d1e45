"""Plans a round and makes its candidates: subgraphs, families and all that was measured in, candidates out."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa

from lib.contracts import digests, tables
from lib.contracts.clock import Clock
from lib.contracts.errors import TunerError
from lib.contracts.files import RoundFiles
from lib.contracts.schemas import CANDIDATES, FAMILIES, MODELS, PLAN, SHARED, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.machine.targets import AnyTarget
from lib.search.candidates import table
from lib.search.evolution import Proposal, SearchConfig
from lib.search.recorded import Recorded
from lib.searching import Known
from lib.tuning import history
from lib.tuning.base import NONE, BaseModels
from lib.tuning.history import REFIT
from lib.tuning.members import joint_members, members
from lib.tuning.planning import PlanConfig, PlanRow, plan_round, to_refit


class NothingToImprove(TunerError):
    """Every subgraph is exhausted, fails, or has not improved for its patience."""


def run(
    subgraphs: Path,
    families: Path,
    past: Sequence[RoundFiles],
    target: AnyTarget,
    plan_config: PlanConfig,
    search_config: SearchConfig,
    *,
    seed: int,
    provenance: Provenance,
    out: RoundFiles,
    models: Path | None = None,
    shared: Path | None = None,
    bases: BaseModels = NONE,
    recorded: Path | None = None,
) -> Path:
    """Make the candidates of the round after `past`.

    Args:
        subgraphs: A SUBGRAPHS table; `families`: a FAMILIES table for it.
        past: The finished rounds of this run.
        seed: Equal inputs and seeds give equal candidates.
        models: The MODELS table, where these are the subgraphs of several.
        recorded: A folder with CANDIDATES tables: the only candidates that there are.
        bases: The base models; how far they can be trusted decides how many candidates a first look takes.
        out: Gets the PLAN and, last, the CANDIDATES table. Candidates stand in measuring order.

    Raises:
        NothingToImprove: No subgraph is worth another trial.
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    described = tables.read(subgraphs, SUBGRAPHS)
    so_far = history.load(past)
    clustered = tables.read(families, FAMILIES)
    sharing = tables.read(shared, SHARED) if shared else None
    found = (joint_members(described, clustered, tables.read(models, MODELS), so_far, sharing) if models
             else members(described, clustered))  # fmt: skip
    rows = plan_round(so_far, found, plan_config, history.modelled(past))
    if not rows:
        raise NothingToImprove("No subgraph is left that can improve.")
    with clock.spent("search"):
        known = Known(described, clustered, past, so_far, bases)
        searcher = known.searcher(
            target, search_config, digests.seed(seed, out.number), Recorded(recorded) if recorded else None,
            to_refit(so_far, found) if any(row.kind == REFIT for row in rows) else None,
        )  # fmt: skip
        rows = [searcher.choose(rows)] if rows[0].kind == "foresee" else rows
        proposed = list(zip(rows, searcher.propose_all(rows), strict=True))
        rows = [as_it_came_out(row, searcher.enough(row), part) for row, part in proposed]
        proposals = [(row, proposal) for row, part in proposed for proposal in part]
    tables.write(pa.Table.from_pylist([asdict(row) for row in rows], schema=PLAN), out.plan, PLAN, provenance)
    return tables.write(
        candidates(proposals), out.candidates, CANDIDATES, provenance, clock=clock.read(), files=[out.plan]
    )


def candidates(proposals: Sequence[tuple[PlanRow, Proposal]]) -> pa.Table:
    """A CANDIDATES table of what was proposed, in order."""
    return table([(row.subgraph_id, row.family_id, proposal) for row, proposal in proposals])


def as_it_came_out(row: PlanRow, enough: int, proposals: Sequence[Proposal]) -> PlanRow:
    """A row as it came out: a first look takes as many as the model's uncertainty asks for.

    Args:
        enough: See `Searcher.enough`.
    """
    if row.kind != "warm-up" or not any(proposal.score is not None for proposal in proposals):
        return row
    spared = max(0, row.num_trials - max(len(proposals), enough))
    return replace(row, num_trials=len(proposals), note="first look, by model", num_spared=spared)
