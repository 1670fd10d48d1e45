"""New candidates for one workload: MetaSchedule's space, mutators and evolutionary search, guided by a model.

Each call starts afresh from what was measured, so that a search needs no memory but the tables. The search
runs on a fixed number of islands, each on one thread with its own seed: TVM's own threads share out work as
it comes, so with more than one of them the same seed gives other candidates each time.
"""

import json
import logging
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.space_generator import SpaceGenerator
from tvm.s_tir.schedule import Trace
from tvm.target import Target

from lib import backends, digests, features, spaces, workloads
from lib.errors import ConfigError

_log = logging.getLogger(__name__)

EMPTY_TRACE = "[[], []]"


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

    def __post_init__(self) -> None:
        if self.islands < 1 or self.population < 8 * self.islands:
            raise ConfigError(f"[generate] needs at least 8 programs an island, but got {self}.")
        if not (0 <= self.random_share <= 1 and 0 <= self.measured_share < 1):
            raise ConfigError(f"[generate] shares must lie in [0, 1), but got {self}.")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A program that was not measured yet."""

    trace: str  # JSON
    program: str  # structural hash
    origin: str  # untuned | sampled | evolved
    score: float | None
    features: np.ndarray  # n_stores x 164


@dataclass(frozen=True, slots=True)
class Measured:
    """A program that was measured: a parent for new ones."""

    trace: str  # JSON
    latency_s: float


def untuned(workload: tvm.IRModule, target: Target) -> Proposal:
    """The workload as TVM compiles it without a schedule."""
    context = ms.TuneContext(mod=workload, target=target, num_threads=1)
    schedule = Schedule(backends.scheduled(workload, target), debug_mask="none")
    return Proposal(
        EMPTY_TRACE,
        workloads.program_hash(schedule.mod),
        "untuned",
        None,
        features.extract(context, [schedule])[0],
    )


def sample(workload: tvm.IRModule, target: Target, n: int, *, known: Collection[str], seed: int) -> list[Proposal]:
    """Up to n random programs of the space, none of them in `known`."""
    schedules = _replay_random(workload, target, n, seed)
    fresh = _distinct(schedules, known)[:n]
    context = ms.TuneContext(mod=workload, target=target, num_threads=1)
    matrices = features.extract(context, [schedule for schedule, _ in fresh])
    return [
        Proposal(_trace_text(schedule), program, "sampled", None, matrix)
        for (schedule, program), matrix in zip(fresh, matrices, strict=True)
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
        known: Structural hashes of every program that was ever measured.
        seed: Equal seeds and arguments give equal candidates.
    """
    n_random = min(n, max(1, round(config.random_share * n)))

    def island(number: int) -> list[Proposal]:
        mine = parents[number :: config.islands]
        return _evolve_island(workload, target, n, model, mine, known, digest_seed(seed, "island", number), config)

    with ThreadPoolExecutor(config.islands) as threads:
        found = [proposal for part in threads.map(island, range(config.islands)) for proposal in part]
    found.sort(key=lambda proposal: -(proposal.score or 0.0))
    best = _distinct_proposals(found)[: n - n_random]
    taken = {*known, *(proposal.program for proposal in best)}
    random = sample(workload, target, n - len(best), known=taken, seed=digest_seed(seed, "random"))
    scores = model.predict([proposal.features for proposal in random])
    return best + [
        Proposal(p.trace, p.program, p.origin, float(score), p.features)
        for p, score in zip(random, scores, strict=True)
    ]


def digest_seed(*parts: object) -> int:
    """A seed for TVM, in [1, 2**31 - 1), from anything with a stable text."""
    return int(digests.of_text(*map(str, parts)), 16) % (2**31 - 2) + 1


def program(workload: tvm.IRModule, trace: str, target: Target) -> tvm.IRModule:
    """A workload under a trace; the empty trace stands for what TVM does untuned.

    Raises:
        Exception: Whatever TVM raises when a trace does not fit.
    """
    return backends.scheduled(workload, target) if trace == EMPTY_TRACE else apply(workload, trace).mod


def apply(workload: tvm.IRModule, trace: str) -> Schedule:
    """Replay a trace, postprocessors included.

    Raises:
        Exception: Whatever TVM raises when a trace does not fit.
    """
    schedule = Schedule(workload, debug_mask="none")
    Trace.apply_json_to_schedule(json.loads(trace), schedule)
    return schedule


@derived_object
class _Guide(ms.cost_model.PyCostModel):
    """Scores for TVM's search; remembers what it saw, so that no program's features are computed twice."""

    def __init__(self, model: Scorer) -> None:
        super().__init__()
        self.model = model
        self.seen: dict[str, tuple[np.ndarray, float]] = {}  # by structural hash: features, score

    def predict(self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate]) -> np.ndarray:
        programs = [workloads.program_hash(candidate.sch.mod) for candidate in candidates]
        new = {p: c.sch for p, c in zip(programs, candidates, strict=True) if p not in self.seen}
        matrices = features.extract(context, list(new.values()))
        for program, matrix, score in zip(new, matrices, self.model.predict(matrices), strict=True):
            self.seen[program] = (matrix, float(score))
        return np.array([self.seen[program][1] for program in programs], dtype=np.float64)

    def load(self, path: str) -> None: ...

    def save(self, path: str) -> None: ...

    def update(self, context: ms.TuneContext, candidates: Any, results: Any) -> None: ...


def _evolve_island(
    workload: tvm.IRModule,
    target: Target,
    n: int,
    model: Scorer,
    parents: Sequence[Measured],
    known: Collection[str],
    seed: int,
    config: SearchConfig,
) -> list[Proposal]:
    population = config.population // config.islands
    parents = parents[: int(config.measured_share * population)]
    strategy = ms.search_strategy.EvolutionarySearch(
        population_size=population,
        init_measured_ratio=config.measured_share,
        init_min_unmeasured=population - len(parents),
        max_fail_count=10,  # of sampling a whole generation in vain
        genetic_num_iters=config.generations,
        eps_greedy=0.0,  # random candidates are added outside, where they can be told apart
    )
    guide = _Guide(model)
    # Parents may come up again; asking for as many more leaves n new ones.
    n_asked = n + len(parents)
    schedules = _generate(workload, target, strategy, seed, n_asked, _database(workload, parents, target), guide)
    proposals = []
    for schedule, program in _distinct(schedules, known):
        matrix, score = guide.seen[program]
        proposals.append(Proposal(_trace_text(schedule), program, "evolved", score, matrix))
    return proposals


def _replay_random(workload: tvm.IRModule, target: Target, n: int, seed: int) -> list[Schedule]:
    if n <= 0:
        return []
    strategy = ms.search_strategy.ReplayTrace(max_fail_count=20)
    # Small spaces repeat themselves: half as many again finds n distinct ones, or shows that there are fewer.
    n_asked = n + n // 2 + 1
    database, model = ms.database.MemoryDatabase(), ms.cost_model.RandomModel()
    return _generate(workload, target, strategy, seed, n_asked, database, model)


def _generate(
    workload: tvm.IRModule, target: Target, strategy: Any, seed: int, n: int, database: Any, model: Any
) -> list[Schedule]:
    *ours, last = spaces.generators(workload, target, seed)
    for generator in ours:
        try:
            found = _generate_in(generator, workload, target, strategy, seed, n, database, model)
        except (RuntimeError, ValueError, LookupError) as error:
            # A night's run does not end with what one rule overlooked.
            reason = str(error).strip().rpartition("\n")[-1]
            _log.warning("A space of ours fails on a workload, which gets MetaSchedule's instead: %s", reason)
            continue
        if found is not None:
            return found
    return _generate_in(last, workload, target, strategy, seed, n, database, model) or []


def _generate_in(
    generator: SpaceGenerator | str,
    workload: tvm.IRModule,
    target: Target,
    strategy: Any,
    seed: int,
    n: int,
    database: Any,
    model: Any,
) -> list[Schedule] | None:
    """Programs of one space; None if it is ours, and there is nothing to choose in it."""
    context = ms.TuneContext(
        mod=workload, target=target, space_generator=generator, search_strategy=strategy, task_name="main",
        rand_state=seed, num_threads=1,
    )  # fmt: skip
    sketches = context.generate_design_space()
    if not isinstance(generator, str) and not spaces.has_choices(sketches):
        return None
    context.pre_tuning(max_trials=n, num_trials_per_iter=n, design_spaces=sketches, database=database, cost_model=model)
    try:
        return [candidate.sch for candidate in context.generate_measure_candidates() or []]
    finally:
        context.post_tuning()


def _database(workload: tvm.IRModule, parents: Sequence[Measured], target: Target) -> ms.database.MemoryDatabase:
    database = ms.database.MemoryDatabase()
    token = database.commit_workload(workload)
    for parent in parents:
        trace = apply(workload, parent.trace).trace
        database.commit_tuning_record(ms.database.TuningRecord(trace, token, [parent.latency_s], target, None))
    return database


def _distinct(schedules: Sequence[Schedule], known: Collection[str]) -> list[tuple[Schedule, str]]:
    found: dict[str, Schedule] = {}
    for schedule in schedules:
        program = workloads.program_hash(schedule.mod)
        if program not in known:
            found.setdefault(program, schedule)
    return [(schedule, program) for program, schedule in found.items()]


def _distinct_proposals(proposals: Sequence[Proposal]) -> list[Proposal]:
    return list({proposal.program: proposal for proposal in reversed(proposals)}.values())[::-1]


def _trace_text(schedule: Schedule) -> str:
    # Trace.as_json leaves TVM's integer and float objects inside.
    return json.dumps(schedule.trace.as_json(), default=lambda value: value.value)
