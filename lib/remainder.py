"""Tiles that do not divide an output: whole ones, and what remains, as loops of their own.

A schedule that cuts 197 rows into tiles of 14 asks at each element whether it is still inside, within the innermost
loops, where it keeps sums out of registers and loops from becoming vectors. Here the question is asked once for a tile:
whole ones then are computed without it, and those at the border by the same loops with fewer turns. Spaces mark the
loops around their tiles; that this happens when they are compiled keeps schedules short, and weights of one layout.
It is what compilers know as loop unswitching and peeling; TVM's `LoopPartition` does it for loops that are not fused.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize
from tvm.sym import Analyzer

from lib import structure

MARK = "peel_remainder"  # annotation of a loop whose body is a tile


def peel(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Have marked loops tell whole tiles from those at the border of an output; programs without any stay as they
    are."""
    loops = structure.walk(function.body, tirx.For)
    if not any(MARK in loop.annotations for loop in loops):
        return function
    zeros = _zeros([loop for loop in loops if isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == 1])

    def peeled(loop: tirx.For) -> tirx.For:
        if MARK not in loop.annotations:
            return loop
        body = _versions(loop.body, _borders(loop.body, zeros), zeros)
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=loop.annotations)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, peeled)))


def _zeros(loops: Sequence[tirx.For]) -> dict[Any, Any]:
    """For the variable of each loop, where it begins."""
    return {loop.loop_var: tirx.IntImm(loop.loop_var.ty.dtype, 0) for loop in loops}


@dataclass(frozen=True, slots=True)
class Border:
    """Along one axis of an output: where a tile begins, and how much of the last one is inside."""

    begin: Any
    extent: int  # of the axis
    length: int  # of a tile

    @property
    def remainder(self) -> int:
        """How much of the last tile is inside."""
        return self.extent % self.length

    def is_same(self, other: "Border | None") -> bool:
        """Whether an axis and a tile are the same."""
        return bool(other and other.extent == self.extent and tvm_ffi.structural_equal(other.begin, self.begin))


def _borders(body: tirx.Stmt, zeros: Mapping[Any, Any]) -> list[Border]:
    """Those that the elements of a tile are compared with, each once."""
    found: list[Border] = []
    for condition, inner in _conditions(body):
        border = _border(condition, inner, zeros)
        if border and not any(border.is_same(other) for other in found):
            found.append(border)
    return found


def _conditions(body: tirx.Stmt) -> list[tuple[tirx.LT, Sequence[tirx.For]]]:
    """What must hold for the blocks in a tile to run, with the loops of the tile around each, the outermost first."""
    loops = list(reversed(structure.walk(body, tirx.For)))
    found: list[tuple[tirx.LT, Sequence[tirx.For]]] = []
    for realization in structure.walk(body, SBlockRealize):
        around = [loop for loop in loops if realization in structure.walk(loop.body, SBlockRealize)]
        found += [(part, around) for part in _parts(realization.predicate) if isinstance(part, tirx.LT)]
    return found


def _parts(predicate: Any) -> list[Any]:
    return [*_parts(predicate.a), *_parts(predicate.b)] if isinstance(predicate, tirx.And) else [predicate]


def _border(condition: tirx.LT, inner: Sequence[tirx.For], zeros: Mapping[Any, Any]) -> Border | None:
    """What a condition compares elements with, where some variables are known to be zero.

    None if places in a tile do not follow one another, or tiles do not begin at multiples of their length, or a loop
    over them is one over something else, too.
    """
    if not all(isinstance(number, tirx.IntImm) for number in (condition.b, *(loop.extent for loop in inner))):
        return None
    extent, length = int(condition.b), 1
    for loop, stride in _strides(condition.a, inner):
        if stride != length or len(structure.walk(loop.body, SBlockRealize)) > 1:
            return None
        length *= int(loop.extent)
    begin = Analyzer().simplify(structure.replaced(condition.a, {**zeros, **_zeros(inner)}))
    aligned = Analyzer().can_prove_equal(tirx.floormod(begin, length), 0)
    return Border(begin, extent, length) if aligned and extent > length else None


def _strides(index: Any, loops: Sequence[tirx.For]) -> list[tuple[tirx.For, int]]:
    """By how much an index grows with each of some loops, the innermost first; those that it does not depend on, or
    that have one turn, are left out."""
    strides = [(loop, structure.step([index], [1], loop.loop_var)) for loop in reversed(loops) if int(loop.extent) > 1]
    return [(loop, stride) for loop, stride in strides if stride]


def _versions(body: tirx.Stmt, borders: Sequence[Border], zeros: Mapping[Any, Any]) -> tirx.Stmt:
    """A tile, for each way in which it may lie at borders."""
    if not borders:
        return body
    border, *others = borders
    whole, short = (
        _versions(_inside(body, border, length, zeros), others, zeros) for length in (border.length, border.remainder)
    )
    at_border = tirx.IfThenElse(border.begin < border.extent, short, None)  # else the tile is outside
    return tirx.IfThenElse(border.begin < border.extent - border.remainder, whole, at_border)


def _inside(body: tirx.Stmt, border: Border, length: int, zeros: Mapping[Any, Any]) -> tirx.Stmt:
    """A tile of which so much is inside."""
    extents: dict[Any, int] = {}
    answered: list[tirx.LT] = []
    for condition, inner in _conditions(body):
        is_asked = border.is_same(_border(condition, inner, zeros))
        shorter = _shortened(_strides(condition.a, inner), length) if is_asked else None
        if shorter is not None:
            extents.update(shorter)
            answered.append(condition)

    def with_extent(loop: tirx.For) -> tirx.For:
        extent = extents.get(loop.loop_var)
        return loop if extent is None or extent == int(loop.extent) else _shorter(loop, extent)

    def without_condition(realization: SBlockRealize) -> SBlockRealize:
        parts = _parts(realization.predicate)
        left = [part for part in parts if not any(part.same_as(condition) for condition in answered)]
        predicate = functools.reduce(tirx.And, left) if left else True
        return SBlockRealize(realization.iter_values, predicate, realization.block)

    return tvm_ffi.structural_map(body, [(tirx.For, with_extent), (SBlockRealize, without_condition)])


def _shortened(strides: Sequence[tuple[tirx.For, int]], length: int) -> dict[Any, int] | None:
    """How many turns loops have, the innermost first, that go so far together; None if no number of turns does."""
    extents: dict[Any, int] = {}
    for loop, stride in reversed(strides):
        if length % stride == 0:
            return {**extents, loop.loop_var: length // stride}
        if length > stride:
            return None
        extents[loop.loop_var] = 1
    return None


def _shorter(loop: tirx.For, extent: int) -> tirx.For:
    """A loop with fewer turns, and with a variable of its own: TVM knows one range of a variable."""
    var = tirx.Var(loop.loop_var.name, loop.loop_var.ty)
    body = structure.replaced(loop.body, {loop.loop_var: var})
    return tirx.For(var, loop.min, extent, loop.kind, body, annotations=loop.annotations)
