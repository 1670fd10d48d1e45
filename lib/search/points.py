"""The points of a design space: decisions, drawn, changed, taken over from elsewhere and described without any program.

A space's sketches leave some decisions open: which of several values, which factors of a loop. A point is a sketch with
all of them made. Walking over its trace (`lib.search.nest`) takes a tenth of a millisecond, where TVM takes tens to
make and to lower the program; so thousands are looked at for each that is made.
"""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace
from tvm.target import Target

from lib.contracts import digests
from lib.machine import intrinsics
from lib.search import nest
from lib.search.nest import Decision, Instruction
from lib.search.spaces.generators import generator
from lib.search.spaces.space import Space
from lib.tir.traces import as_json


@dataclass(frozen=True, slots=True)
class Point:
    """A sketch with all its decisions."""

    sketch: int
    decisions: tuple[tuple[int, Decision], ...]  # by the number of their instruction
    features: np.ndarray  # see `nest.NAMES`

    @property
    def key(self) -> tuple[int, tuple[tuple[int, Decision], ...]]:
        """Equal for equal points."""
        return self.sketch, self.decisions


class Points:
    """Those of one space for one workload."""

    def __init__(self, workload: tvm.IRModule, target: Target, space: Space | None, seed: int) -> None:
        """Make the sketches.

        Args:
            space: One that fits the workload; None: MetaSchedule's own.
            seed: Of what TVM decides in the sketches, which is decided anew here.

        Raises:
            RuntimeError, ValueError: TVM cannot make them.
        """
        intrinsics.load(target)
        rules = generator(space, workload, target) if space else "post-order-apply"
        context = ms.TuneContext(
            mod=workload, target=target, space_generator=rules, task_name="main", rand_state=seed, num_threads=1
        )
        self._workload, self._context = workload, context
        # Traces of programs are simplified, too: instructions that nothing depends on are left out.
        self._sketches: list[Trace] = [s.trace.simplified(True) for s in context.generate_design_space()]
        texts = [json.loads(as_json(sketch)) for sketch in self._sketches]
        self._instructions: list[list[Instruction]] = [instructions for instructions, _ in texts]
        self._sampled = [{int(n): _decision(value) for n, value in decisions} for _, decisions in texts]
        self.described = nest.describe(workload, target)

    @property
    def has_choices(self) -> bool:
        """Whether there is more than one point."""
        return any(self._sampled)

    def digest(self, point: Point) -> str:
        """`digests.of_trace` of its program."""
        return digests.of_decided(self._instructions[point.sketch], point.decisions)

    def draw(self, random: np.random.Generator) -> Point:
        """One at random: each sketch, and each value of a decision, as likely as the others."""
        sketch = int(random.integers(len(self._sketches)))

        def decide(n: int, instruction: Instruction, extent: int) -> Decision:
            options = self._options(sketch, n, instruction, extent)
            return options[int(random.integers(len(options)))]

        return self._walked(sketch, decide)

    def changed(self, point: Point, random: np.random.Generator) -> Point:
        """One with another value of one decision, the others as they were, or next to that; or of another sketch."""
        number = int(random.integers(len(point.decisions) + 1))
        wanted = dict(point.decisions)
        if number == len(point.decisions):
            return self.refitted(int(random.integers(len(self._sketches))), [value for _, value in point.decisions])
        changed = point.decisions[number][0]

        def decide(n: int, instruction: Instruction, extent: int) -> Decision:
            options = self._options(point.sketch, n, instruction, extent)
            if n == changed:
                return options[int(random.integers(len(options)))]
            return _nearest(options, wanted.get(n), instruction)

        return self._walked(point.sketch, decide)

    def refitted(self, sketch: int, decisions: Sequence[Decision]) -> Point:
        """A sketch with decisions that were made elsewhere, in this order: each as near as can be."""
        left = list(decisions)

        def decide(n: int, instruction: Instruction, extent: int) -> Decision:
            options = self._options(sketch, n, instruction, extent)
            return _nearest(options, left.pop(0) if left else None, instruction)

        return self._walked(sketch, decide)

    def of_trace(self, trace: str) -> Point | None:
        """The point that a program's trace is; None if it is none of these."""
        instructions, decisions = json.loads(trace)
        made = {int(n): _decision(value) for n, value in decisions}
        for sketch, own in enumerate(self._instructions):
            if digests.before_postprocessors(instructions) == own:
                return self._walked(sketch, lambda n, _instruction, _extent: made[n])
        return None

    def adapted(self, trace: str) -> list[Point]:
        """What becomes of the trace of another workload here: its structure and its decisions kept as far as they can
        be. One for each sketch that is as like it as any."""
        instructions, decisions = json.loads(trace)
        wanted = [_decision(value) for _, value in sorted(decisions)]
        structure = _structure(instructions)
        likeness = [_likeness(structure, _structure(own)) for own in self._instructions]
        best = max(likeness, default=0.0)
        values = _values(instructions, decisions)
        return [self._taken_over(sketch, wanted, values) for sketch, found in enumerate(likeness) if found == best]

    def program(self, point: Point) -> Schedule | None:
        """Its program; None if a postprocessor refuses it.

        Raises:
            RuntimeError, ValueError: TVM cannot make it.
        """
        trace = self._sketches[point.sketch]
        decided = dict(point.decisions)
        for n, instruction in enumerate(trace.insts):
            if n in decided:
                value = decided[n]
                trace = trace.with_decision(instruction, list(value) if isinstance(value, tuple) else value, True)
        schedule = Schedule(self._workload, debug_mask="none")
        trace.apply_to_schedule(schedule, remove_postproc=True)
        schedule.enter_postproc()
        for postproc in self._context.space_generator.postprocs or []:
            if not postproc.apply(schedule):
                return None
        return schedule

    def _taken_over(self, sketch: int, wanted: Sequence[Decision], values: Sequence[int]) -> Point:
        """`refitted`, by the values that decisions stand for where these are one of several."""
        left = list(zip(wanted, values, strict=True))

        def decide(n: int, instruction: Instruction, extent: int) -> Decision:
            options = self._options(sketch, n, instruction, extent)
            if not left:
                return options[0]
            decision, value = left.pop(0)
            if instruction[0] == "SampleCategorical":
                logs = [abs(math.log2((1 + choice) / (1 + value))) for choice in instruction[2][0]]
                return int(np.argmin(logs))
            return _nearest(options, decision, instruction)

        return self._walked(sketch, decide)

    def _walked(self, sketch: int, decide: nest.Decide) -> Point:
        found = nest.walk(self.described, self._instructions[sketch], decide)
        return Point(sketch, tuple(found.decisions), found.features())

    def _options(self, sketch: int, n: int, instruction: Instruction, extent: int) -> Sequence[Decision]:
        if instruction[0] == "SampleCategorical":
            return range(len(instruction[2][0]))
        sampled = self._sampled[sketch][n]
        if instruction[0] == "SampleComputeLocation":  # of which only TVM knows what there is
            return [sampled]
        assert isinstance(sampled, tuple)
        parts, longest = int(instruction[2][0]), int(instruction[2][1])
        return _factorizations(extent or math.prod(sampled), parts, longest)


@lru_cache(maxsize=4096)
def _factorizations(extent: int, parts: int, longest: int) -> Sequence[tuple[int, ...]]:
    """All ways to write an extent as a product of so many factors, the last of them at most so large."""
    if parts == 1:
        return [(extent,)]
    found = []
    for inner in range(1, min(extent, longest) + 1):
        if extent % inner == 0:
            found += [(*outer, inner) for outer in _factorizations(extent // inner, parts - 1, extent)]
    return found


def _nearest(options: Sequence[Decision], wanted: Decision | None, instruction: Instruction) -> Decision:
    """The option that is most like what is wanted; the first if nothing is."""
    if wanted is None or wanted in options:
        return options[0] if wanted is None else wanted
    if instruction[0] == "SampleComputeLocation" and isinstance(wanted, int):
        return wanted  # TVM takes another one where that is none
    if not isinstance(wanted, tuple) or not isinstance(options[0], tuple):
        return options[min(wanted, len(options) - 1)] if isinstance(wanted, int) else options[0]
    inner = wanted[1:]  # what is outermost follows from the extent

    def distance(option: Decision) -> float:
        assert isinstance(option, tuple)
        return sum(abs(math.log2(a / b)) for a, b in zip(option[1:], inner, strict=False))

    return min(options, key=distance)


def _decision(value: Any) -> Decision:
    return tuple(int(factor) for factor in value) if isinstance(value, list) else int(value)


def _structure(instructions: Sequence[Instruction]) -> list[str]:
    """Of a trace: the kinds of its instructions, with numbers that are part of them, before the postprocessors."""
    found = []
    for kind, inputs, _attrs, _outputs in digests.before_postprocessors(instructions):
        numbers = [str(value) for value in inputs if isinstance(value, int)] if kind == "Split" else []
        found.append(" ".join([kind, *numbers]))
    return found


def _likeness(first: Sequence[str], second: Sequence[str]) -> float:
    """Share of steps that two structures have in common, in any order."""
    counts: dict[str, int] = {}
    for step in first:
        counts[step] = counts.get(step, 0) + 1
    common = 0
    for step in second:
        if counts.get(step, 0):
            counts[step] -= 1
            common += 1
    return 2 * common / max(1, len(first) + len(second))


def _values(instructions: Sequence[Instruction], decisions: Sequence[Any]) -> list[int]:
    """What decisions stand for: the value that was chosen, or the innermost factor."""
    found = []
    for n, decision in sorted(decisions):
        instruction = instructions[n]
        if instruction[0] == "SampleCategorical":
            found.append(int(instruction[2][0][decision]))
        else:
            found.append(int(decision[-1]) if isinstance(decision, list) else 0)
    return found


def distinct(points: Sequence[Point], known: Collection[object] = ()) -> dict[object, Point]:
    """Points by their keys, each once."""
    return {point.key: point for point in points if point.key not in known}
