"""Plans a round and makes its candidates: subgraphs, families and all that was measured in, candidates out."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
from tvm.target import Target

from lib import digests, history, search, tables, workloads
from lib.clock import Clock
from lib.cost_model import FamilyModel
from lib.errors import TunerError
from lib.history import History
from lib.layout import RoundFiles
from lib.planning import Member, PlanConfig, PlanRow, plan_round
from lib.schemas import CANDIDATES, FAMILIES, N_FEATURES, PLAN, SUBGRAPHS, TRAINING
from lib.search import Measured, Proposal, SearchConfig
from lib.tables import Origin
from lib.targets import AnyTarget

_FORESEE_CHOICE = 3  # family members that are looked at before one of them gets a foresee round
_FORESEE_LOOK = 16  # programs sampled of each for that look


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
    origin: Origin,
    out: RoundFiles,
) -> Path:
    """Make the candidates of the round after `past`.

    Args:
        subgraphs: A SUBGRAPHS table; `families`: a FAMILIES table for it.
        past: The finished rounds of this run.
        seed: Equal inputs and seeds give equal candidates.
        out: Gets the PLAN and, last, the CANDIDATES table. Candidates stand in measuring order.

    Raises:
        NothingToImprove: No subgraph is worth another trial.
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    programs = {row["subgraph_id"]: row for row in tables.read(subgraphs, SUBGRAPHS).to_pylist()}
    members = [
        Member(row["subgraph_id"], row["family_id"], programs[row["subgraph_id"]]["weight"])
        for row in tables.read(families, FAMILIES).to_pylist()
    ]
    so_far = history.load(past)
    rows = plan_round(so_far, members, plan_config)
    if not rows:
        raise NothingToImprove("No subgraph is left that can improve.")
    models = _models(past)
    texts = {subgraph_id: row["workload"] for subgraph_id, row in programs.items()}
    with clock.spent("search"):
        searcher = Searcher(texts, so_far, models, target.tvm(), search_config, search.digest_seed(seed, out.number))
        rows = [searcher.choose(rows)] if rows[0].kind == "foresee" else rows
        proposals = [(row, proposal) for row in rows for proposal in searcher.propose(row)]
    tables.write(pa.Table.from_pylist([asdict(row) for row in rows], schema=PLAN), out.plan, PLAN, origin)
    return tables.write(candidates(proposals), out.candidates, CANDIDATES, origin, clock=clock.read(), files=[out.plan])


class Searcher:
    """Searches the spaces of one round's subgraphs."""

    def __init__(
        self,
        workload_texts: dict[str, str],
        so_far: History,
        models: dict[str, FamilyModel],
        target: Target,
        config: SearchConfig,
        seed: int,
    ) -> None:
        self._texts, self._history, self._models = workload_texts, so_far, models
        self._target, self._config, self._seed = target, config, seed

    def propose(self, row: PlanRow) -> list[Proposal]:
        """Candidates for one row of the plan, none of them ever measured; fewer if the space has no more."""
        workload = workloads.load(self._texts[row.subgraph_id])
        seed = search.digest_seed(self._seed, row.subgraph_id)
        past = self._history.of(row.subgraph_id)
        model = self._models.get(row.family_id)
        if row.kind == "warm-up":  # the untuned program comes last: the pool times it once if others are faster
            last = search.untuned(workload, self._target)
            sampled = search.sample(workload, self._target, row.num_trials - 1, known={last.program}, seed=seed)
            return [*sampled, last]
        if model is None:
            return search.sample(workload, self._target, row.num_trials, known=past.programs, seed=seed)
        parents = [Measured(program.trace, program.latency_s) for program in past.fastest]
        return search.evolve(
            workload, self._target, row.num_trials, model=model, parents=parents, known=past.programs, seed=seed,
            config=self._config,
        )  # fmt: skip

    def choose(self, rows: Sequence[PlanRow]) -> PlanRow:
        """Foresee tuning: the family member for which the model, just updated, sees most to gain.

        Its promise is weighed with how fast the model thinks unmeasured programs are, relative to its best.
        """
        model = self._models.get(rows[0].family_id)
        if model is None or len(rows) == 1:
            return rows[0]
        gains = []
        for row in rows[:_FORESEE_CHOICE]:
            workload = workloads.load(self._texts[row.subgraph_id])
            seed = search.digest_seed(self._seed, row.subgraph_id, "look")
            known = self._history.of(row.subgraph_id).programs
            found = search.sample(workload, self._target, _FORESEE_LOOK, known=known, seed=seed)
            scores = model.predict([proposal.features for proposal in found])
            gains.append((row.promise or 0.0) * float(max(scores, default=0.0)))
        return rows[int(np.argmax(gains))]


def candidates(proposals: Sequence[tuple[PlanRow, Proposal]]) -> pa.Table:
    """A CANDIDATES table of what was proposed, in order."""
    matrices = [proposal.features for _, proposal in proposals]
    flat = np.concatenate([np.zeros((0, N_FEATURES), np.float32), *matrices]).astype(np.float32)
    field = CANDIDATES.field("features").type
    rows = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), type=field.value_type)
    offsets = np.concatenate([[0], np.cumsum([len(matrix) for matrix in matrices])]).astype(np.int32)
    columns = {
        "candidate_id": [digests.of_text(row.subgraph_id, proposal.trace) for row, proposal in proposals],
        "subgraph_id": [row.subgraph_id for row, _ in proposals],
        "family_id": [row.family_id for row, _ in proposals],
        "origin": [proposal.origin for _, proposal in proposals],
        "program": [proposal.program for _, proposal in proposals],
        "score": [proposal.score for _, proposal in proposals],
        "trace": [proposal.trace for _, proposal in proposals],
    }
    arrays = [pa.array(columns[name], CANDIDATES.field(name).type) for name in columns]
    features = pa.ListArray.from_arrays(pa.array(offsets), rows, type=field)
    return pa.Table.from_arrays([*arrays, features], schema=CANDIDATES.remove_metadata()).cast(CANDIDATES)


def _models(past: Sequence[RoundFiles]) -> dict[str, FamilyModel]:
    """The latest model of each family that has one."""
    if not past:
        return {}
    training = tables.read(past[-1].training, TRAINING).select(["family_id", "model"]).to_pylist()
    return {row["family_id"]: FamilyModel.load(past[-1].run / row["model"]) for row in training if row["model"]}
