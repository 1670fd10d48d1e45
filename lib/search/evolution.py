"""New candidates for one workload: MetaSchedule's evolutionary search in one space, guided by a cost model.

Each call starts from what was measured, so that a search keeps no state but the tables. It runs on a fixed number of
islands, each on one thread with its own seed: TVM's own threads take work dynamically, so that with more than one of
them the same seed gives other candidates each time.
"""

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from lib.contracts import digests
from lib.contracts.errors import ConfigError
from lib.machine import intrinsics
from lib.search import features
from lib.search.spaces.generators import generator, has_choices
from lib.search.spaces.space import Space
from lib.search.spaces.table import SPACES, fitting
from lib.tir import lowering
from lib.tir.traces import EMPTY_TRACE, apply, to_json
from lib.tir.workload import program_hash

_log = logging.getLogger(__name__)

METASCHEDULE = "metaschedule"  # the space that TVM has for every workload, as CANDIDATES names it
NO_SPACE = "none"  # of the untuned program
SPACE_CHOICES = ("own", METASCHEDULE)


class Scorer(Protocol):
    """A trained cost model."""

    def predict(self, features: Sequence[np.ndarray]) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """Effort of one search."""

    population: int = 128  # programs in a generation, over all islands
    generations: int = 4
    islands: int = 2  # searched in parallel; part of the run, since it decides the candidates
    random_share: float = 0.05  # of a round's candidates, sampled without asking the model
    measured_share: float = 0.2  # of a population, from the best measured programs
    spaces: str = "own"  # this project's where one fits; or `metaschedule`: TVM's for all workloads

    def __post_init__(self) -> None:
        if self.islands < 1 or self.population < 8 * self.islands:
            raise ConfigError(f"[generate] needs at least 8 programs an island, but got {self}.")
        if not (0 <= self.random_share <= 1 and 0 <= self.measured_share < 1):
            raise ConfigError(f"[generate] shares must lie in [0, 1), but got {self}.")
        if self.spaces not in SPACE_CHOICES:
            raise ConfigError(f"[generate] spaces must be one of {', '.join(SPACE_CHOICES)}, but got {self.spaces!r}.")

    @property
    def offered(self) -> Sequence[Space]:
        """The spaces that workloads are offered before MetaSchedule's."""
        return SPACES if self.spaces == "own" else ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """A program that was not measured yet; see CANDIDATES."""

    trace: str  # JSON
    program_hash: str
    origin: str  # untuned | sampled | evolved | imported
    space: str  # its name, `metaschedule`, `none` if untuned, or `imported`
    score: float | None
    features: np.ndarray  # n_stores x 164


@dataclass(frozen=True, slots=True)
class Measured:
    """A program that was measured: a parent for new ones."""

    trace: str  # JSON
    latency_s: float


def untuned(workload: tvm.IRModule, target: Target) -> Proposal:
    """The workload as TVM compiles it without a schedule."""
    intrinsics.load(target)
    context = ms.TuneContext(mod=workload, target=target, num_threads=1)
    schedule = Schedule(lowering.scheduled(workload, target), debug_mask="none")
    matrix = features.extract(context, [schedule])[0]
    return Proposal(EMPTY_TRACE, program_hash(schedule.mod), "untuned", NO_SPACE, None, matrix)


def sample(
    workload: tvm.IRModule,
    target: Target,
    n: int,
    *,
    known: Collection[str],
    seed: int,
    spaces: Sequence[Space] = SPACES,
) -> list[Proposal]:
    """Up to n random programs, none of them in `known`.

    Args:
        known: Hashes of programs (`program_hash`).
        seed: Equal seeds and arguments give equal candidates.
        spaces: The first of them that fits is sampled; else MetaSchedule's, also where that one fails or has nothing to
            choose.
    """
    found = _sample_schedules(_Problem(workload, target, spaces), n, seed)
    fresh = list(_distinct(found.schedules, known).items())[:n]
    context = ms.TuneContext(mod=workload, target=target, num_threads=1)
    matrices = features.extract(context, [schedule for _, schedule in fresh])
    return [
        Proposal(to_json(schedule), key, "sampled", found.space, None, matrix)
        for (key, schedule), matrix in zip(fresh, matrices, strict=True)
    ]


def evolve(
    workload: tvm.IRModule,
    target: Target,
    n: int,
    *,
    model: Scorer,
    parents: Sequence[Measured],
    known: Collection[str],
    seed: int,
    config: SearchConfig,
) -> list[Proposal]:
    """Up to n programs that the model scores best, with a few random ones; none of them in `known`.

    Args:
        parents: Measured programs, the fastest first; they join the first generation.
        known: Hashes of every program that was ever measured (`program_hash`).
        seed: Equal seeds and arguments give equal candidates.
        config: Its `spaces` are as in `sample`.
    """
    n_random = min(n, max(1, round(config.random_share * n)))
    search = _Evolution(_Problem(workload, target, config.offered), model, known, n, config)

    def island(number: int) -> list[Proposal]:
        return search.island(parents[number :: config.islands], digest_seed(seed, "island", number))

    with ThreadPoolExecutor(config.islands) as threads:
        found = [proposal for part in threads.map(island, range(config.islands)) for proposal in part]
    found.sort(key=lambda proposal: -(proposal.score or 0.0))
    best = _distinct_proposals(found)[: n - n_random]
    taken = {*known, *(proposal.program_hash for proposal in best)}
    random_seed = digest_seed(seed, "random")
    random = sample(workload, target, n - len(best), known=taken, seed=random_seed, spaces=config.offered)
    scores = model.predict([proposal.features for proposal in random])
    return best + [replace(proposal, score=float(score)) for proposal, score in zip(random, scores, strict=True)]


def digest_seed(*parts: object) -> int:
    """A seed for TVM, in [1, 2**31 - 1), from anything with a stable text."""
    return int(digests.of_text(*map(str, parts)), 16) % (2**31 - 2) + 1


@derived_object
class _Guide(ms.cost_model.PyCostModel):
    """Scores for TVM's search; caches them, so that no program's features are computed twice."""

    def __init__(self, model: Scorer) -> None:
        super().__init__()
        self.model = model
        self.seen: dict[str, tuple[np.ndarray, float]] = {}  # by program hash: features, score

    def predict(self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate]) -> np.ndarray:
        hashes = [program_hash(candidate.sch.mod) for candidate in candidates]
        new = {key: c.sch for key, c in zip(hashes, candidates, strict=True) if key not in self.seen}
        matrices = features.extract(context, list(new.values()))
        for key, matrix, score in zip(new, matrices, self.model.predict(matrices), strict=True):
            self.seen[key] = (matrix, float(score))
        return np.array([self.seen[key][1] for key in hashes], dtype=np.float64)

    def load(self, path: str) -> None: ...

    def save(self, path: str) -> None: ...

    def update(self, context: ms.TuneContext, candidates: Any, results: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _Problem:
    """What is searched."""

    workload: tvm.IRModule
    target: Target
    spaces: Sequence[Space]  # offered in this order, before MetaSchedule's


@dataclass(frozen=True, slots=True)
class _Strategy:
    """How TVM searches a space."""

    search: ms.search_strategy.SearchStrategy
    n: int  # programs asked for
    seed: int
    database: ms.database.MemoryDatabase
    cost_model: ms.cost_model.CostModel


@dataclass(frozen=True, slots=True)
class _Found:
    """Programs of one space; equal ones may be among them."""

    space: str
    schedules: list[Schedule]


@dataclass(frozen=True, slots=True)
class _Evolution:
    """An evolutionary search for n programs that are not known."""

    problem: _Problem
    model: Scorer
    known: Collection[str]
    n: int
    config: SearchConfig

    def island(self, parents: Sequence[Measured], seed: int) -> list[Proposal]:
        """What one island finds."""
        population = self.config.population // self.config.islands
        parents = parents[: int(self.config.measured_share * population)]
        search = ms.search_strategy.EvolutionarySearch(
            population_size=population,
            init_measured_ratio=self.config.measured_share,
            init_min_unmeasured=population - len(parents),
            max_fail_count=10,  # of sampling a whole generation in vain
            genetic_num_iters=self.config.generations,
            eps_greedy=0.0,  # random candidates are added outside, where they can be told apart
        )
        guide = _Guide(self.model)
        # Parents may come up again; asking for as many more leaves n new ones.
        strategy = _Strategy(search, self.n + len(parents), seed, _database(self.problem, parents), guide)
        found = _generate(self.problem, strategy)
        proposals = []
        for key, schedule in _distinct(found.schedules, self.known).items():
            matrix, score = guide.seen[key]
            proposals.append(Proposal(to_json(schedule), key, "evolved", found.space, score, matrix))
        return proposals


def _sample_schedules(problem: _Problem, n: int, seed: int) -> _Found:
    if n <= 0:
        return _Found(NO_SPACE, [])
    search = ms.search_strategy.ReplayTrace(max_fail_count=20)
    # Small spaces repeat themselves: half as many again finds n distinct ones, or shows that there are fewer.
    n_asked = n + n // 2 + 1
    database, model = ms.database.MemoryDatabase(), ms.cost_model.RandomModel()
    return _generate(problem, _Strategy(search, n_asked, seed, database, model))


def _generate(problem: _Problem, strategy: _Strategy) -> _Found:
    """Programs of the space that fits; of MetaSchedule's where none does, or that one fails or has no choices."""
    space = fitting(problem.workload, problem.target, problem.spaces)
    if space is not None:
        try:
            rules = generator(space, problem.workload, problem.target, strategy.seed)
            found = _generate_in(rules, problem, strategy, needs_choices=True)
        except (RuntimeError, ValueError, LookupError) as error:
            # A night's run does not end with what one space overlooked.
            reason = str(error).strip().rpartition("\n")[-1]
            _log.warning("The space %r fails on a workload, which gets MetaSchedule's instead: %s", space.name, reason)
            found = None
        if found is not None:
            return _Found(space.name, found)
    return _Found(METASCHEDULE, _generate_in("post-order-apply", problem, strategy) or [])


def _generate_in(
    rules: ms.space_generator.SpaceGenerator | str, problem: _Problem, strategy: _Strategy, needs_choices: bool = False
) -> list[Schedule] | None:
    """Programs of one space; None if choices are needed, and its sketches have none."""
    intrinsics.load(problem.target)
    context = ms.TuneContext(
        mod=problem.workload, target=problem.target, space_generator=rules, search_strategy=strategy.search,
        task_name="main", rand_state=strategy.seed, num_threads=1,
    )  # fmt: skip
    sketches = context.generate_design_space()
    if needs_choices and not has_choices(sketches):
        return None
    context.pre_tuning(
        max_trials=strategy.n, num_trials_per_iter=strategy.n, design_spaces=sketches, database=strategy.database,
        cost_model=strategy.cost_model,
    )  # fmt: skip
    try:
        return [candidate.sch for candidate in context.generate_measure_candidates() or []]
    finally:
        context.post_tuning()


def _database(problem: _Problem, parents: Sequence[Measured]) -> ms.database.MemoryDatabase:
    database = ms.database.MemoryDatabase()
    token = database.commit_workload(problem.workload)
    for parent in parents:
        trace = apply(problem.workload, parent.trace).trace
        record = ms.database.TuningRecord(trace, token, [parent.latency_s], problem.target, None)
        database.commit_tuning_record(record)
    return database


def _distinct(schedules: Sequence[Schedule], known: Collection[str]) -> dict[str, Schedule]:
    """Schedules by the hashes of their programs, but for those that are known."""
    found: dict[str, Schedule] = {}
    for schedule in schedules:
        key = program_hash(schedule.mod)
        if key not in known:
            found.setdefault(key, schedule)
    return found


def _distinct_proposals(proposals: Sequence[Proposal]) -> list[Proposal]:
    return list({proposal.program_hash: proposal for proposal in reversed(proposals)}.values())[::-1]
