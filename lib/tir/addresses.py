"""Addresses of a block's accesses as functions of its axes, to be asked for many elements at once.

TVM's `Analyzer` proves what holds for all elements, a millisecond an answer. Here an address is computed for elements
as they come, which is enough to see how far apart neighbours lie, and where a contiguous run of them ends.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from lib.tir import analysis

_BINARY = {
    tirx.Add: np.add, tirx.Sub: np.subtract, tirx.Mul: np.multiply, tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod, tirx.Min: np.minimum, tirx.Max: np.maximum, tirx.LT: np.less, tirx.LE: np.less_equal,
    tirx.GT: np.greater, tirx.GE: np.greater_equal, tirx.EQ: np.equal, tirx.And: np.logical_and, tirx.Or: np.logical_or,
}  # fmt: skip
_LOOKED_AT = 1 << 14  # elements: runs of tensors begin to repeat long before

Value = Callable[[np.ndarray], np.ndarray]  # axes x n -> n


@dataclass(frozen=True, slots=True)
class Access:
    """Where a block reads or writes a tensor.

    Attributes:
        address: In elements of the tensor, of n places: axes x n integers -> n integers.
        extents: Of the block's axes that the address is asked for.
        size: Elements of the tensor.
    """

    address: Value
    extents: tuple[int, ...]
    size: int

    @lru_cache(maxsize=4096)  # noqa: B019 - few are asked for, of accesses that a search keeps anyway
    def step(self, axes: tuple[int, ...], stride: int) -> int:
        """How far, in elements of the tensor, so many steps along some axes lead, taken as one (the last runs fastest),
        from where all are zero; 0 if they lead nowhere."""
        place, left = np.zeros((len(self.extents), 2), np.int64), stride
        for axis in reversed(axes):
            left, place[axis, 1] = divmod(left, max(1, self.extents[axis]))
        first, second = self.address(place)
        return int(second - first)

    def run(self, axes: Sequence[int]) -> tuple[int, int]:
        """How many neighbours along some axes, taken as one, are equally far apart; and how far that is."""
        n = math.prod(self.extents[axis] for axis in axes)
        if n < 2:
            return max(1, n), 1
        place = np.zeros((len(self.extents), min(n, _LOOKED_AT)), np.int64)
        left: np.ndarray = np.arange(place.shape[1])
        for axis in reversed(axes):
            left, place[axis] = np.divmod(left, self.extents[axis])
        steps = np.diff(self.address(place))
        breaks = np.flatnonzero(steps != steps[0]) + 1
        return math.gcd(n, *breaks.tolist()) if len(breaks) else n, int(steps[0])


def access(axes: Sequence[Any], extents: Sequence[int], indices: Sequence[Any], shape: Sequence[Any]) -> Access | None:
    """That of a load or a store; None if an index depends on what is read from memory, or is not known here.

    Args:
        axes: The block's variables; `extents`: theirs.
    """
    numbers = {axis: n for n, axis in enumerate(axes)}
    try:
        values = [_value(index, numbers) for index in indices]
        sizes = [int(extent) for extent in shape]
    except (KeyError, TypeError):
        return None

    def address(places: np.ndarray) -> np.ndarray:
        found = np.zeros(places.shape[1], np.int64)
        for value, size in zip(values, sizes, strict=True):
            found = found * size + value(places)
        return found

    return Access(address, tuple(extents), math.prod(sizes))


def _value(expr: Any, numbers: dict[Any, int]) -> Value:
    """An index as a function of places.

    Raises:
        KeyError: It has a variable or an operation that is not known.
    """
    if isinstance(expr, tirx.IntImm):
        return lambda _places: np.asarray(int(expr))
    if isinstance(expr, tirx.Var):
        number = numbers[expr]
        return lambda places: places[number]
    if isinstance(expr, tirx.Cast):
        return _value(expr.value, numbers)
    if isinstance(expr, (tirx.Select, tvm.ir.Call)):
        parts = (expr.condition, expr.true_value, expr.false_value) if isinstance(expr, tirx.Select) else expr.args
        if isinstance(expr, tvm.ir.Call) and not analysis.is_choice(expr):
            raise KeyError(expr.op.name)
        condition, yes, no = (_value(part, numbers) for part in parts)
        return lambda places: np.where(condition(places), yes(places), no(places))
    function, first, second = _BINARY[type(expr)], _value(expr.a, numbers), _value(expr.b, numbers)
    return lambda places: np.asarray(function(first(places), second(places)))
