"""New candidates for one workload: points of a design space, evolved under a cost model; or MetaSchedule's search.

Each call starts from what was measured, so that a search keeps no state but the tables. In this project's spaces it
looks at points (`lib.search.points`): thousands are drawn and changed, and only those that the model likes best become
programs. Workloads that none of these spaces fits get MetaSchedule's space and search (`lib.search.metaschedule`).
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from lib.contracts import digests
from lib.contracts.errors import ConfigError
from lib.machine import intrinsics
from lib.search import features, metaschedule, nest
from lib.search.points import Point, Points, distinct
from lib.search.spaces.space import Space
from lib.search.spaces.table import SPACES, fitting
from lib.tir import lowering, packings
from lib.tir.traces import EMPTY_TRACE, apply, to_json
from lib.tir.workload import program_hash

_log = logging.getLogger(__name__)

METASCHEDULE = "metaschedule"  # the space that TVM has for every workload, as CANDIDATES names it
NO_SPACE = "none"  # of the untuned program
RECORDED = "recorded"  # what a replay has measurements of
SPACE_CHOICES = ("own", METASCHEDULE, RECORDED)
_DRAWN = 8  # points drawn for each program of a population
_LOOK = 64  # draws after which is looked whether any of them was new
_PACKED_OTHERWISE = 2  # programs of a sketch that pack weights otherwise than wanted, before it is passed over
_PARENTS = 32  # points, the best of a generation, that are changed


class Scorer(Protocol):
    """A trained cost model."""

    def predict(self, features: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """Effort of one search."""

    population: int = 128  # programs in a generation, over all islands; points: eight times as many
    generations: int = 4
    islands: int = 2  # of MetaSchedule's search, in parallel; part of the run, since it decides the candidates
    random_share: float = 0.05  # of a round's candidates, sampled without asking the model
    measured_share: float = 0.2  # of a population of MetaSchedule's search, from the best measured programs
    # This project's where one fits; or `metaschedule`: TVM's for all; or `recorded`: see `lib.search.recorded`.
    spaces: str = "own"

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
        return () if self.spaces == METASCHEDULE else SPACES


@dataclass(frozen=True, slots=True)
class Proposal:
    """A program that was not measured yet; see CANDIDATES."""

    trace: str  # JSON
    program_hash: str
    origin: str  # untuned | sampled | evolved | refit | adapted | imported
    space: str  # its name, `metaschedule`, `none` if untuned, or `imported`
    score: float | None
    features: np.ndarray  # as long as what is known of it, at most N_FEATURES
    donor: str = ""  # of an adapted one: the subgraph whose trace it was


@dataclass(frozen=True, slots=True)
class Measured:
    """A program that was measured: a parent for new ones."""

    trace: str  # JSON
    latency_s: float


def untuned(workload: tvm.IRModule, target: Target) -> Proposal:
    """The workload as TVM compiles it without a schedule; it has no features, since it is no example for any other."""
    intrinsics.load(target)
    schedule = Schedule(lowering.scheduled(workload, target), debug_mask="none")
    return Proposal(EMPTY_TRACE, program_hash(schedule.mod), "untuned", NO_SPACE, None, np.zeros(0, np.float32))


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
        known: Hashes of programs (`program_hash`), or keys of their traces (`digests.of_trace`).
        seed: Equal seeds and arguments give equal candidates.
        spaces: The first of them that fits is sampled; else MetaSchedule's, also where that one fails or has nothing to
            choose.
    """
    return sampled(DesignSpace(workload, target, spaces, seed), n, known=known, seed=seed)


def sampled(space: "DesignSpace", n: int, *, known: Collection[str], seed: int) -> list[Proposal]:
    """See `sample`."""
    if n <= 0:
        return []
    found = space.own
    if found is not None:
        drawn = _drawn(found.points, 4 * n + 64, np.random.default_rng(seed)).values()
        return realized(found, drawn, n, known, "sampled")
    programs = _fresh(metaschedule.sampled(space.workload, space.target, n, seed), known)[:n]
    return _of_metaschedule(space, programs, "sampled")


def evolve(
    space: "DesignSpace",
    n: int,
    *,
    model: Scorer,
    parents: Sequence[Measured],
    known: Collection[str],
    seed: int,
    config: SearchConfig,
    n_random: int | None = None,
) -> list[Proposal]:
    """Up to n programs that the model scores best, with a few random ones; none of them in `known`.

    Args:
        parents: Measured programs, the fastest first; they join the first generation.
        known: Of every program that was ever measured; see `sample`.
        seed: Equal seeds and arguments give equal candidates.
        config: The effort.
        n_random: How many are random; None: as the config has it, at least one.
    """
    if n_random is None:
        n_random = min(n, max(1, round(config.random_share * n)))
    found = space.own
    if found is not None:
        best = realized(found, ranking(found.points, model, parents, seed, config), n - n_random, known, "evolved")
    else:
        evolved = metaschedule.evolved(
            space.workload, space.target, n - n_random, model=Lowered(space.workload, space.target, model),
            parents=[(parent.trace, parent.latency_s) for parent in parents], known=known, seed=seed, search=config,
        )  # fmt: skip
        best = _of_metaschedule(space, evolved, "evolved")
    taken = {*known, *(proposal.program_hash for proposal in best)}
    proposals = best + sampled(space, n - len(best), known=taken, seed=digests.seed(seed, "random"))
    scores = model.predict(features.padded([proposal.features for proposal in proposals]))
    return [replace(proposal, score=float(score)) for proposal, score in zip(proposals, scores, strict=True)]


def packed(
    space: "DesignSpace",
    n: int,
    packing: str,
    *,
    model: Scorer | None,
    parents: Sequence[Measured],
    known: Collection[str],
    seed: int,
    config: SearchConfig,
) -> list[Proposal]:
    """Up to n programs that pack weights in a given way (`tir.packings`), those that the model likes best; none where
    no space of this project fits.

    How a program packs follows from its sketch: those of which the first programs pack otherwise are passed over.
    """
    found = space.own
    if found is None:
        return []
    if model is None:
        ranked = list(_drawn(found.points, 4 * config.population, np.random.default_rng(seed)).values())
    else:
        ranked = ranking(found.points, model, parents, seed, config)
    left, proposals = Counter({point.sketch: _PACKED_OTHERWISE for point in ranked}), list[Proposal]()
    for point in ranked:
        if len(proposals) < n and left[point.sketch]:
            for proposal in realized(found, [point], 1, {*known, *(each.program_hash for each in proposals)}, "refit"):
                if packings.packing(proposal.trace) == packing:
                    proposals.append(proposal)
                else:
                    left[point.sketch] -= 1
    if model is None or not proposals:
        return proposals
    scores = model.predict(features.padded([proposal.features for proposal in proposals]))
    return [replace(proposal, score=float(score)) for proposal, score in zip(proposals, scores, strict=True)]


def look(
    space: "DesignSpace",
    n: int,
    *,
    model: Scorer,
    parents: Sequence[Measured],
    known: Collection[str],
    seed: int,
    config: SearchConfig,
) -> float:
    """By how much, as a logarithm, the best of n new programs is faster than the parents', as the model sees it; 0 if
    there is nothing new, or no parent that could be told."""
    found = space.own
    if found is None:
        proposals = sampled(space, n, known=known, seed=seed)
        scores = model.predict(features.padded([proposal.features for proposal in proposals]))
        own = Lowered(space.workload, space.target).features([apply(space.workload, each.trace) for each in parents])
        before = model.predict(own) if len(own) else scores[:0]
    else:
        points = found.points
        new = [p for p in ranking(points, model, parents, seed, config) if points.digest(p) not in known][:n]
        old = [point for parent in parents if (point := points.of_trace(parent.trace)) is not None]
        scores, before = (model.predict(features.padded([p.features for p in part])) for part in (new, old))
    return float(max(scores) - max(before)) if len(scores) and len(before) else 0.0


def ranking(points: Points, model: Scorer, parents: Sequence[Measured], seed: int, config: SearchConfig) -> list[Point]:
    """The points that a search comes to see, those that the model likes best first."""
    random = np.random.default_rng(seed)
    measured = [point for parent in parents[:_PARENTS] if (point := points.of_trace(parent.trace)) is not None]
    seen = _drawn(points, _DRAWN * config.population, random) | distinct(measured)
    scores: dict[object, float] = {}
    for _ in range(config.generations):
        _score(seen.values(), model, scores)
        best = sorted(seen.values(), key=lambda point: -scores[point.key])[:_PARENTS]
        each = max(1, config.population // max(1, len(best)))
        seen |= distinct([points.changed(point, random) for point in [*best, *measured] for _ in range(each)], seen)
    _score(seen.values(), model, scores)
    return sorted(seen.values(), key=lambda point: -scores[point.key])


def _drawn(points: Points, n: int, random: np.random.Generator) -> dict[object, Point]:
    """Up to n random draws; fewer once hardly any is new."""
    seen: dict[object, Point] = {}
    new = 0
    for count in range(1, n + 1):
        point = points.draw(random)
        new += point.key not in seen
        seen.setdefault(point.key, point)
        if count % _LOOK == 0:
            if new < _LOOK // 16:
                break
            new = 0
    return seen


def _score(seen: Iterable[Point], model: Scorer, scores: dict[object, float]) -> None:
    new = [point for point in seen if point.key not in scores]
    found = model.predict(features.padded([point.features for point in new]))
    scores |= {point.key: float(score) for point, score in zip(new, found, strict=True)}


@dataclass(frozen=True, slots=True)
class Found:
    """The points of a design space."""

    space: str  # its name
    points: Points
    lowered: "Lowered | None" = None  # what looks at programs of MetaSchedule's


class DesignSpace:
    """Where a workload's programs are: in the space of this project that fits it, or in MetaSchedule's. Each is made
    when it is first asked for, which takes some tenths of a second."""

    def __init__(self, workload: tvm.IRModule, target: Target, offered: Sequence[Space], seed: int) -> None:
        """Nothing is made yet.

        Args:
            offered: The first of these that fits is taken; see `SearchConfig.offered`.
            seed: See `Points`.
        """
        self.workload, self.target = workload, target
        self._offered, self._seed = offered, seed

    @cached_property
    def own(self) -> Found | None:
        """The points of the space that fits; None where none does, or that one fails or has no choices."""
        space = fitting(self.workload, self.target, self._offered)
        if space is None:
            return None
        try:
            points = Points(self.workload, self.target, space, self._seed)
            if points.has_choices and points.program(points.draw(np.random.default_rng(self._seed))) is not None:
                return Found(space.name, points)
        except (RuntimeError, ValueError, LookupError) as error:
            # A night's run does not end with what one space overlooked.
            reason = str(error).strip().rpartition("\n")[-1]
            _log.warning("The space %r fails on a workload, which gets MetaSchedule's instead: %s", space.name, reason)
        return None

    @cached_property
    def metaschedules(self) -> Found:
        """The points of MetaSchedule's space.

        Raises:
            RuntimeError, ValueError: TVM cannot make its sketches.
        """
        points = Points(self.workload, self.target, None, self._seed)
        return Found(METASCHEDULE, points, Lowered(self.workload, self.target))


def realized(found: Found, wanted: Iterable[Point], n: int, known: Collection[str], origin: str) -> list[Proposal]:
    """The first n of some points whose programs can be made, and are not known."""
    made: dict[str, Proposal] = {}
    for point in wanted:
        if len(made) >= n:
            break
        if found.points.digest(point) in known:
            continue
        try:
            schedule = found.points.program(point)
        except (RuntimeError, ValueError) as error:
            _log.debug("a point has no program: %s", error)
            continue
        if schedule is not None and (key := program_hash(schedule.mod)) not in known and key not in made:
            vector = found.lowered.features([schedule])[0] if found.lowered else point.features
            made[key] = Proposal(to_json(schedule), key, origin, found.space, None, vector)
    return list(made.values())


def _fresh(schedules: Sequence[Schedule], known: Collection[str]) -> list[Schedule]:
    """Each program once, but for those that are known."""
    found: dict[str, Schedule] = {}
    for schedule in schedules:
        if (key := program_hash(schedule.mod)) not in known:
            found.setdefault(key, schedule)
    return list(found.values())


def _of_metaschedule(space: DesignSpace, schedules: Sequence[Schedule], origin: str) -> list[Proposal]:
    vectors = Lowered(space.workload, space.target).features(schedules)
    return [
        Proposal(to_json(schedule), program_hash(schedule.mod), origin, METASCHEDULE, None, vector)
        for schedule, vector in zip(schedules, vectors, strict=True)
    ]


class Lowered:
    """Features, and with a model scores, of programs of MetaSchedule's space."""

    def __init__(self, workload: tvm.IRModule, target: Target, model: Scorer | None = None) -> None:
        self._context = ms.TuneContext(mod=workload, target=target, num_threads=1)
        self._described, self._model = nest.describe(workload, target), model

    def features(self, schedules: Sequence[Schedule]) -> np.ndarray:
        from_traces = [nest.features(self._described, to_json(schedule)) for schedule in schedules]
        return features.of_lowered(self._context, schedules, from_traces)

    def scores(self, schedules: Sequence[Schedule]) -> np.ndarray:
        assert self._model is not None
        return self._model.predict(self.features(schedules))
