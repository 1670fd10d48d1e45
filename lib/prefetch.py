"""Weights on their way from memory before they are needed.

A model reads most of its weights once in an inference, so they come from memory, and a kernel that goes through a panel
of packed weights many times waits in the first of these passes: a line has hardly been asked for when the sums want it.
Here the passes over one panel ask for the next one, in equal parts, so that it lies in the second cache when its turn
comes. Loops that a space has marked get this when they are compiled: no step of a schedule can say it, and where the
next panel lies is known only once the weights are packed.
Source: panels that stay in the second cache while they are used are those of Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication" (TOMS 2008), section 4.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize

from lib import structure

MARK = "prefetch_weights"  # annotation of the innermost loop of a sum, the one around a register tile

_LINE = 16  # float32 numbers in a cache line
_AHEAD = 1 << 13  # numbers, where nothing is read twice: far enough for memory, near enough for the second cache
_READ, _INTO_SECOND_CACHE, _DATA = 0, 2, 1  # as `llvm.prefetch` has it


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Have marked loops ask for the next panel of weights, where those are a parameter of the function and packed in
    the order in which they are read; others stay as they are."""
    nests = [nest for nest in structure.nests(function.body) if MARK in nest[-1].annotations]
    requests = {nest[-1].loop_var: _requests(nest, function.params) for nest in nests}
    if not any(requests.values()):
        return function

    def asking(loop: tirx.For) -> tirx.For:
        asks = requests.get(loop.loop_var)
        if not asks:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, tirx.SeqStmt([*asks, loop.body]))

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, asking)))


@dataclass(frozen=True, slots=True)
class Panel:
    """Weights that are read in one piece, several times over."""

    weights: Any  # the tensor
    start: list[Any]  # where it begins, as indices
    size: int  # numbers
    step: int  # numbers that are read in each step of the sum
    steps: list[tirx.For]  # the loops over them, the innermost first
    passes: list[tirx.For]  # the loops that read it again, the innermost first


def _requests(nest: Sequence[tirx.For], params: Sequence[Any]) -> list[tirx.Stmt]:
    """What asks for a step's share of the next panel."""
    panel = _panel(nest, params)
    if panel is None:
        return []
    n_passes = math.prod(int(loop.extent) for loop in panel.passes)
    if n_passes > panel.step:
        return []
    ahead = panel.size if n_passes > 1 else min(panel.size, _AHEAD)
    share = -(-panel.step // n_passes)  # of a step, in numbers
    begin = _flat(panel.passes) * panel.size // n_passes + _flat(panel.steps) * share
    *outer, last = panel.start
    return [
        tirx.Evaluate(_prefetch(panel.weights, [*outer, last + (ahead + begin + n)])) for n in range(0, share, _LINE)
    ]


def _prefetch(tensor: Any, indices: Sequence[Any]) -> Any:
    address = tirx.address_of(tirx.BufferLoad(tensor, indices))
    return tirx.call_intrin("void", "tirx.prefetch", address, _READ, _INTO_SECOND_CACHE, _DATA)


def _flat(loops: Sequence[tirx.For]) -> Any:
    """How many turns of nested loops came before, the innermost loop first."""
    number, length = tirx.IntImm("int64", 0), 1
    for loop in loops:
        number, length = number + loop.loop_var * length, length * int(loop.extent)
    return number


def _panel(nest: Sequence[tirx.For], params: Sequence[Any]) -> Panel | None:
    """What is read within the innermost loop of a nest, from packed weights; None if there is nothing of the kind."""
    inner = structure.walk(nest[-1].body, tirx.For)
    lanes = [loop for loop in inner if loop.kind == tirx.ForKind.VECTORIZED]
    realizations = structure.walk(nest[-1].body, SBlockRealize)
    if len(realizations) != 1 or len(lanes) != 1:
        return None
    block, values = realizations[0].block, realizations[0].iter_values
    bound = {axis.var: value for axis, value in zip(block.iter_vars, values, strict=True)}
    sums = {var for n in structure.summed_axes(block) for var in structure.walk(values[n], tirx.Var)}
    for load in structure.walk(block.body, tvm.ir.TensorLoad):
        if not any(load.source.same_as(param) for param in params):
            continue
        indices = [structure.replaced(index, bound) for index in load.indices]
        strides = {loop: structure.step(indices, load.source.ty.shape, loop.loop_var) for loop in (*nest, *inner)}
        if strides[lanes[0]] == 1:  # else it is the data, of which all lanes take one number
            return _panel_of(load.source, indices, nest, inner, sums, strides)
    return None


def _panel_of(
    weights: Any,
    indices: Sequence[Any],
    nest: Sequence[tirx.For],
    inner: Sequence[tirx.For],
    sums: Collection[Any],
    strides: Mapping[tirx.For, int],
) -> Panel | None:
    """The same of weights that are read in vectors; None if the steps of the sum do not lie one after the other."""
    around = [loop for loop in reversed(nest) if int(loop.extent) > 1]
    steps = list(itertools.takewhile(lambda loop: loop.loop_var in sums, around))
    again = itertools.takewhile(lambda loop: strides[loop] == 0, around[len(steps) :])
    passes = [loop for loop in again if loop.kind != tirx.ForKind.PARALLEL]
    size = step = math.prod(int(loop.extent) for loop in inner if strides[loop])
    if not passes and step == math.prod(int(loop.extent) for loop in inner):
        return None  # a single row: the CPU itself is as good at reading ahead where that is all it does
    for loop in steps:
        if strides[loop] != size:
            return None
        size *= int(loop.extent)
    within = {loop.loop_var: tirx.IntImm(loop.loop_var.ty.dtype, 0) for loop in (*inner, *steps, *passes)}
    return Panel(weights, [structure.replaced(index, within) for index in indices], size, step, steps, passes)
