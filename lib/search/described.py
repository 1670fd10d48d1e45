"""What a workload is, as numbers: the part of the features that all its programs have in common.

Of contractions and windows it is the shape by the roles of their axes. Of others (reductions over rows or lines,
element-wise chains, transpositions) it is the shape of what is written, how neighbours of that are read, and what each
element costs: those are bound by memory, by tasks that are too short, or by vectors that fall apart into single
elements.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import tirx
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.schedule import ScheduleError
from tvm.target import Target

from lib.machine.registers import Registers, registers
from lib.search.spaces.roles import Roles, contraction_roles, window_roles
from lib.tir import analysis
from lib.tir.addresses import Access, access
from lib.tir.operators import ATTENTION, CHOSEN_SUM, WINOGRAD, WINOGRAD_1D, core_operator, operator, operators

CONTEXT = (
    "operations", "rows", "last row", "columns", "channels", "window", "batch", "groups", "weight bytes", "data bytes",
    "result bytes", "operations a byte", "blocks", "blocks after", "parameters", "lanes of the machine", "threads",
    # Where there is no register tile:
    "run", "reads", "reads across", "reads again", "functions", "conditions", "divisions", "bytes read",
    "bytes written",
)  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class Plain:
    """The block of a workload without a register tile: its heaviest reduction, or else its last block, with all that
    is computed before it element by element.

    Attributes:
        spatial: Its axes that are not reduced, in their order; the last of them is written contiguously.
        run: Neighbours in the result for which whatever is read lies equally far apart.
        source: Where it reads the largest tensor; None if that is not known. `result`: where it writes.
    """

    spatial: tuple[int, ...]
    reduction: tuple[int, ...]
    run: int
    source: Access | None
    result: Access | None
    is_one_run: bool  # all of the result is
    is_serial: bool  # it calls what TVM makes loops of, where it is in vectors
    has_conditions: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """What the features of a workload's programs have in common."""

    extents: Mapping[str, tuple[int, ...]]  # of the axes of each block, by its name
    reduction: Mapping[str, tuple[int, ...]]  # which of them are reduced
    main: str  # the contraction or the window with most iterations, or the block of `plain`; empty if there is none
    roles: Roles | None  # of its axes
    plain: Plain | None  # if it has no roles
    # Of blocks that sum products of its batch: which of their axes each of its own axes is read by.
    sums: Mapping[str, Sequence[tuple[int, ...]]]
    readers: Mapping[str, Sequence[str]]  # of what each block writes; empty but where a task may have all of them
    shares_batch: bool  # such tasks have one of the main block's batch each, not all
    context: np.ndarray  # one value for each of CONTEXT
    machine: Registers
    threads: int
    sizes: Sizes  # of the main block's elements


def describe(module: tvm.IRModule, target: Target) -> Workload:
    """Of a workload, before it is scheduled."""
    blocks = analysis.leaf_blocks(module["main"])
    extents = {str(block.name_hint): tuple(analysis.extents(block).values()) for block in blocks}
    reduction = {str(block.name_hint): tuple(analysis.reduction_axes(block)) for block in blocks}
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
        "operations": log(operations), "operations a byte": log(operations / max(1, sum(sizes))),
        "result bytes": log(sizes[-1]) if sizes else math.nan, "blocks": len(blocks),
        "parameters": len(sizes), "lanes of the machine": machine.lanes * of_elements.packing, "threads": threads,
    }  # fmt: skip
    plain = None
    if main and roles:
        values |= _shape(extents[main], roles, of_elements)
    elif (block := _plain_block(module)) is not None:
        main, plain = str(block.name_hint), _plain(block)
        of_elements = Sizes(_bytes_read(block), 4, analysis.itemsize(analysis.stored(block).buffer.dtype))
        values |= _plain_shape(block, plain, of_elements)
    if main:
        names = list(extents)
        values["blocks after"] = len(names) - 1 - names.index(main)
    context = np.array([values[name] for name in CONTEXT], np.float32)
    sums = _sums(blocks, main) if roles and roles.batch else {}
    core = core_operator(operators(module))
    readers = _readers(blocks) if core.startswith((WINOGRAD, WINOGRAD_1D, ATTENTION)) else {}
    return Workload(
        extents, reduction, main, roles, plain, sums, readers, core.startswith(ATTENTION), context, machine, threads,
        of_elements,
    )  # fmt: skip


def _readers(blocks: Sequence[SBlock]) -> dict[str, list[str]]:
    """See `Workload.readers`."""
    stores = {str(block.name_hint): analysis.stored(block) for block in blocks}
    return {
        name: [other for other, found in stores.items()
               if any(load.source.same_as(store.buffer) for load in analysis.loaded(found))]
        for name, store in stores.items()
    }  # fmt: skip


def _sums(blocks: Sequence[SBlock], main: str) -> dict[str, list[tuple[int, ...]]]:
    """See `Workload.sums`."""
    [products] = [analysis.stored(block).buffer for block in blocks if str(block.name_hint) == main]
    found = {}
    for block in (each for each in blocks if operator(each) == CHOSEN_SUM):
        axes = [axis.var for axis in block.iter_vars]
        loads = [load for load in analysis.loaded(analysis.stored(block)) if load.source.same_as(products)]
        if loads:
            read = [analysis.variables([index]) for index in loads[0].indices]
            found[str(block.name_hint)] = [tuple(n for n, var in enumerate(axes) if var in of) for of in read]
    return found


def log(value: float) -> float:
    """Counts and sizes as their binary logarithms, so that trees split them evenly."""
    return math.log2(1 + max(0.0, value))


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
        "rows": log(math.prod(rows)), "last row": log(rows[-1]), "columns": log(columns),
        "channels": log(channels), "window": log(math.prod(window)), "batch": log(batch),
        "groups": log(roles.groups), "data bytes": log(sizes.data * batch * math.prod(rows) * channels),
        "weight bytes": log(sizes.weights * batch * channels * math.prod(window) * columns),
    }  # fmt: skip


def _plain_block(module: tvm.IRModule) -> SBlock | None:
    """See `Plain`; None if it has several statements or loops within."""
    blocks = analysis.leaf_blocks(module["main"])
    reductions = [block for block in blocks if block.init is not None]
    heaviest = max(reductions, key=lambda block: math.prod(analysis.extents(block).values()), default=None)
    main = heaviest or (blocks[-1] if blocks else None)
    if main is None or analysis.walk(main.body, tirx.For) or len(analysis.walk(main.body, tirx.BufferStore)) != 1:
        return None
    schedule = Schedule(module, debug_mask="none")
    for block in blocks[: [str(each.name_hint) for each in blocks].index(str(main.name_hint))]:
        try:
            schedule.compute_inline(schedule.get_sblock(block.name_hint))
        except ScheduleError:  # a reduction, say
            continue
    return schedule.get(schedule.get_sblock(main.name_hint))


def _plain(block: SBlock) -> Plain:
    axes, extents = [axis.var for axis in block.iter_vars], list(analysis.extents(block).values())
    store, spatial = analysis.stored(block), tuple(analysis.spatial_axes(block))
    reads = _reads(block)
    largest = max(reads, key=lambda each: each.size, default=None)
    result = access(axes, extents, store.indices, store.buffer.ty.shape)
    runs = [each.run(spatial)[0] for each in [*reads, *([result] if result else [])]]
    run = math.gcd(*runs) if runs else 1
    is_one_run = run == math.prod(extents[n] for n in spatial)
    functions, conditions = _calls(block)
    is_serial = any(not tvm.ir.Op.get(name).get_attr("TVectorizable") for name in functions)
    reduction = tuple(analysis.reduction_axes(block))
    return Plain(spatial, reduction, run, largest, result, is_one_run, is_serial, conditions > 0)


def _calls(block: SBlock) -> tuple[list[str], int]:
    """The functions that an element takes, by TVM's names; and how many choices between two values."""
    value = analysis.stored(block).value
    names = [call.op.name for call in analysis.walk(value, tvm.ir.Call) if isinstance(call.op, tvm.ir.Op)]
    functions = [name for name in names if not name.endswith("if_then_else")]
    return functions, len(names) - len(functions)


def _reads(block: SBlock) -> list[Access]:
    axes, extents = [axis.var for axis in block.iter_vars], list(analysis.extents(block).values())
    loads = analysis.loaded(analysis.stored(block))
    found = [access(axes, extents, load.indices, load.source.ty.shape) for load in loads]
    return [each for each in found if each is not None]


def _bytes_read(block: SBlock) -> int:
    """Of an element of the largest tensor that is read."""
    loads = analysis.loaded(analysis.stored(block))
    largest = max(loads, key=lambda load: math.prod(int(n) for n in load.source.ty.shape), default=None)
    return analysis.itemsize(largest.source.dtype) if largest is not None else 4


def _plain_shape(block: SBlock, plain: Plain, sizes: Sizes) -> dict[str, float]:
    extents, value = list(analysis.extents(block).values()), analysis.stored(block).value
    *rows, columns = [extents[n] for n in plain.spatial] or [1]
    reads = _reads(block)
    steps = [each.run(plain.spatial[-1:])[1] if columns > 1 else 0 for each in reads]
    functions, conditions = _calls(block)
    divisions = [node for kind in (tirx.FloorDiv, tirx.FloorMod) for node in analysis.walk(value, kind)]
    return {
        "rows": log(math.prod(rows)), "last row": log(rows[-1] if rows else 1), "columns": log(columns),
        "channels": log(math.prod(extents[n] for n in plain.reduction)), "run": log(plain.run), "reads": len(reads),
        "reads across": sum(abs(step) > 1 for step in steps), "reads again": sum(step == 0 for step in steps),
        "functions": len(functions) + len(analysis.walk(value, tirx.Div)), "conditions": conditions,
        "divisions": len(divisions), "bytes read": sizes.data, "bytes written": sizes.results,
        "data bytes": log(sizes.data * (plain.source.size if plain.source else 0)),
    }  # fmt: skip
