"""Vectors of elements that are each read by several lanes, as one load and one shuffle.

A convolution in groups of four channels has four groups in a register of sixteen lanes. Each lane multiplies an element
of its own group, and the lanes of one group the same. TVM reads such a vector element by element. Where all of them lie
in one vector that begins at a multiple of its length, that is loaded instead, and its elements are spread to the lanes.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.sym import Analyzer

from lib.tir import analysis

_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.FloorDiv: tirx.floordiv,
    tirx.FloorMod: tirx.floormod,
}


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Have them loaded and spread, on CPUs; after loops became vectors."""
    target = (function.attrs or {}).get("target")
    if target is None or target.kind.name != "llvm":
        return function
    bound = {each.var: each.value for each in analysis.walk(function.body, tirx.Bind)}

    def vector(load: Any) -> Any:
        lanes = tvm.DataType(str(load.ty.dtype)).lanes
        index = load.indices[0] if len(load.indices) == 1 else None
        if lanes == 1 or index is None or isinstance(index, tirx.Ramp) or not _is_in_vectors(load, lanes):
            return load
        found = _spread(index, lanes, bound)
        if found is None:
            return load
        first, places = found
        whole = tirx.BufferLoad(load.source, [tirx.Ramp(first, tirx.const(1, str(first.ty.dtype)), lanes)])
        return tirx.Shuffle([whole], [tirx.const(place, "int32") for place in places])

    return function.with_body(tvm_ffi.structural_map(function.body, (tvm.ir.TensorLoad, vector)))


def _is_in_vectors(load: Any, lanes: int) -> bool:
    """Whether each element has a place of its own in a tensor of so many whole vectors."""
    extents = [extent.value for extent in load.source.ty.shape if isinstance(extent, tirx.IntImm)]
    of_index = tvm.DataType(str(load.indices[0].ty.dtype)).lanes
    is_of_elements = tvm.DataType(str(load.source.ty.dtype)).lanes == 1
    return is_of_elements and of_index == lanes and len(extents) == 1 and extents[0] % lanes == 0


def _spread(index: Any, lanes: int, bound: Mapping[Any, Any]) -> tuple[Any, list[int]] | None:
    """Where the vector begins that has all elements, and which of them each lane reads; None if there is none."""
    of_lanes = [each for lane in range(lanes) if (each := _of_lane(index, lane, bound)) is not None]
    if len(of_lanes) < lanes:
        return None
    analyzer = Analyzer()
    apart = [analyzer.simplify(each - of_lanes[0]) for each in of_lanes]
    known = analyzer.modular_set(analyzer.simplify(_unfolded(of_lanes[0], bound)))
    if not all(isinstance(each, tirx.IntImm) for each in apart) or known.coeff % lanes:
        return None
    begin = known.base % lanes
    places = [begin + int(each) for each in apart]
    return (of_lanes[0] - begin, places) if all(0 <= place < lanes for place in places) else None


def _of_lane(expr: Any, lane: int, bound: Mapping[Any, Any]) -> Any | None:
    """The element of a vector of indices; None if it is made of something unknown."""
    if tvm.DataType(str(expr.ty.dtype)).lanes == 1:
        return expr
    if isinstance(expr, tirx.Ramp):
        return expr.base + lane * expr.stride
    if isinstance(expr, tirx.Broadcast):
        return expr.value
    if isinstance(expr, tirx.Var) and expr in bound:
        return _of_lane(bound[expr], lane, bound)
    made = next((made for kind, made in _OPERATIONS.items() if isinstance(expr, kind)), None)
    if made is None:
        return None
    a, b = (_of_lane(part, lane, bound) for part in (expr.a, expr.b))
    return None if a is None or b is None else made(a, b)


def _unfolded(expr: Any, bound: Mapping[Any, Any]) -> Any:
    """The same without names for what it is made of."""
    while known := {var: bound[var] for var in analysis.variables([expr]) if var in bound}:
        expr = analysis.replaced(expr, known)
    return expr
