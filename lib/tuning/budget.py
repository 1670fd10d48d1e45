"""What a run may cost, what it has cost, and why it ends."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from lib.contracts import tables
from lib.contracts.errors import ConfigError
from lib.contracts.files import RoundFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, TRAINING
from lib.tuning import history, planning
from lib.tuning.history import History
from lib.tuning.planning import Member, PlanConfig

TRIALS_PER_SUBGRAPH = 128  # on average, when no limit is given


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a run; the first that is reached ends it, at the end of a round. None: no such limit."""

    trials: int | None = None  # new ones
    seconds: float | None = None  # of tuning
    latency_s: float | None = None  # of the model, estimated

    def __post_init__(self) -> None:
        given = [value for value in astuple(self) if value is not None]
        if not all(0 <= value < math.inf for value in given):  # false for NaN
            raise ConfigError(
                "--trials, --minutes and --target-latency-ms must be numbers from 0 on, but got "
                f"{self.trials or 0}, {(self.seconds or 0) / 60:g} and {(self.latency_s or 0) * 1e3:g}."
            )

    def or_default(self, past: History, members: Sequence[Member], each: int = TRIALS_PER_SUBGRAPH) -> "Budget":
        """The same, or `default_trials` if there is no limit at all."""
        return self if self != Budget() else Budget(trials=default_trials(past, members, each))


def default_trials(past: History, members: Sequence[Member], each: int) -> int:
    """New trials that a run may have where nobody said how many: `each` for a subgraph, less what is known.

    They are spread by the time that the subgraphs take, so that a new subgraph of a thousandth of the time does not ask
    for as much as one of a half. One is known as far as its share of the trials, or `each`, was measured when the run
    began.

    Args:
        past: Folded rounds, with what was recalled.
    """
    times = [m.weight * past.of(m.subgraph_id).best_s for m in members]
    tried = all(past.of(m.subgraph_id).was_tried for m in members)
    shares = [time if time < math.inf else 0.0 for time in times] if tried else [1.0] * len(members)
    whole = sum(shares) or 1.0
    missing = 0.0
    for member, share in zip(members, shares, strict=True):
        due = each * len(members) * share / whole
        if due:
            missing += due * max(0.0, 1 - past.of(member.subgraph_id).n_recalled / min(due, each))
    return round(missing)


@dataclass(frozen=True, slots=True)
class Spent:
    """Where a run stands after its finished rounds."""

    n_rounds: int
    trials: int
    seconds: float
    latency_s: float  # of the model, estimated; infinity until each subgraph has a program that works
    failures: Counter[str]  # trials by status, but for those that worked


def spent(rounds: Sequence[RoundFiles], weights: Mapping[str, float]) -> Spent:
    """What finished rounds took; what an interrupted one took is not known. What was recalled costs nothing.

    Args:
        weights: Calls of an inference, by subgraph.

    Raises:
        MissingInput, ContractError: See `history.load`.
    """
    past = history.load(rounds)
    seconds = 0.0
    for files in rounds:
        if not files.is_round:
            continue
        for path, schema in ((files.candidates, CANDIDATES), (files.measurements, MEASUREMENTS),
                             (files.training, TRAINING)):  # fmt: skip
            seconds += tables.stamp(path, schema).clock["total"]
    latency_s = history.model_latency_s(past, weights) if rounds else float("inf")
    return Spent(past.n_rounds, past.n_trials, seconds, latency_s, past.failures)


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a run goes on."""

    spent: Spent
    budget: Budget
    ended: str  # why it is over: a limit, or that nothing is left to improve; empty if it goes on
    exhausted: Sequence[tuple[str, str]]  # subgraphs that ask for no more trials, with the reasons

    @property
    def percentage(self) -> int:
        """How much of the trials is used up, of 100; 0 if they are not limited."""
        return min(100, 100 * self.spent.trials // self.budget.trials) if self.budget.trials else 0


def standing(
    rounds: Sequence[RoundFiles],
    members: Sequence[Member],
    budget: Budget,
    config: PlanConfig,
    *,
    foretells: bool = True,
) -> Standing:
    """Where a run stands after its finished rounds.

    Args:
        foretells: What models foretell will do for subgraphs that were not tried when a limit is reached.

    Raises:
        MissingInput, ContractError: See `history.load`.
    """
    past = history.load(rounds)
    so_far = spent(rounds, {member.subgraph_id: member.weight for member in members})
    reasons = [(member.subgraph_id, planning.dead(past.of(member.subgraph_id), config)) for member in members]
    # A model needs something of each subgraph: of one that was never tried what a model foretells, if there is one.
    untried = [member for member in members if not past.of(member.subgraph_id).was_tried]
    modelled = history.modelled(rounds) if untried else set()
    settled = all(member.family_id in modelled for member in untried) if foretells else not untried
    is_enough = settled and not planning.to_refit(past, members)
    over = _reached(budget, so_far) if is_enough or budget.trials == 0 else ""
    if not over and not planning.plan_round(past, members, config, modelled):
        over = "no subgraph is left that can improve"
    return Standing(so_far, budget, over, [(subgraph_id, reason) for subgraph_id, reason in reasons if reason])


def _reached(budget: Budget, so_far: Spent) -> str:
    """Which limit is; empty if none is."""
    if budget.trials is not None and so_far.trials >= budget.trials:
        return f"{so_far.trials} trials"
    if budget.seconds is not None and so_far.seconds >= budget.seconds:
        return f"{so_far.seconds / 60:.1f} minutes"
    if budget.latency_s is not None and so_far.latency_s <= budget.latency_s:
        return f"estimated latency {so_far.latency_s * 1e3:.3f} ms"
    return ""
