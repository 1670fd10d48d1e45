"""Vectors that run on from row to row, as the contiguous memory that they are.

A tensor that is computed element by element may be taken as one row, in vectors that do not divide its own. The indices
of an element are then quotients and remainders of its place, from which its address is that place again. TVM's
simplifier sees it where it has not rewritten a remainder first: of 32 * v by 24 it makes one of 8 * v, which no longer
fits the quotient, and each element of the vector is read from an address of its own. Here the place that indices stand
for is computed for all iterations, and they are replaced if that is a sum of multiples of the loops' variables.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize

from lib.tir import analysis

_MOST = 1 << 22  # iterations that are looked at

_Loops = Sequence[tirx.For]

_OPERATORS: dict[type, Any] = {
    tirx.Add: np.add, tirx.Sub: np.subtract, tirx.Mul: np.multiply, tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod, tirx.LT: np.less, tirx.And: np.logical_and,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Scope:
    """Where a block is computed."""

    axes: Mapping[Any, Any]  # what they are, by the loops' variables
    predicate: Any
    loops: _Loops  # around it


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Straighten the accesses to a function's tensors in loops that become vectors."""
    scopes = _scopes(function)
    if not scopes:
        return function
    given = [param for param in function.params if isinstance(param.ty, tirx.BufferType)]

    def straight(access: Any) -> Any:
        tensor = access.source if isinstance(access, tvm.ir.TensorLoad) else access.buffer
        found = next((scopes[var] for var in analysis.variables(access.indices) if var in scopes), None)
        if found is None or not any(tensor.same_as(param) for param in given):
            return access
        place = _place(tensor, access.indices, found)
        if place is None:
            return access
        # Within memory, if not within the last axis: addresses are all that is made of indices from here on.
        indices = [*(tirx.const(0, place.ty.dtype) for _ in access.indices[1:]), place]
        if isinstance(access, tvm.ir.TensorLoad):
            return tirx.BufferLoad(tensor, indices)
        return tirx.BufferStore(tensor, access.value, indices)

    change = [(kind, straight) for kind in (tvm.ir.TensorLoad, tirx.BufferStore)]
    return function.with_body(tvm_ffi.structural_map(function.body, change))


def _scopes(function: tirx.PrimFunc) -> dict[Any, _Scope]:
    """By the axes of blocks in loops that become vectors; of blocks that are there once."""
    found: dict[Any, _Scope] = {}
    again: set[Any] = set()
    for nest in analysis.nests(function.body):
        if nest[-1].kind != tirx.ForKind.VECTORIZED or analysis.walk(nest[-1].body, tirx.For):
            continue
        if not all(isinstance(loop.extent, tirx.IntImm) and isinstance(loop.min, tirx.IntImm) for loop in nest):
            continue
        for realized in analysis.walk(nest[-1].body, SBlockRealize):
            axes = {axis.var: value for axis, value in zip(realized.block.iter_vars, realized.iter_values, strict=True)}
            again |= found.keys() & axes.keys()
            found.update(dict.fromkeys(axes, _Scope(axes, realized.predicate, nest)))
    return {axis: scope for axis, scope in found.items() if axis not in again}


def _place(tensor: Any, indices: Sequence[Any], scope: _Scope) -> Any:
    """Where in memory an access is, as a sum of multiples of loop variables; None if it is none, or looks like one."""
    shape = list(tensor.ty.shape)
    if not all(isinstance(extent, tirx.IntImm) for extent in shape) or getattr(tensor.ty, "strides", None):
        return None
    strides = [math.prod(int(extent) for extent in shape[n + 1 :]) for n in range(len(shape))]
    bound = [analysis.replaced(index, scope.axes) for index in indices]
    lane = scope.loops[-1].loop_var
    is_cut = any(lane in analysis.variables([cut]) for cut in analysis.walk(bound, tirx.FloorMod))
    known = analysis.variables([*bound, scope.predicate])
    there = [loop for loop in scope.loops if loop.loop_var in known]
    if not is_cut or math.prod(int(loop.extent) for loop in there) > _MOST:
        return None
    values = {loop.loop_var: _iterations(loop, n, len(there)) for n, loop in enumerate(there)}
    parts = [_evaluated(index, values) for index in (*bound, scope.predicate)]
    if any(part is None for part in parts):
        return None
    *parts, is_there = parts
    places = np.asarray(sum(part * stride for part, stride in zip(parts, strides, strict=True)))
    return _as_sum(places, np.asarray(is_there, bool), there, values, str(indices[-1].ty.dtype))


def _iterations(loop: tirx.For, axis: int, rank: int) -> np.ndarray:
    """The values of a loop's variable, along an axis of their own."""
    values = int(loop.min) + np.arange(int(loop.extent), dtype=np.int64)
    return values.reshape([-1 if n == axis else 1 for n in range(rank)])


def _evaluated(expr: Any, values: Mapping[Any, np.ndarray]) -> Any:
    if isinstance(expr, (bool, int, tirx.IntImm)):
        return int(expr)
    if isinstance(expr, tirx.Var):
        return values.get(expr)
    if type(expr) not in _OPERATORS:
        return None
    operands = [_evaluated(each, values) for each in (expr.a, expr.b)]
    return None if any(each is None for each in operands) else _OPERATORS[type(expr)](*operands)


def _as_sum(
    places: np.ndarray, is_there: np.ndarray, loops: _Loops, values: Mapping[Any, np.ndarray], kind: str
) -> Any:
    """Multiples of loop variables that add up to places in memory, wherever an access is done."""
    shape = tuple(int(loop.extent) for loop in loops)
    places = np.broadcast_to(places, shape)
    first = int(places.flat[0])
    total, expr = np.full((1,) * len(loops), first), tirx.const(first, kind)
    for axis, loop in enumerate(loops):
        line = np.moveaxis(places, axis, 0).reshape(shape[axis], -1)[:, 0]
        step, begin = int(line[1] - line[0]) if len(line) > 1 else 0, int(loop.min)
        total = total + step * (values[loop.loop_var] - begin)
        expr = expr + (loop.loop_var.astype(kind) - begin) * step
    is_same = np.broadcast_to(total, shape) == places
    return expr if np.all(is_same | ~np.broadcast_to(is_there, shape)) else None
