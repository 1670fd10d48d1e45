"""Which subgraph is worth the next trials: the gradient, foresee tuning, round-robin. Pure.

Sources: the gradient is Ansor's (OSDI 2020, section 6) as MetaSchedule's GradientBased scheduler has it;
foresee tuning is FamilySeer's (ICPP 2023, section 4.3).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lib.contracts.errors import ConfigError
from lib.contracts.statuses import Status
from lib.tuning import agreement
from lib.tuning.agreement import Sharing
from lib.tuning.history import REFIT, History, SubgraphHistory

_REFITTED = 4  # programs of a subgraph with the packing that others with its weights have
STRATEGIES = ("foresee", "gradient", "round-robin")


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """How a run spends its trials."""

    strategy: str = "foresee"
    foresee: float = 0.25  # beta: share of a round that the bottleneck's family gets after it
    num_trials_per_round: int = 64
    num_trials_warmup: int = 10  # of each subgraph when it is tried first, the untuned program among them
    num_first_looks: int = 20  # subgraphs that are tried first in one round
    alpha: float = 0.2  # weight of past improvement against what is left to gain
    backward_window: int = 3  # rounds over which past improvement is measured
    patience: int = 512  # trials without an improvement of 1 % after which a subgraph asks for no more

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"--strategy must be one of {', '.join(STRATEGIES)}, but got {self.strategy!r}.")
        if not 0 <= self.foresee <= 1:
            raise ConfigError(f"--foresee is a share of a round, between 0 and 1, but got {self.foresee}.")
        if min(self.num_trials_per_round, self.num_first_looks) < 1 or self.num_trials_warmup < 2:
            raise ConfigError(
                "[plan] needs num_trials_per_round >= 1, num_first_looks >= 1 and num_trials_warmup >= 2, but got "
                f"{self}."
            )


@dataclass(frozen=True, slots=True)
class Member:
    """What planning needs to know of a subgraph."""

    subgraph_id: str
    family_id: str
    weight: float  # calls of an inference; of several models together: what a second of it counts
    group: int = 0  # members of a lower one are tried first
    guess_s: float = 1.0  # of a call, before anything is measured
    shares: str = ""  # members with the same text are to pack their weights alike


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A row of PLAN; see there for units."""

    subgraph_id: str
    family_id: str
    kind: str  # recalled | exhausted | warm-up | refit | bottleneck | foresee | turn
    num_trials: int
    promise: float | None
    note: str
    num_spared: int = 0


def plan_round(
    history: History, members: Sequence[Member], config: PlanConfig, modelled: Collection[str] = ()
) -> list[PlanRow]:
    """The next round's choice.

    Args:
        modelled: The families that have a model already.

    Returns:
        While there are subgraphs that were never tried: first looks at some of them. Of a model in several shapes, then
        a row for each subgraph that lacks the packing of its weights. Then: one row, or, for a foresee round, one for
        each member of the family that may be chosen, the most promising first: whoever searches picks one by what the
        cost model predicts of its programs. Empty when nothing is left that can improve.
    """
    untried = [m for m in members if not history.of(m.subgraph_id).was_tried]
    if untried:
        return _first_looks(untried, config, modelled)
    if lacking := to_refit(history, members):
        n = _REFITTED
        return [PlanRow(m.subgraph_id, m.family_id, REFIT, n, None, "packed as in other shapes")
                for m in members if m.subgraph_id in lacking]  # fmt: skip
    alive = [m for m in members if not dead(history.of(m.subgraph_id), config)]
    if config.strategy == "round-robin":
        return _turn(history, members, alive, config)
    by_promise = sorted(alive, key=lambda m: (-promise(history.of(m.subgraph_id), m.weight, config), m.subgraph_id))
    n_foresee = round(config.foresee * config.num_trials_per_round)
    if config.strategy == "foresee" and history.last_kind == "bottleneck" and n_foresee:
        family = [
            m for m in by_promise if m.family_id == history.last_family and m.subgraph_id != history.last_subgraph
        ]
        if family:
            note = f"family of {history.last_subgraph}"
            return [_row(m, "foresee", n_foresee, history, config, note) for m in family]
    return [
        _row(m, "bottleneck", config.num_trials_per_round, history, config, "largest promise") for m in by_promise[:1]
    ]


def _first_looks(untried: Sequence[Member], config: PlanConfig, modelled: Collection[str]) -> list[PlanRow]:
    """A few, of the first group: those of which no model tells anything, then by their time.

    So a run whose time is short ends between them, with what matters most measured and a model for what does not; and
    models learn from one round for the first looks of the next.
    """
    first, n = min(m.group for m in untried), config.num_trials_warmup
    ranked = sorted(
        (m for m in untried if m.group == first), key=lambda m: (m.family_id in modelled, -m.weight * m.guess_s)
    )
    return [
        PlanRow(m.subgraph_id, m.family_id, "warm-up", n, None, "first look") for m in ranked[: config.num_first_looks]
    ]


def to_refit(history: History, members: Sequence[Member]) -> dict[str, str]:
    """Members that lack a program with the packing that others with their weights have, with that packing."""
    return agreement.lacking(sharing(members), history)


def sharing(members: Sequence[Member]) -> list[Sharing]:
    """Those that share weights with others."""
    return [Sharing(m.subgraph_id, m.shares, m.weight) for m in members if m.shares]


def promise(past: SubgraphHistory, weight: float, config: PlanConfig) -> float:
    """Seconds of an inference that the next round of a subgraph may save: Ansor's gradient.

    `weight * (alpha * (b[t - window] - b[t]) / window + (1 - alpha) * b[t] / t)` for latencies b after each of
    its t rounds. One without a working program yet has no latency to lose, and promises nothing.
    """
    curve = past.best_after
    if not curve or curve[-1] == float("inf"):
        return 0.0
    finite = [latency for latency in curve if latency != float("inf")]
    window = min(config.backward_window, len(finite) - 1)
    gained = (finite[-1 - window] - finite[-1]) / window if window else 0.0
    return weight * (config.alpha * gained + (1 - config.alpha) * finite[-1] / len(curve))


def dead(past: SubgraphHistory, config: PlanConfig) -> str:
    """Why a subgraph asks for no more trials; empty if it does."""
    if past.n_trials and not past.statuses[Status.OK]:
        return f"none of its {past.n_trials} candidates worked"
    if past.is_exhausted:
        return "its space is exhausted"
    for latency, trials in zip(past.best_after, past.trials_after, strict=True):
        if latency <= past.best_s * 1.01:
            waited = past.n_trials - trials
            return f"no improvement in {waited} trials" if waited >= config.patience else ""
    return ""


def _turn(history: History, members: Sequence[Member], alive: Sequence[Member], config: PlanConfig) -> list[PlanRow]:
    """The next living subgraph after the last one, in the order of the table."""
    order = [m.subgraph_id for m in members]
    last = order.index(history.last_subgraph) if history.last_kind == "turn" else -1
    following = sorted(alive, key=lambda m: (order.index(m.subgraph_id) - last - 1) % len(order))
    return [_row(m, "turn", config.num_trials_per_round, history, config, "its turn") for m in following[:1]]


def _row(member: Member, kind: str, n: int, history: History, config: PlanConfig, note: str) -> PlanRow:
    gain = promise(history.of(member.subgraph_id), member.weight, config)
    return PlanRow(member.subgraph_id, member.family_id, kind, n, gain, note)
