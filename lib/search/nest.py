"""What a trace makes of a workload's loops, as numbers: features that need neither a schedule nor a lowered program.

MetaSchedule's `PerStoreFeature` looks at lowered programs, which takes tens of milliseconds each, and does not say what
decides here: the register tile, the panel of weights that a task reads, what lies beyond the border, the shape of the
workload itself. All of that follows from the workload and from the decisions of a trace. They are read here by walking
over the trace's instructions and keeping the extent and the axis of each loop; so a space's programs are told apart,
and ranked, before any of them is made.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lib.contracts import digests
from lib.search import decided
from lib.search.decided import SLAB, Loop, single
from lib.search.described import CONTEXT, Workload, describe, log
from lib.tir import dot, matrix, parallel

__all__ = [
    "CONTEXT",
    "DECIDED",
    "NAMES",
    "Decide",
    "Decision",
    "Instruction",
    "Walk",
    "Workload",
    "describe",
    "features",
    "walk",
]

Instruction = Sequence[Any]  # of a trace as JSON: kind, inputs, attributes, outputs
Decision = int | tuple[int, ...]  # which of several values; or the factors of a loop
# Of the n-th instruction, with its attributes and the extent of the loop that it splits (0 if that is not known).
Decide = Callable[[int, Instruction, int], Decision]

_SLOTS = 6  # sampled values that are features themselves, in the order of the trace
_MARKS = {"Parallel": "parallel", "Vectorize": "vectorize", "Unroll": "unroll", dot.MARK: "vectorize",
          parallel.MARK: "parallel", matrix.MARK: "steps"}  # fmt: skip
_COUNTED = ("ComputeInline", "ComputeAt", "ReverseComputeAt", "CacheWrite", "RFactor", "Parallel", "Split", "Annotate")

DECIDED = (
    *(f"sampled {n}" for n in range(_SLOTS)), *(f"number of {kind}" for kind in _COUNTED),
    "tasks", "most tasks", "idle share", *decided.OF_TILE, *decided.OF_PLAIN,
)  # fmt: skip
NAMES = (*CONTEXT, *DECIDED)  # counts and sizes as their binary logarithms, so that trees split them evenly


@dataclass(slots=True)
class Walk:
    """The loops that a trace's instructions made so far, and what was decided."""

    workload: Workload
    decide: Decide
    decisions: list[tuple[int, Decision]] = field(default_factory=list)  # with the numbers of their instructions
    values: dict[str, int] = field(default_factory=dict)  # of sampled variables
    sampled: list[int] = field(default_factory=list)
    loops: dict[str, Loop] = field(default_factory=dict)  # by variable
    blocks: dict[str, str] = field(default_factory=dict)  # names by variable
    nests: dict[str, list[Loop]] = field(default_factory=dict)  # around blocks, by name; empty if one was moved
    tiled: str = field(init=False)  # the main block, or, if that was cut into slabs, the part that has its tile
    moved: str = ""  # the tiled block, until the loops that it has where it was moved, or cut, are asked for
    parts: dict[str, str] = field(default_factory=dict)  # blocks made from reductions, and those
    readers: dict[str, Sequence[str]] = field(init=False)  # see `Workload.readers`; with copies of accumulators
    inlined: set[str] = field(default_factory=set)
    tasks: list[int] = field(default_factory=list)  # of each parallel loop
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))

    def __post_init__(self) -> None:
        self.tiled, self.readers = self.workload.main, dict(self.workload.readers)

    def step(self, n: int, instruction: Instruction) -> None:
        """Take one more instruction in."""
        kind, inputs, attrs, outputs = instruction
        if kind in self.counts:
            self.counts[kind] += 1
        if kind == "GetSBlock":
            self.blocks[outputs[0]] = attrs[0]
        elif kind == "GetConsumers":
            self._get_readers(self.blocks.get(inputs[0], ""), outputs)
        elif kind == "CacheWrite":
            self._copy(self.blocks.get(inputs[0], ""), outputs[0])
        elif kind == "ComputeInline":
            self.inlined.add(self.blocks.get(inputs[0], ""))
        elif kind == "GetLoops":
            self._get_loops(self.blocks.get(inputs[0], ""), outputs)
        elif kind == "SampleCategorical":
            chosen = self._decided(n, instruction, 0)
            assert isinstance(chosen, int)
            self._sample(outputs, [int(attrs[0][chosen])])
        elif kind == "SamplePerfectTile":
            loop = self.loops.get(inputs[0])
            factors = self._decided(n, instruction, loop.extent if loop else 0)
            assert isinstance(factors, tuple)
            self._sample(outputs, factors)
        elif kind == "SampleComputeLocation":
            self._decided(n, instruction, 0)
        elif kind == "Split":
            self._split(inputs[0], inputs[1:], outputs)
        elif kind == "Fuse":
            self._fuse(inputs, outputs[0])
        elif kind == "Reorder":
            self._reorder([self.loops[name] for name in inputs if name in self.loops])
        elif kind == "RFactor" and inputs[0] in self.loops:
            self._factor(self.loops[inputs[0]], outputs[0])
        elif kind in ("ComputeAt", "ReverseComputeAt"):
            self._move(self.blocks.get(inputs[0], ""), self.loops.get(inputs[1]))
        elif inputs and inputs[0] in self.loops and (made := _MARKS.get(attrs[0] if kind == "Annotate" else kind)):
            loop = self.loops[inputs[0]]
            self.tasks += [loop.extent] if made == "parallel" else []
            loop.mark(made)

    def _decided(self, n: int, instruction: Instruction, extent: int) -> Decision:
        decision = self.decide(n, instruction, extent)
        self.decisions.append((n, decision))
        return decision

    def _sample(self, outputs: Sequence[str], values: Sequence[int]) -> None:
        self.values |= dict(zip(outputs, values, strict=True))
        self.sampled.append(values[-1])  # of a split, the inner factor

    def _get_loops(self, block: str, outputs: Sequence[str]) -> None:
        extents = self.workload.extents.get(block, ())
        if block not in self.nests and len(extents) == len(outputs):
            self.nests[block] = [Loop(extent, block, (n,), is_whole=True) for n, extent in enumerate(extents)]
        elif self._is_tiled(block) and block != self.moved:
            return  # what is done after its tile was made is no part of it
        if block == self.moved:
            self.moved = ""
        if len(self.nests.get(block, ())) == len(outputs):
            self.loops |= dict(zip(outputs, self.nests[block], strict=True))

    def _copy(self, block: str, output: str) -> None:
        if block in self.readers:
            copy = self.blocks[output] = f"copy of {block}"
            self.readers |= {copy: self.readers[block], block: [copy]}

    def _get_readers(self, block: str, outputs: Sequence[str]) -> None:
        found = self._readers(block)
        if len(found) == len(outputs):
            self.blocks |= dict(zip(outputs, found, strict=True))

    def _readers(self, block: str) -> list[str]:
        """The blocks that read what a block writes, by what is inlined into them, too."""
        found: list[str] = []
        for reader in self.readers.get(block, ()):
            found += self._readers(reader) if reader in self.inlined else [reader]
        return found

    def _is_tiled(self, block: str) -> bool:
        return self.workload.roles is not None and block == self.tiled

    def _split(self, variable: str, factors: Sequence[Any], outputs: Sequence[str]) -> None:
        loop = self.loops.get(variable)
        known = [self.values.get(factor) if isinstance(factor, str) else int(factor) for factor in factors]
        if loop is None and None in known:
            return
        inner = math.prod(factor for factor in known if factor)
        made: list[Loop] = []
        block, axes, stride = (loop.block, loop.axes, loop.stride) if loop else ("", (), 1)
        for factor in reversed(known):
            extent = factor if factor is not None else -(-loop.extent // inner) if loop else 1
            made.insert(0, Loop(extent, block, axes, stride))
            stride *= extent
        self.loops |= dict(zip(outputs, made, strict=True))
        if loop is not None:
            self._replace([loop], made)

    def _fuse(self, inputs: Sequence[str], output: str) -> None:
        parts = tuple(self.loops[name] for name in inputs if name in self.loops)
        if len(parts) == len(inputs):
            is_whole = all(part.is_whole for part in parts)
            axes = tuple(axis for part in parts for axis in part.axes) if is_whole else ()
            fused = Loop(math.prod(part.extent for part in parts), parts[0].block, axes, is_whole=is_whole, parts=parts)
            self.loops[output] = fused
            self._replace(parts, [fused])

    def _replace(self, old: Sequence[Loop], new: Sequence[Loop]) -> None:
        nest = self.nests.get(old[0].block, [])
        if old[0] in nest:
            place = nest.index(old[0])
            left = [loop for loop in nest if loop not in old]
            self.nests[old[0].block] = [*left[:place], *new, *left[place:]]

    def _reorder(self, loops: Sequence[Loop]) -> None:
        nest = self.nests.get(loops[0].block, []) if loops else []
        among = [loop for loop in loops if loop in nest]
        for place, loop in zip(sorted(map(nest.index, among)), among, strict=True):
            nest[place] = loop

    def _factor(self, loop: Loop, part: str) -> None:
        """A reduction's loops, and its tile, are those of the part that reduces for each iteration of one of them."""
        block, nest = loop.block, self.nests.get(loop.block, [])
        if loop not in nest:
            return
        reduced = set(self.workload.reduction.get(block, ()))
        self.nests[part], self.blocks[part], self.parts[part] = nest, part, self.parts.get(block, block)
        if self._is_tiled(block):
            self.nests[block], self.tiled, self.moved = [], part, part
            loop.mark(SLAB)
        else:
            kept = [each for each in nest if each is loop or not reduced & set(each.axes)]
            self.nests[block] = [replace(each) for each in kept]
        for each in nest:
            each.block = part

    def _move(self, block: str, loop: Loop | None) -> None:
        if not self._is_tiled(block):
            self.nests[block] = []
        elif loop is not None and (axes := self.workload.sums.get(loop.block)):
            self.nests[block], self.moved = self._in_loop(loop, axes), block
        elif loop is not None and loop.block in self.readers:
            self.nests[block], self.moved = self._in_task(loop), block

    def _in_loop(self, loop: Loop, axes: Sequence[tuple[int, ...]]) -> list[Loop]:
        """The nest of the main block in a loop around what reads it: of each of its axes as much as is read there.

        Args:
            axes: Of what reads it, by its own axes.
        """
        main, nest = self.workload.main, self.nests[loop.block]
        place = nest.index(loop) + 1

        def own(each: Loop) -> Loop:
            found = tuple(n for n, of in enumerate(axes) if each.axis in of)
            return replace(each, block=main, axes=found, is_whole=False, parts=tuple(map(own, each.parts)))

        inner, extents = single(nest[place:]), self.workload.extents[main]
        read = [math.prod(each.extent for each in inner if each.axis in of) if of else extent
                for of, extent in zip(axes, extents, strict=False)]  # fmt: skip
        left = [*read, *extents[len(read) :]]  # those of the reduction
        return [*map(own, nest[:place]), *(Loop(extent, main, (n,)) for n, extent in enumerate(left))]

    def _in_task(self, task: Loop) -> list[Loop]:
        """The nest of the main block in a loop over tasks, each of which has an equal part of the rows and all else: of
        all of its batch, or of one."""
        main, roles = self.workload.main, self.workload.roles
        assert roles is not None
        row, extents = roles.rows[-1], list(self.workload.extents[main])
        shared = []
        for n in roles.batch if self.workload.shares_batch else ():
            shared.append(Loop(extents[n], main, (n,), kind=task.kind))
            extents[n] = 1
        n_parts = -(-task.extent // math.prod(loop.extent for loop in shared))
        extents[row] = -(-extents[row] // n_parts)
        parts = (*shared, Loop(n_parts, main, (row,), kind=task.kind))
        fused = Loop(task.extent, main, kind=task.kind, parts=parts)
        return [fused, *(Loop(extent, main, (n,)) for n, extent in enumerate(extents))]

    def features(self) -> np.ndarray:
        """Of the program: float32, one for each of NAMES; NaN where one says nothing."""
        values = dict.fromkeys(DECIDED, math.nan)
        values |= {f"sampled {n}": log(value) for n, value in enumerate(self.sampled[:_SLOTS])}
        values |= {f"number of {kind}": float(count) for kind, count in self.counts.items()}
        workload, (block, loops) = self.workload, self._around_tasks()
        nest = single(loops)
        if self.tasks:
            tasks = math.prod(loop.extent for loop in nest if loop.kind == "parallel") if nest else self.tasks[-1]
            values |= {"tasks": log(tasks), "most tasks": log(max(self.tasks)),
                       "idle share": 1 - tasks / (-(-tasks // workload.threads) * workload.threads)}  # fmt: skip
        if nest and workload.roles is not None:
            values |= decided.of_tile(workload, workload.roles, nest)
        elif nest and workload.plain is not None:
            is_main = self.parts.get(block, block) == workload.main
            values |= decided.of_plain(workload, workload.plain, nest, is_main=is_main)
        if self.tasks:
            values["slowness"] -= math.log2(1 - values["idle share"])
        return np.concatenate([workload.context, np.array([values[name] for name in DECIDED], np.float32)])

    def _around_tasks(self) -> tuple[str, list[Loop]]:
        """The block that tasks are made of, with the loops around it: the one that is tiled, or, of those in parallel
        loops, the one with most iterations."""
        main = self.tiled
        if self.workload.roles is None:
            found = [(math.prod(loop.extent for loop in loops), block) for block, loops in self.nests.items()
                     if any(loop.kind == "parallel" for loop in loops)]  # fmt: skip
            main = max(found)[1] if found else main
        return main, self.nests.get(main, [])


def walk(workload: Workload, instructions: Sequence[Instruction], decide: Decide) -> Walk:
    """Walk over a trace up to its postprocessors."""
    found = Walk(workload, decide)
    for n, instruction in enumerate(digests.before_postprocessors(instructions)):
        found.step(n, instruction)
    return found


def features(workload: Workload, trace: str) -> np.ndarray:
    """The features of a program by its trace as JSON: see `Walk.features`."""
    instructions, decisions = json.loads(trace)
    made = {int(n): tuple(value) if isinstance(value, list) else int(value) for n, value in decisions}
    return walk(workload, instructions, lambda n, _instruction, _extent: made[n]).features()
