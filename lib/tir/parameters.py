"""What a TIR function's parameters are for: which are weights, and which values those of integers stand for."""

import math
from typing import Any

import tvm
from tvm import tirx

from lib.tir import analysis, small_weights
from lib.tir.analysis import walk, without_casts

LAYOUT_FREE = "layout_free_buffers"  # the attribute in which TVM has the positions of weights


def weight_positions(function: tirx.PrimFunc) -> list[int]:
    """The parameters of a workload that are weights of the model: those that `lib.graph.fusion.fuse` has marked."""
    return [int(position) for position in (function.attrs or {}).get(LAYOUT_FREE, [])]


def value_bounds(function: tirx.PrimFunc) -> dict[int, int]:
    """For parameters of integers: the exclusive upper bound of what to run the function with, where one can be told.

    That of an index is the extent of what it indexes, that of a mask is 2. Where an index is computed from a parameter
    in any other way, only zeros are known to be safe (bound 1). TVM's own random fill is not: it writes float bits.

    Weights that are known to be small (`lib.tir.small_weights`) have the largest magnitude of such as a negative bound.

    And for weights of steps, each of which computes from what the one before it did: how many products are summed.
    With weights as large as others have them, roundings would grow from step to step, until nothing could be compared.
    """
    if analysis.has_steps(function):
        return _weights_of_steps(function)
    held = _held(function)
    if not held:
        return {}
    reached = dict.fromkeys(_reached_by_indices(function, held), 1)
    small = {n: -largest for n, largest in small_weights.bounds(function).items()}
    return {**dict.fromkeys(masks(function), 2), **reached, **index_bounds(function), **small}


def _weights_of_steps(function: tirx.PrimFunc) -> dict[int, int]:
    reduction = analysis.only_reduction(function)
    factors = None if reduction is None else analysis.factors(reduction)
    if reduction is None or factors is None:
        return {}
    n_products = math.prod(int(reduction.iter_vars[n].dom.extent) for n in analysis.reduction_axes(reduction))
    return {
        n: n_products for n, param in enumerate(function.params) if any(load.source.same_as(param) for load in factors)
    }


def index_bounds(function: tirx.PrimFunc) -> dict[int, int]:
    """For each integer parameter that is used as an index: the smallest extent of what it indexes."""
    held = _held(function)
    bounds: dict[int, int] = {}
    for index, extent in _indices(function) if held else []:
        for load in walk(index, tvm.ir.TensorLoad):
            for position in held.get(load.source, ()):
                bounds[position] = min(int(extent), bounds.get(position, int(extent)))
    return bounds


def masks(function: tirx.PrimFunc) -> set[int]:
    """Integer parameters of which only matters whether they are one or zero.

    Those cast to booleans; compared with one number (`mask == 0`, `mask > 0`); or, cast to floats, subtracted from one,
    or one from them, as in the `(1 - mask) * -10000` that is added to attention scores. What is an index as well is
    no mask: ids are compared with that of the padding.
    """
    held = _held(function)
    found: set[int] = set()
    for cast in walk(function.body, tirx.Cast) if held else []:
        if str(cast.ty.dtype) == "bool":
            found |= _values(cast.value, held)
    for kind in (tirx.EQ, tirx.NE, tirx.GT, tirx.LT) if held else ():
        for node in walk(function.body, kind):
            if _is_one_number(node.b) and kind is not tirx.LT:  # `ids < 0` tells ids that count from the end
                found |= _values(node.a, held)
            if _is_one_number(node.a) and kind is not tirx.GT:
                found |= _values(node.b, held)
    for node in walk(function.body, tirx.Sub) if held else []:
        if (isinstance(node.a, tirx.FloatImm) and float(node.a.value) == 1) or _is_only_element(node.a):
            found |= _values(node.b, held)
        if isinstance(node.b, tirx.FloatImm) and float(node.b.value) == 1:
            found |= _values(node.a, held)
    return found - set(index_bounds(function))


def counted(function: tirx.PrimFunc) -> set[int]:
    """Integer parameters that are only summed, as a mask is to tell how long a sequence is."""
    held = _held(function)
    summed, read = set[int](), set[int]()
    for store in walk(function.body, tirx.BufferStore) if held else []:
        sources = [load.source for load in walk(store.value, tvm.ir.TensorLoad)]
        positions = {position for source in sources for position in held.get(source, ())}
        if isinstance(store.value, tirx.Add) and any(source.same_as(store.buffer) for source in sources):
            summed |= positions
        elif store.buffer not in held:
            read |= positions
    return summed - read


def is_held(function: tirx.PrimFunc, position: int) -> bool:
    """Whether a function's last parameter, its result, holds the values of an integer parameter; see `_held`."""
    return position in _held(function).get(function.params[-1], ())


def _held(function: tirx.PrimFunc) -> dict[Any, set[int]]:
    """By buffer, the positions of the integer parameters whose values it holds: moved, cast, or with an offset, as ids
    that count from the end get one."""
    held: dict[Any, set[int]] = {
        param: {n}
        for n, param in enumerate(function.params)
        if hasattr(param.ty, "dtype") and str(param.ty.dtype).startswith(("int", "uint"))
    }
    for store in walk(function.body, tirx.BufferStore) if held else []:
        positions = _values(store.value, held)
        if positions:
            held[store.buffer] = held.get(store.buffer, set()) | positions
    return held


def _values(value: Any, held: dict[Any, set[int]]) -> set[int]:
    """Positions of the parameters whose value an expression is; see `_held`."""
    value = without_casts(value)
    if isinstance(value, tvm.ir.TensorLoad):
        return held.get(value.source, set())
    if isinstance(value, tirx.Add) and _is_one_number(value.b):
        return _values(value.a, held)
    if isinstance(value, tirx.Select):
        return _values(value.true_value, held) & _values(value.false_value, held)
    return set()


def _is_one_number(expr: Any) -> bool:
    """Whether an expression is the same number for all elements."""
    expr = without_casts(expr)
    return isinstance(expr, (tirx.IntImm, tirx.FloatImm)) or _is_only_element(expr)


def _is_only_element(expr: Any) -> bool:
    """Whether this is read from a tensor of one element, as constants of shape (1,) are."""
    if not isinstance(expr, tvm.ir.TensorLoad):
        return False
    return all(isinstance(extent, tirx.IntImm) and int(extent) == 1 for extent in expr.source.ty.shape)


def _indices(function: tirx.PrimFunc) -> list[tuple[Any, Any]]:
    """Each index of a load or a store, with the extent of what it indexes."""
    loads = [(load.indices, load.source) for load in walk(function.body, tvm.ir.TensorLoad)]
    stores = [(store.indices, store.buffer) for store in walk(function.body, tirx.BufferStore)]
    return [pair for indices, buffer in (*loads, *stores) for pair in zip(indices, buffer.ty.shape, strict=True)]


def _reached_by_indices(function: tirx.PrimFunc, held: dict[Any, set[int]]) -> set[int]:
    """Integer parameters on which an index depends, in whatever way."""
    reached = dict(held)
    for store in walk(function.body, tirx.BufferStore):
        for load in walk(store.value, tvm.ir.TensorLoad):
            reached[store.buffer] = reached.get(store.buffer, set()) | reached.get(load.source, set())
    loads = [load for index, _ in _indices(function) for load in walk(index, tvm.ir.TensorLoad)]
    return {position for load in loads for position in reached.get(load.source, ())}
