"""What a trace makes of a workload's loops, as numbers: features that need neither a schedule nor a lowered program.

MetaSchedule's `PerStoreFeature` looks at lowered programs, which takes tens of milliseconds each, and does not say what
decides here: the register tile, the panel of weights that a task reads, what lies beyond the border, the shape of the
workload itself. All of that follows from the workload and from the decisions of a trace. They are read here by walking
over the trace's instructions and keeping the extent and the axis of each loop; so a space's programs are told apart,
and ranked, before any of them is made.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm.s_tir import SBlock
from tvm.target import Target

from lib.contracts import digests
from lib.machine.registers import Registers, registers
from lib.search.spaces.roles import Roles, contraction_roles, window_roles
from lib.search.spaces.tiling import cycles
from lib.tir import analysis, dot, parallel

Instruction = Sequence[Any]  # of a trace as JSON: kind, inputs, attributes, outputs
Decision = int | tuple[int, ...]  # which of several values; or the factors of a loop
# Of the n-th instruction, with its attributes and the extent of the loop that it splits (0 if that is not known).
Decide = Callable[[int, Instruction, int], Decision]

_SLOTS = 6  # sampled values that are features themselves, in the order of the trace
_MARKS = {"Parallel": "parallel", "Vectorize": "vectorize", "Unroll": "unroll", dot.MARK: "vectorize",
          parallel.MARK: "parallel"}  # fmt: skip
_COUNTED = ("ComputeInline", "ComputeAt", "ReverseComputeAt", "CacheWrite", "RFactor", "Parallel", "Split", "Annotate")

CONTEXT = (
    "operations", "rows", "last row", "columns", "channels", "window", "batch", "groups", "weight bytes", "data bytes",
    "result bytes", "operations a byte", "blocks", "blocks after", "parameters", "lanes of the machine", "threads",
)  # fmt: skip
DECIDED = (
    *(f"sampled {n}" for n in range(_SLOTS)), *(f"number of {kind}" for kind in _COUNTED),
    "tasks", "most tasks", "idle share", "tile rows", "tile vectors", "lanes", "unrolled", "accumulators",
    "registers left", "tile efficiency", "rows of a task", "columns of a task", "tiles of a task", "rows are inner",
    "panel bytes", "task weight bytes", "task data bytes", "task result bytes", "task bytes", "reuse of weights",
    "reuse of data", "row waste", "column waste", "slowness",
)  # fmt: skip
NAMES = (*CONTEXT, *DECIDED)  # counts and sizes as their binary logarithms, so that trees split them evenly


@dataclass(frozen=True, slots=True)
class Workload:
    """What the features of a workload's programs have in common."""

    extents: Mapping[str, tuple[int, ...]]  # of the axes of each block, by its name
    main: str  # the contraction or the window with most iterations; empty if there is none
    roles: Roles | None  # of its axes
    context: np.ndarray  # one value for each of CONTEXT
    machine: Registers
    threads: int
    sizes: "Sizes"  # of the main block's elements


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of an element."""

    data: int = 4
    weights: int = 4
    results: int = 4

    @property
    def packing(self) -> int:
        """Elements in the place of a float32, multiplied by one instruction."""
        return 4 // self.weights


def describe(module: tvm.IRModule, target: Target) -> Workload:
    """Of a workload, before it is scheduled."""
    blocks = analysis.leaf_blocks(module["main"])
    extents = {str(block.name_hint): tuple(analysis.extents(block).values()) for block in blocks}
    main, roles = _main(blocks)
    machine = registers(target) if target.kind.name == "llvm" else Registers(0, 0)
    threads = int(target.attrs.get("num-cores", 1))
    params = [param.ty for param in module["main"].params if hasattr(param.ty, "shape")]
    sizes = [analysis.itemsize(of.dtype) * math.prod(int(extent) for extent in of.shape) for of in params]
    of_elements = _sizes(next((block for block in blocks if str(block.name_hint) == main), None))
    operations = sum(
        (2 if block.init is not None else 1) * math.prod(extents[str(block.name_hint)]) for block in blocks
    )
    values = dict.fromkeys(CONTEXT, math.nan) | {
        "operations": _log(operations), "operations a byte": _log(operations / max(1, sum(sizes))),
        "result bytes": _log(sizes[-1]) if sizes else math.nan, "blocks": len(blocks),
        "parameters": len(sizes), "lanes of the machine": machine.lanes * of_elements.packing, "threads": threads,
    }  # fmt: skip
    if main and roles:
        names = list(extents)
        values |= _shape(extents[main], roles, of_elements) | {"blocks after": len(names) - 1 - names.index(main)}
    context = np.array([values[name] for name in CONTEXT], np.float32)
    return Workload(extents, main, roles, context, machine, threads, of_elements)


def _sizes(main: SBlock | None) -> Sizes:
    operands = analysis.weight_and_data(main) if main is not None else None
    if main is None or operands is None:
        return Sizes()
    (weights, data), results = operands, analysis.stored(main).buffer.dtype
    return Sizes(*map(analysis.itemsize, (data.source.dtype, weights.source.dtype, results)))


def _main(blocks: Sequence[SBlock]) -> tuple[str, Roles | None]:
    found = [(math.prod(analysis.extents(block).values()), n, block) for n, block in enumerate(blocks)
             if block.init is not None]  # fmt: skip
    for _, _, block in sorted(found, key=lambda each: each[:2], reverse=True):
        roles = contraction_roles(block) or window_roles(block)
        if roles is not None:
            return str(block.name_hint), roles
    return "", None


def _shape(extents: Sequence[int], roles: Roles, sizes: Sizes) -> dict[str, float]:
    rows, columns = [extents[n] for n in roles.rows], extents[roles.columns]
    *window, channels = [extents[n] for n in roles.reduction]
    batch = math.prod(extents[n] for n in roles.batch)
    return {
        "rows": _log(math.prod(rows)), "last row": _log(rows[-1]), "columns": _log(columns),
        "channels": _log(channels), "window": _log(math.prod(window)), "batch": _log(batch),
        "groups": _log(roles.groups), "data bytes": _log(sizes.data * batch * math.prod(rows) * channels),
        "weight bytes": _log(sizes.weights * batch * channels * math.prod(window) * columns),
    }  # fmt: skip


@dataclass(slots=True)
class _Loop:
    """A loop, as far as it is known where it comes from."""

    extent: int
    axis: int | None = None  # of the main block
    kind: str = "serial"
    parts: tuple["_Loop", ...] = ()  # it was fused from


@dataclass(slots=True)
class Walk:
    """The loops that a trace's instructions made so far, and what was decided."""

    workload: Workload
    decide: Decide
    decisions: list[tuple[int, Decision]] = field(default_factory=list)  # with the numbers of their instructions
    values: dict[str, int] = field(default_factory=dict)  # of sampled variables
    sampled: list[int] = field(default_factory=list)
    loops: dict[str, _Loop] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)  # names by variable
    order: list[str] = field(default_factory=list)  # loop variables around the main block
    tasks: list[int] = field(default_factory=list)  # of each parallel loop
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))

    def step(self, n: int, instruction: Instruction) -> None:
        """Take one more instruction in."""
        kind, inputs, attrs, outputs = instruction
        if kind in self.counts:
            self.counts[kind] += 1
        if kind == "GetSBlock":
            self.blocks[outputs[0]] = attrs[0]
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
            self._reorder([name for name in inputs if name in self.order])
        elif inputs and inputs[0] in self.loops and (made := _MARKS.get(attrs[0] if kind == "Annotate" else kind)):
            loop = self.loops[inputs[0]]
            self.tasks += [loop.extent] if made == "parallel" else []
            _mark(loop, made)

    def _decided(self, n: int, instruction: Instruction, extent: int) -> Decision:
        decision = self.decide(n, instruction, extent)
        self.decisions.append((n, decision))
        return decision

    def _sample(self, outputs: Sequence[str], values: Sequence[int]) -> None:
        self.values |= dict(zip(outputs, values, strict=True))
        self.sampled.append(values[-1])  # of a split, the inner factor

    def _get_loops(self, block: str, outputs: Sequence[str]) -> None:
        extents, is_main = self.workload.extents.get(block, ()), block == self.workload.main
        if len(extents) != len(outputs) or (self.order and is_main):
            return  # the block was moved, or its loops are known
        for n, (variable, extent) in enumerate(zip(outputs, extents, strict=True)):
            self.loops[variable] = _Loop(extent, n if is_main else None)
        if is_main:
            self.order = list(outputs)

    def _split(self, variable: str, factors: Sequence[Any], outputs: Sequence[str]) -> None:
        loop = self.loops.get(variable)
        known = [self.values.get(factor) if isinstance(factor, str) else int(factor) for factor in factors]
        if loop is None and None in known:
            return
        inner = math.prod(factor for factor in known if factor)
        for output, factor in zip(outputs, known, strict=True):
            extent = factor if factor is not None else -(-loop.extent // inner) if loop else 1
            self.loops[output] = _Loop(extent, loop.axis if loop else None)
        self._replace([variable], outputs)

    def _fuse(self, inputs: Sequence[str], output: str) -> None:
        parts = tuple(self.loops[name] for name in inputs if name in self.loops)
        if len(parts) == len(inputs):
            self.loops[output] = _Loop(math.prod(part.extent for part in parts), parts=parts)
            self._replace(inputs, [output])

    def _replace(self, old: Sequence[str], new: Sequence[str]) -> None:
        if old[0] in self.order:
            place = self.order.index(old[0])
            self.order = [name for name in self.order if name not in old]
            self.order[place:place] = new

    def _reorder(self, names: Sequence[str]) -> None:
        places = sorted(self.order.index(name) for name in names)
        for place, name in zip(places, names, strict=True):
            self.order[place] = name

    def nest(self) -> list[_Loop]:
        """The loops around the main block, the outermost first; those that were fused one by one."""
        found: list[_Loop] = []
        stack = [self.loops[name] for name in reversed(self.order)]
        while stack:
            loop = stack.pop()
            if loop.parts:
                stack += reversed(loop.parts)
            else:
                found.append(loop)
        return found

    def features(self) -> np.ndarray:
        """Of the program: float32, one for each of NAMES; NaN where one says nothing."""
        values = dict.fromkeys(DECIDED, math.nan)
        values |= {f"sampled {n}": _log(value) for n, value in enumerate(self.sampled[:_SLOTS])}
        values |= {f"number of {kind}": float(count) for kind, count in self.counts.items()}
        nest = self.nest()
        if self.tasks:
            threads = self.workload.threads
            tasks = math.prod(loop.extent for loop in nest if loop.kind == "parallel") if nest else self.tasks[-1]
            values |= {"tasks": _log(tasks), "most tasks": _log(max(self.tasks)),
                       "idle share": 1 - tasks / (-(-tasks // threads) * threads)}  # fmt: skip
        if nest and self.workload.roles is not None:
            values |= _of_nest(self.workload, self.workload.roles, nest)
            values["slowness"] -= math.log2(1 - values["idle share"]) if self.tasks else 0.0
        return np.concatenate([self.workload.context, np.array([values[name] for name in DECIDED], np.float32)])


def walk(workload: Workload, instructions: Sequence[Instruction], decide: Decide) -> Walk:
    """Walk over a trace up to its postprocessors."""
    found = Walk(workload, decide)
    for n, instruction in enumerate(digests.before_postprocessors(instructions)):
        found.step(n, instruction)
    return found


def features(workload: Workload, trace: str) -> np.ndarray:
    """The features of a program by its trace as JSON: see `Walk.features`."""
    instructions, decisions = json.loads(trace)
    decided = {int(n): tuple(value) if isinstance(value, list) else int(value) for n, value in decisions}
    return walk(workload, instructions, lambda n, _instruction, _extent: decided[n]).features()


def _mark(loop: _Loop, kind: str) -> None:
    loop.kind = kind
    for part in loop.parts:
        _mark(part, kind)


def _of_nest(workload: Workload, roles: Roles, nest: Sequence[_Loop]) -> dict[str, float]:
    """Of the register tile, of what a task works on, and of how often it reads the same again."""
    extents = workload.extents[workload.main]
    columns = (roles.columns,)

    def product(kind: str, axes: Sequence[int]) -> int:
        return math.prod(loop.extent for loop in nest if loop.kind == kind and loop.axis in axes)

    r, v, lanes = product("unroll", roles.rows), product("unroll", columns), product("vectorize", columns)
    turns, turns_of_columns = product("serial", roles.rows), product("serial", columns)  # of a tile within a task
    longer = [loop for loop in nest if loop.kind == "serial" and loop.extent > 1 and loop.axis not in roles.reduction]
    rows_of_task, columns_of_task = turns * r, turns_of_columns * v * lanes
    reduced, channels = math.prod(extents[n] for n in roles.reduction), extents[roles.reduction[-1]]
    sizes = workload.sizes
    data, weights = sizes.data * rows_of_task * channels, sizes.weights * reduced * columns_of_task
    results = sizes.results * rows_of_task * columns_of_task
    width = lanes / max(1, workload.machine.lanes)
    efficiency = r * v * width / 2 / cycles(r, v, width)
    row_waste = product("parallel", roles.rows) * rows_of_task / math.prod(extents[n] for n in roles.rows)
    column_waste = product("parallel", columns) * columns_of_task / extents[roles.columns]
    return {
        "tile rows": r, "tile vectors": v, "lanes": lanes, "unrolled": _log(product("unroll", roles.reduction)),
        "accumulators": r * v, "registers left": workload.machine.count - r * v - v - 1,
        "tile efficiency": efficiency, "slowness": math.log2(row_waste * column_waste / max(efficiency, 1e-3)),
        "rows of a task": _log(rows_of_task), "columns of a task": _log(columns_of_task),
        "tiles of a task": _log(turns * turns_of_columns),
        "rows are inner": float(longer[-1].axis in roles.rows) if longer else math.nan,
        "panel bytes": _log(sizes.weights * reduced * v * lanes), "task weight bytes": _log(weights),
        "task data bytes": _log(data), "task result bytes": _log(results), "task bytes": _log(data + weights + results),
        "reuse of weights": _log(turns), "reuse of data": _log(turns_of_columns),
        "row waste": row_waste, "column waste": column_waste,
    }  # fmt: skip


def _log(value: float) -> float:
    return math.log2(1 + max(0.0, value))
