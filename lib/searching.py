"""What is proposed for the subgraphs of a round: by search under a family's model, by adaptation of what others have.

A subgraph that was never tried gets what its family's model likes best, beside the best traces of others like it,
adapted (Transfer-Tuning): as many as the model's past errors ask for. Without any model it gets random programs.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
from tvm.target import Target

from lib.contracts import digests, tables
from lib.contracts.errors import ContractError
from lib.contracts.files import RoundFiles
from lib.contracts.schemas import TRAINING
from lib.machine import host, intrinsics
from lib.machine.targets import AnyTarget
from lib.search import evolution, features, nest, transfer
from lib.search.evolution import DesignSpace, Measured, Proposal, SearchConfig
from lib.search.recorded import Recorded
from lib.search.transfer import Donor
from lib.tir.traces import EMPTY_TRACE
from lib.tir.workload import load_module
from lib.tuning import history
from lib.tuning.base import BaseModels
from lib.tuning.cost_model import FamilyModel, looks
from lib.tuning.history import History
from lib.tuning.hopeless import is_hopeless
from lib.tuning.members import guess_s, join
from lib.tuning.planning import PlanRow

R = TypeVar("R")

_log = logging.getLogger(__name__)
_FORESEE_CHOICE = 3  # family members that are looked at before one of them gets a foresee round
_FORESEE_LOOK = 16  # programs sampled of each for that look
_DONORS = 3  # whose adapted traces are measured in a first look
_LIGHT = 16  # programs of an island in a first look at a subgraph that only MetaSchedule's space has
# Of a first look: by how much its best may be slower than the best of a longer one, over the whole model. Later rounds,
# if there are any, spend their trials better than a longer look at each subgraph would.
_REGRET = 0.04


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search needs to know of a subgraph."""

    subgraph_id: str
    family_id: str
    workload: str  # JSON
    share: float = 1.0  # of an inference's time, estimated before anything is measured
    regrets: Sequence[float] = ()  # of models of its family on unseen subgraphs; see `cost_model.unseen_regrets`
    spares_untuned: bool = False  # its untuned program is hopeless beside what a model chooses of our spaces


class Known:
    """What a run knows when a search begins: its subgraphs, its past, the latest models, and whose traces may serve."""

    def __init__(
        self,
        subgraphs: pa.Table,
        families: pa.Table,
        past: Sequence[RoundFiles],
        so_far: History,
        bases: BaseModels,
    ) -> None:
        """Read it.

        Args:
            subgraphs: A SUBGRAPHS table; `families`: the FAMILIES table made from it.
            past: The finished rounds, with what was recalled; `so_far`: the same, folded.

        Raises:
            MissingInput, ContractError: A model is not there, or damaged.
        """
        rows = [row for row in join(subgraphs, families) if row["family_id"]]
        times = [guess_s(row["flop"]) * row["weight"] for row in rows]
        learned = _regrets(past)
        self.subgraphs = [
            Searched(row["subgraph_id"], row["family_id"], row["workload"], time / (sum(times) or 1.0),
                     base.regrets if (base := bases.of(row["core_operator"])) else learned.get(row["family_id"], ()),
                     base is not None and is_hopeless(row["flop"]))
            for row, time in zip(rows, times, strict=True)
        ]  # fmt: skip
        self._history, self._models, self._donors = so_far, _models(past), _donors(past, so_far)

    def searcher(
        self,
        target: AnyTarget,
        config: SearchConfig,
        seed: int,
        recorded: Recorded | None = None,
        packings: Mapping[str, str] | None = None,
    ) -> "Searcher":
        """What searches for candidates; equal seeds give equal ones."""
        return Searcher(
            self.subgraphs, self._history, self._models, target.tvm(), config, seed, self._donors, recorded, packings
        )


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


def _regrets(past: Sequence[RoundFiles]) -> dict[str, list[float]]:
    """By family: how its models fare on unseen subgraphs, as far as that is known."""
    if not past:
        return {}
    training = tables.read(past[-1].training, TRAINING)
    return dict(zip(training["family_id"].to_pylist(), training["regrets"].to_pylist(), strict=True))


def _donors(past: Sequence[RoundFiles], so_far: History) -> dict[str, list[Donor]]:
    """By family: the best program of each subgraph of which one worked, with the shape of its workload."""
    found: dict[str, dict[str, Donor]] = {}
    for part in map(history.samples, past):
        for family_id, subgraph_id, vector in zip(part.families, part.subgraphs, part.features, strict=True):
            best = so_far.of(str(subgraph_id)).fastest[:1]
            if best and best[0].trace != EMPTY_TRACE:
                donor = Donor(str(subgraph_id), best[0].trace, vector[: len(nest.CONTEXT)])
                found.setdefault(str(family_id), {})[str(subgraph_id)] = donor
    return {family_id: list(of_family.values()) for family_id, of_family in found.items()}


class Searcher:
    """Searches the spaces of one round's subgraphs."""

    def __init__(
        self,
        subgraphs: Sequence[Searched],
        so_far: History,
        models: Mapping[str, FamilyModel],
        target: Target,
        config: SearchConfig,
        seed: int,
        donors: Mapping[str, Sequence[Donor]] | None = None,
        recorded: Recorded | None = None,
        packings: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing is searched yet.

        Args:
            models: By family.
            donors: By family: the best of other subgraphs.
            recorded: The only candidates that there are; None: whatever the spaces have.
            packings: Of their weights, that candidates of a refit must have, by subgraph.
        """
        self._packings = packings or {}
        self._subgraphs = {each.subgraph_id: each for each in subgraphs}
        self._history, self._models, self._donors = so_far, models, donors or {}
        self._target, self._config, self._seed, self._recorded = target, config, seed, recorded

    def propose_all(self, rows: Sequence[PlanRow]) -> list[list[Proposal]]:
        """What `propose` has for each of them."""
        return self._for_each(self.propose, rows)

    def _for_each(self, search: Callable[[PlanRow], R], rows: Sequence[PlanRow]) -> list[R]:
        """Searches of several rows: for GPUs at a time, since MetaSchedule's hardly ever hold Python's lock. What each
        finds follows from its own seed."""
        if self._target.kind.name == "llvm":
            return [search(row) for row in rows]
        intrinsics.load(self._target)  # once, before there are threads
        with ThreadPoolExecutor(host.physical_cores()) as threads:
            return list(threads.map(search, rows))

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

    def foretell(self, subgraph_id: str, n: int) -> list[Proposal]:
        """The programs of a subgraph that its model likes best, with its donors' among them; without a model or donors
        random ones, which are still far from an untuned program. None where TVM cannot search it."""
        row = PlanRow(subgraph_id, self._subgraphs[subgraph_id].family_id, "foretold", n, None, "")
        try:
            space = self._space(row)
            found = self._first_look(space, row, n) or self._sample(space, row, n, set())
        except (RuntimeError, ValueError, LookupError) as error:
            _log.warning("The subgraph %s cannot be searched and stays untuned: %s", subgraph_id, error)
            return []
        return sorted(found, key=lambda proposal: -(proposal.score or 0.0))[:n]

    def take_over(self, subgraph_id: str, n: int, donors: Collection[str], packing: str | None) -> list[Proposal]:
        """Programs of other subgraphs, adapted to one that is not measured, those that its model likes best; what a
        model foretells where none of its family was measured; none where these are fastest untuned.

        Args:
            donors: The others, if there are any like it; else the nearest of its family are asked.
            packing: Of weights, which the programs are to have; None: any.
        """
        searched = self._subgraphs[subgraph_id]
        row = PlanRow(subgraph_id, searched.family_id, history.FORETOLD, n, None, "")
        family = self._donors.get(row.family_id, ())
        asked = [donor for donor in family if donor.subgraph_id in donors] or family
        if not family and self._is_measured(row.family_id):
            return []
        try:
            space, model = self._space(row), self._models.get(row.family_id)
            found = transfer.taken_over(space, asked, n, model, packing)
            if not found and packing:
                found = evolution.packed(
                    space, n, packing, model=model, parents=(), known=(), seed=self._seed_of(row), config=self._config
                )
        except (RuntimeError, ValueError, LookupError) as error:
            _log.warning("The subgraph %s cannot be searched and stays untuned: %s", subgraph_id, error)
            return []
        return found or self.foretell(subgraph_id, n)

    def _is_measured(self, family_id: str) -> bool:
        """Whether something of a family works."""
        of_family = [each.subgraph_id for each in self._subgraphs.values() if each.family_id == family_id]
        return any(self._history.of(subgraph_id).fastest for subgraph_id in of_family)

    def _propose(self, row: PlanRow) -> list[Proposal]:
        if self._recorded:
            return self._of_recorded(row, self._recorded)
        space, past = self._space(row), self._history.of(row.subgraph_id)
        model = self._models.get(row.family_id)
        if row.kind == "warm-up":  # the untuned program comes last: the pool times it once if others are faster
            last = evolution.untuned(space.workload, self._target)
            found = self._first_look(space, row, self.enough(row))
            if model is None:
                taken = {last.program_hash, *(proposal.program_hash for proposal in found)}
                found = [*found, *self._sample(space, row, row.num_trials - 1 - len(found), taken)]
            is_chosen = model is not None and space.own and found
            return found if is_chosen and self._subgraphs[row.subgraph_id].spares_untuned else [*found, last]
        parents = [Measured(program.trace, program.latency_s) for program in past.fastest]
        if row.kind == history.REFIT:
            return evolution.packed(
                space, row.num_trials, self._packings[row.subgraph_id], model=model, parents=parents, known=past.known,
                seed=self._seed_of(row), config=self._config,
            )  # fmt: skip
        if model is None:
            return self._sample(space, row, row.num_trials, past.known)
        return evolution.evolve(
            space, row.num_trials, model=model, parents=parents, known=past.known, seed=self._seed_of(row),
            config=self._config,
        )  # fmt: skip

    def _space(self, row: PlanRow) -> DesignSpace:
        workload = load_module(self._subgraphs[row.subgraph_id].workload)
        return DesignSpace(workload, self._target, self._config.offered, self._seed_of(row))

    def _seed_of(self, row: PlanRow, *what: str) -> int:
        return digests.seed(self._seed, row.subgraph_id, *what)

    def _of_recorded(self, row: PlanRow, recorded: Recorded) -> list[Proposal]:
        seed, n = self._seed_of(row), row.num_trials
        known, model = self._history.of(row.subgraph_id).known, self._models.get(row.family_id)
        if model is None:
            return recorded.sample(row.subgraph_id, n, known, seed)
        if row.kind == "warm-up":
            return recorded.best(row.subgraph_id, self.enough(row), model, known, seed, random_share=0.0)
        return recorded.best(row.subgraph_id, n, model, known, seed, self._config.random_share)

    def enough(self, row: PlanRow) -> int:
        """Programs of a row; of a first look, the untuned one left out, as few as keep its regret small: by what those
        of models were on subgraphs that they had not seen, and by the share of the time that the subgraph has."""
        if row.kind != "warm-up":
            return row.num_trials
        searched = self._subgraphs[row.subgraph_id]
        most = row.num_trials - 1
        if not searched.regrets or row.family_id not in self._models:
            return most
        tolerated = _REGRET / max(searched.share * len(self._subgraphs), 1e-9)
        return min(most, looks(searched.regrets, tolerated))

    def _first_look(self, space: DesignSpace, row: PlanRow, n: int) -> list[Proposal]:
        """Up to n programs that the model likes best, and some adapted ones beside them."""
        adapted, model = self._adapted(space, row), self._models.get(row.family_id)
        if model is None:
            return adapted
        found = evolution.evolve(
            space, n, model=model, parents=[Measured(each.trace, 0.0) for each in adapted], known=(),
            seed=self._seed_of(row), config=self._config if space.own else self._light, n_random=0,
        )  # fmt: skip
        by_hash = {each.program_hash: each for each in [*found, *adapted]}  # what both propose is called adapted
        return list(by_hash.values())

    def _adapted(self, space: DesignSpace, row: PlanRow) -> list[Proposal]:
        """The traces of the donors most like a subgraph, adapted, with what the model makes of them."""
        family, model = self._donors.get(row.family_id, ()), self._models.get(row.family_id)
        found = transfer.adapted(space, [donor for donor in family if donor.subgraph_id != row.subgraph_id], _DONORS)
        if model is None:
            return found
        scores = model.predict(features.padded([proposal.features for proposal in found]))
        return [replace(each, score=float(score)) for each, score in zip(found, scores, strict=True)]

    @property
    def _light(self) -> SearchConfig:
        """The effort of a first look in MetaSchedule's space, where a whole search takes four seconds."""
        return replace(self._config, population=_LIGHT * self._config.islands, generations=1)

    def _sample(self, space: DesignSpace, row: PlanRow, n: int, known: Collection[str]) -> list[Proposal]:
        return evolution.sampled(space, n, known=known, seed=self._seed_of(row))

    def choose(self, rows: Sequence[PlanRow]) -> PlanRow:
        """Foresee tuning: the family member for which the model, just updated, sees most to gain.

        Its promise is weighed with how fast the model thinks unmeasured programs are, relative to its best.
        """
        model = self._models.get(rows[0].family_id)
        if model is None or len(rows) == 1:
            return rows[0]
        looked = self._for_each(lambda row: self._look(row, model), rows[:_FORESEE_CHOICE])
        gains = [(row.promise or 0.0) * np.exp(gain) for row, gain in zip(rows, looked, strict=False)]
        return rows[int(np.argmax(gains))]

    def _look(self, row: PlanRow, model: FamilyModel) -> float:
        """See `evolution.look`; from the best program of a subgraph."""
        seed = self._seed_of(row, "look")
        past = self._history.of(row.subgraph_id)
        if self._recorded:
            best = past.fastest[0].trace if past.fastest else ""
            return self._recorded.look(row.subgraph_id, _FORESEE_LOOK, model, best, past.known, seed)
        return evolution.look(
            self._space(row), _FORESEE_LOOK, model=model,
            parents=[Measured(each.trace, each.latency_s) for each in past.fastest[:1]], known=past.known, seed=seed,
            config=self._config,
        )  # fmt: skip
