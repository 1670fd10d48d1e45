"""Software prefetch of packed weights into L2.

A model reads most of its weights once in an inference, so they come from memory, and a kernel that reads a panel of
packed weights many times stalls in the first of these passes. Here the passes over one panel prefetch the next one, in
equal parts, so that it is in L2 when its first pass begins; weights of a single row are all read once. Loops that a
space has marked get this when they are lowered: no schedule primitive inserts a prefetch, and the address of the next
panel is known only once the weights are packed.
Source: panels that stay in L2 while they are used are those of Goto and van de Geijn, "Anatomy of High-Performance
Matrix Multiplication" (TOMS 2008), section 4.
"""

import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize

from lib.machine.dots import named
from lib.tir import analysis, dot, matrix

MARK = "prefetch_weights"  # annotation of the innermost K loop, the one around a register tile

_LINE = 64  # bytes of a cache line
# Bytes, where nothing is read twice, as by a single row: farther than memory latency. On Zen 4 such weights come as
# fast without; a Xeon (Sapphire Rapids) reads 22 to 27 GB/s with it, 20 to 23 without (32 KB: 0.94 to 1.0 of that).
_AHEAD = 1 << 13
_READ, _INTO_L2, _DATA = 0, 2, 1  # arguments of `llvm.prefetch`


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Prefetch the next panel of weights in marked loops, where the weights are a parameter of the function and packed
    in the order in which they are read; other loops stay as they are."""
    nests = [nest for nest in analysis.nests(function.body) if MARK in nest[-1].annotations]
    prefetches = {nest[-1].loop_var: _prefetches(nest, function.params) for nest in nests}
    if not any(prefetches.values()):
        return function

    def with_prefetches(loop: tirx.For) -> tirx.Stmt:
        found = prefetches.get(loop.loop_var)
        if not found:
            return loop
        is_step, others = matrix.MARK in loop.annotations, {k: v for k, v in loop.annotations.items() if k != MARK}
        body = loop.body if is_step else tirx.SeqStmt([*found, loop.body])
        rest = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=others)
        return tirx.SeqStmt([*found, rest]) if is_step else rest

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, with_prefetches)))


@dataclass(frozen=True, slots=True)
class Panel:
    """A contiguous part of the weights that is read several times over, or one of several for neighbouring vectors."""

    weights: Any  # the tensor
    start: list[Any]  # indices of its first element
    size: int  # elements
    ahead: int  # elements from its beginning to that of the next one
    step: int  # elements that are read in each step of the reduction
    steps: list["Turn"]  # of the reduction, the innermost first
    passes: list["Turn"]  # that read it again, the innermost first


@dataclass(frozen=True, slots=True)
class Turn:
    """The iteration of a loop, of so many that read other elements: the first of them, where some read these again."""

    index: Any
    count: int


def _prefetches(nest: Sequence[tirx.For], params: Sequence[Any]) -> list[tirx.Stmt]:
    """The prefetches of one step, its share of the next panel: of an iteration of the innermost loop, or of all of it
    where one instruction takes its place (`lib.tir.matrix`)."""
    panel = _panel(nest, params)
    if panel is None:
        return []
    n_passes = math.prod(turn.count for turn in panel.passes)
    if n_passes > panel.step:
        return []
    element = analysis.itemsize(panel.weights.dtype)
    ahead = panel.ahead if n_passes > 1 else min(panel.size, _AHEAD // element)
    share = -(-panel.step // n_passes)  # of a step, in elements
    begin = _flat(panel.passes) * panel.size // n_passes + _flat(panel.steps) * share
    *outer, last = panel.start
    return [
        tirx.Evaluate(_prefetch(panel.weights, [*outer, last + (ahead + begin + n)]))
        for n in range(0, share, _LINE // element)
    ]


def _prefetch(tensor: Any, indices: Sequence[Any]) -> Any:
    address = tirx.address_of(tirx.BufferLoad(tensor, indices))
    return tirx.call_intrin("void", "tirx.prefetch", address, _READ, _INTO_L2, _DATA)


def _flat(turns: Sequence[Turn]) -> Any:
    """The index of an iteration of nested loops, given the innermost first, as if they were fused."""
    index, length = tirx.IntImm("int64", 0), 1
    for turn in turns:
        index, length = index + turn.index * length, length * turn.count
    return index


def _panel(nest: Sequence[tirx.For], params: Sequence[Any]) -> Panel | None:
    """The panel of packed weights that the innermost loop of a nest reads from; None if it reads none."""
    n_around = len(nest) - (matrix.MARK in nest[-1].annotations)
    inner = [*analysis.walk(nest[-1].body, tirx.For), *nest[n_around:]]
    lanes = [loop for loop in inner if loop.kind == tirx.ForKind.VECTORIZED or dot.MARK in loop.annotations]
    realizations = analysis.walk(nest[-1].body, SBlockRealize)
    if len(realizations) != 1 or len(lanes) != 1:
        return None
    block, values = realizations[0].block, realizations[0].iter_values
    bound = {axis.var: value for axis, value in zip(block.iter_vars, values, strict=True)}
    reduced = {var for n in analysis.reduction_axes(block) for var in analysis.walk(values[n], tirx.Var)}
    for load in analysis.walk(block.body, tvm.ir.TensorLoad):
        if not any(load.source.same_as(param) for param in params):
            continue
        indices = [analysis.replaced(index, bound) for index in load.indices]
        strides = {loop: analysis.stride(indices, load.source.ty.shape, loop.loop_var) for loop in (*nest, *inner)}
        if strides[lanes[0]] == _products(
            lanes[0]
        ):  # else it is the data, an element of which is broadcast to all lanes
            return _panel_of(load.source, indices, nest[:n_around], inner, reduced, strides)
    return None


def _products(lanes: tirx.For) -> int:
    """How many products an iteration of a loop over lanes adds: neighbouring elements of the weights."""
    return named(str(lanes.annotations[dot.MARK])).depth if dot.MARK in lanes.annotations else 1


def _panel_of(
    weights: Any,
    indices: Sequence[Any],
    nest: Sequence[tirx.For],
    inner: Sequence[tirx.For],
    reduced: Collection[Any],
    strides: Mapping[tirx.For, int],
) -> Panel | None:
    """The same of weights that are read in vectors; None if the steps of the reduction are not contiguous.

    Args:
        nest: The loops around the register tile, the outermost first; `inner`: those of the tile.
        reduced: Variables of the reduction.
        strides: Of the weights with each loop, in elements.
    """
    around = [loop for loop in reversed(nest) if int(loop.extent) > 1]
    # Where matrices are multiplied, the vectors of a tile lie one after the other, each with all of the reduction.
    unrolled = tirx.ForKind.UNROLLED
    steps = list(itertools.takewhile(lambda loop: loop.loop_var in reduced or loop.kind == unrolled, around))
    unmoved = itertools.takewhile(lambda loop: strides[loop] == 0, around[len(steps) :])
    passes = [loop for loop in unmoved if loop.kind != tirx.ForKind.PARALLEL]
    size = step = math.prod(int(loop.extent) for loop in inner if strides[loop])
    turns = [_turn(weights, indices, loop) for loop in steps]
    *sizes, size = itertools.accumulate([size, *(turn.count for turn in turns)], operator.mul)
    is_next = [strides[loop] == far for loop, far in zip(steps, sizes, strict=True)]
    ahead = size
    if steps and steps[-1].loop_var not in reduced and not is_next[-1]:  # vectors, with a part of the reduction each
        ahead, size = strides[steps[-1]] * turns[-1].count, sizes[-1]
        del steps[-1], turns[-1], is_next[-1]
    if not all(is_next):
        return None
    within = {loop.loop_var: tirx.IntImm(loop.loop_var.ty.dtype, 0) for loop in (*inner, *steps, *passes)}
    start = [analysis.replaced(index, within) for index in indices]
    again = [Turn(loop.loop_var, int(loop.extent)) for loop in passes]
    return Panel(weights, start, size, ahead, step, turns, again)


def _turn(weights: Any, indices: Sequence[Any], loop: tirx.For) -> Turn:
    """Of a loop of the reduction: it reads fewer places than it has iterations where parts are read several times
    (`lib.graph.splitting`)."""
    extent, at = int(loop.extent), (indices, weights.ty.shape, loop.loop_var)
    if analysis.is_linear(*at, extent):
        return Turn(loop.loop_var, extent)
    count = len({analysis.stride(*at, n) for n in range(extent)})
    return Turn(loop.loop_var % count, count)
