"""Plans a round and makes its candidates: subgraphs, families and all that was measured in, candidates out."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import tvm
from tvm.target import Target

from lib.contracts import digests, tables
from lib.contracts.clock import Clock
from lib.contracts.errors import ContractError, TunerError
from lib.contracts.files import RoundFiles
from lib.contracts.schemas import CANDIDATES, FAMILIES, MODELS, PLAN, SUBGRAPHS, TRAINING
from lib.contracts.tables import Provenance
from lib.machine.targets import AnyTarget
from lib.search import evolution
from lib.search.candidates import table
from lib.search.evolution import Measured, Proposal, SearchConfig
from lib.tir.workload import load_workload
from lib.tuning import history
from lib.tuning.cost_model import FamilyModel
from lib.tuning.history import History
from lib.tuning.members import joint_members, members
from lib.tuning.planning import PlanConfig, PlanRow, plan_round

_log = logging.getLogger(__name__)
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
    provenance: Provenance,
    out: RoundFiles,
    models: Path | None = None,
) -> Path:
    """Make the candidates of the round after `past`.

    Args:
        subgraphs: A SUBGRAPHS table; `families`: a FAMILIES table for it.
        past: The finished rounds of this run.
        seed: Equal inputs and seeds give equal candidates.
        models: The MODELS table, where these are the subgraphs of several.
        out: Gets the PLAN and, last, the CANDIDATES table. Candidates stand in measuring order.

    Raises:
        NothingToImprove: No subgraph is worth another trial.
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    described = tables.read(subgraphs, SUBGRAPHS)
    so_far = history.load(past)
    clustered = tables.read(families, FAMILIES)
    found = (joint_members(described, clustered, tables.read(models, MODELS), so_far) if models
             else members(described, clustered))  # fmt: skip
    rows = plan_round(so_far, found, plan_config)
    if not rows:
        raise NothingToImprove("No subgraph is left that can improve.")
    trained = _models(past)
    texts = dict(described.select(["subgraph_id", "workload"]).to_pandas().to_numpy())
    with clock.spent("search"):
        searcher = Searcher(
            texts, so_far, trained, target.tvm(), search_config, evolution.digest_seed(seed, out.number)
        )
        rows = [searcher.choose(rows)] if rows[0].kind == "foresee" else rows
        proposals = [(row, proposal) for row in rows for proposal in searcher.propose(row)]
    tables.write(pa.Table.from_pylist([asdict(row) for row in rows], schema=PLAN), out.plan, PLAN, provenance)
    return tables.write(
        candidates(proposals), out.candidates, CANDIDATES, provenance, clock=clock.read(), files=[out.plan]
    )


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
        """Candidates for one row of the plan, none of them ever measured; fewer if the space has no more.

        None if TVM cannot search the subgraph at all: it is compiled untuned then.
        """
        try:
            return self._propose(row)
        except (RuntimeError, ValueError, LookupError) as error:
            reason = str(error).strip().rpartition("\n")[-1]
            _log.warning("The subgraph %s cannot be searched and stays untuned: %s", row.subgraph_id, reason)
            return []

    def _propose(self, row: PlanRow) -> list[Proposal]:
        workload = load_workload(self._texts[row.subgraph_id])
        seed = evolution.digest_seed(self._seed, row.subgraph_id)
        past = self._history.of(row.subgraph_id)
        model = self._models.get(row.family_id)
        if row.kind == "warm-up":  # the untuned program comes last: the pool times it once if others are faster
            last = evolution.untuned(workload, self._target)
            return [*self._sample(workload, row.num_trials - 1, {last.program_hash}, seed), last]
        if model is None:
            return self._sample(workload, row.num_trials, past.program_hashes, seed)
        parents = [Measured(program.trace, program.latency_s) for program in past.fastest]
        return evolution.evolve(
            workload, self._target, row.num_trials, model=model, parents=parents, known=past.program_hashes, seed=seed,
            config=self._config,
        )  # fmt: skip

    def _sample(self, workload: tvm.IRModule, n: int, known: Collection[str], seed: int) -> list[Proposal]:
        return evolution.sample(workload, self._target, n, known=known, seed=seed, spaces=self._config.offered)

    def choose(self, rows: Sequence[PlanRow]) -> PlanRow:
        """Foresee tuning: the family member for which the model, just updated, sees most to gain.

        Its promise is weighed with how fast the model thinks unmeasured programs are, relative to its best.
        """
        model = self._models.get(rows[0].family_id)
        if model is None or len(rows) == 1:
            return rows[0]
        gains = []
        for row in rows[:_FORESEE_CHOICE]:
            workload = load_workload(self._texts[row.subgraph_id])
            seed = evolution.digest_seed(self._seed, row.subgraph_id, "look")
            found = self._sample(workload, _FORESEE_LOOK, self._history.of(row.subgraph_id).program_hashes, seed)
            scores = model.predict([proposal.features for proposal in found])
            gains.append((row.promise or 0.0) * float(max(scores, default=0.0)))
        return rows[int(np.argmax(gains))]


def candidates(proposals: Sequence[tuple[PlanRow, Proposal]]) -> pa.Table:
    """A CANDIDATES table of what was proposed, in order."""
    return table([(row.subgraph_id, row.family_id, proposal) for row, proposal in proposals])


def _models(past: Sequence[RoundFiles]) -> dict[str, FamilyModel]:
    """The latest model of each family that has one."""
    if not past:
        return {}
    training = tables.read(past[-1].training, TRAINING).select(["family_id", "model", "model_digest"]).to_pylist()
    models = {}
    for row in training:
        if row["model"]:
            path = past[-1].run / row["model"]
            if path.exists() and digests.of_state(path) != row["model_digest"]:  # XGBoost crashes on damaged files
                raise ContractError(
                    f"{path} is damaged: expected the digest {row['model_digest']}, found {digests.of_state(path)}.\n"
                    "Delete it and run `TuneModel` to have it trained again."
                )
            models[row["family_id"]] = FamilyModel.load(path)
    return models
