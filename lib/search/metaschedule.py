"""MetaSchedule's own space for a workload, sampled at random or searched by its evolution under a cost model.

The search runs on a fixed number of islands, each on one thread with its own seed: TVM's own threads take work
dynamically, so that with more than one of them the same seed gives other candidates each time.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from lib.contracts import digests
from lib.machine import intrinsics
from lib.tir.traces import apply
from lib.tir.workload import program_hash

Parent = tuple[str, float]  # trace as JSON, and latency in seconds


class ScheduleScorer(Protocol):
    """Scores programs; may be asked from several threads."""

    def scores(self, schedules: Sequence[Schedule]) -> np.ndarray: ...


class Effort(Protocol):
    """See `lib.search.evolution.SearchConfig`."""

    @property
    def population(self) -> int: ...
    @property
    def generations(self) -> int: ...
    @property
    def islands(self) -> int: ...
    @property
    def measured_share(self) -> float: ...


def sampled(workload: tvm.IRModule, target: Target, n: int, seed: int) -> list[Schedule]:
    """Random programs; equal ones may be among them."""
    search = ms.search_strategy.ReplayTrace(max_fail_count=20)
    # Small spaces repeat themselves: half as many again finds n distinct ones, or shows that there are fewer.
    n_asked = n + n // 2 + 1
    database, model = ms.database.MemoryDatabase(), ms.cost_model.RandomModel()
    return _generate(_Strategy(workload, target, search, n_asked, seed, database, model))


def evolved(
    workload: tvm.IRModule,
    target: Target,
    n: int,
    *,
    model: ScheduleScorer,
    parents: Sequence[Parent],
    known: Collection[str],
    seed: int,
    search: Effort,
) -> list[Schedule]:
    """Up to n programs, the best scored first, none of them in `known` (`program_hash`).

    Args:
        parents: Measured programs, the fastest first; they join the first generation.
    """

    def island(number: int) -> list[tuple[float, str, Schedule]]:
        own_seed = digests.seed(seed, "island", number)
        return _island(workload, target, n, model, parents[number :: search.islands], own_seed, search)

    with ThreadPoolExecutor(search.islands) as threads:
        found = [each for part in threads.map(island, range(search.islands)) for each in part]
    best: dict[str, Schedule] = {}
    for _, key, schedule in sorted(found, key=lambda each: -each[0]):
        if key not in known:
            best.setdefault(key, schedule)
    return list(best.values())[:n]


def _island(
    workload: tvm.IRModule,
    target: Target,
    n: int,
    model: ScheduleScorer,
    parents: Sequence[Parent],
    seed: int,
    effort: Effort,
) -> list[tuple[float, str, Schedule]]:
    """What one island finds: scores, hashes and programs."""
    population = effort.population // effort.islands
    parents = parents[: int(effort.measured_share * population)]
    search = ms.search_strategy.EvolutionarySearch(
        population_size=population,
        init_measured_ratio=effort.measured_share,
        init_min_unmeasured=population - len(parents),
        max_fail_count=10,  # of sampling a whole generation in vain
        genetic_num_iters=effort.generations,
        eps_greedy=0.0,  # random candidates are added outside, where they can be told apart
    )
    guide = _Guide(model)
    # Parents may come up again; asking for as many more leaves n new ones.
    database = _database(workload, target, parents)
    schedules = _generate(_Strategy(workload, target, search, n + len(parents), seed, database, guide))
    keys = [program_hash(schedule.mod) for schedule in schedules]
    return [(guide.seen[key], key, schedule) for key, schedule in zip(keys, schedules, strict=True)]


@derived_object
class _Guide(ms.cost_model.PyCostModel):
    """Scores for TVM's search; keeps them, so that no program's features are computed twice."""

    def __init__(self, model: ScheduleScorer) -> None:
        super().__init__()
        self.model = model
        self.seen: dict[str, float] = {}  # by program hash

    def predict(self, _context: ms.TuneContext, candidates: list[ms.MeasureCandidate]) -> np.ndarray:
        hashes = [program_hash(candidate.sch.mod) for candidate in candidates]
        new = {key: c.sch for key, c in zip(hashes, candidates, strict=True) if key not in self.seen}
        if new:
            self.seen |= {
                key: float(score) for key, score in zip(new, self.model.scores(list(new.values())), strict=True)
            }
        # Scores are logarithms; TVM takes shares of them to draw parents, and those below zero for zero, all alike.
        return np.exp([self.seen[key] for key in hashes])

    def load(self, path: str) -> None: ...

    def save(self, path: str) -> None: ...

    def update(self, context: ms.TuneContext, candidates: Any, results: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _Strategy:
    """How TVM searches a workload's space."""

    workload: tvm.IRModule
    target: Target
    search: ms.search_strategy.SearchStrategy
    n: int  # programs asked for
    seed: int
    database: ms.database.MemoryDatabase
    cost_model: ms.cost_model.CostModel


def _generate(strategy: _Strategy) -> list[Schedule]:
    intrinsics.load(strategy.target)
    context = ms.TuneContext(
        mod=strategy.workload, target=strategy.target, space_generator="post-order-apply",
        search_strategy=strategy.search, task_name="main", rand_state=strategy.seed, num_threads=1,
    )  # fmt: skip
    context.pre_tuning(
        max_trials=strategy.n, num_trials_per_iter=strategy.n, design_spaces=context.generate_design_space(),
        database=strategy.database, cost_model=strategy.cost_model,
    )  # fmt: skip
    try:
        return [candidate.sch for candidate in context.generate_measure_candidates() or []]
    finally:
        context.post_tuning()


def _database(workload: tvm.IRModule, target: Target, parents: Sequence[Parent]) -> ms.database.MemoryDatabase:
    database = ms.database.MemoryDatabase()
    token = database.commit_workload(workload)
    for trace, latency_s in parents:
        record = ms.database.TuningRecord(apply(workload, trace).trace, token, [latency_s], target, None)
        database.commit_tuning_record(record)
    return database
