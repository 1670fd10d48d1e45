"""A scheduled program as a person wants to see it: its loops, and the register tile of what it mostly computes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import s_tir, tirx

from lib.tir import analysis, dot

_KINDS = {
    tirx.ForKind.SERIAL: "for",
    tirx.ForKind.PARALLEL: "parallel",
    tirx.ForKind.VECTORIZED: "vectorised",
    tirx.ForKind.UNROLLED: "unrolled",
}
_AHEAD = "meta_schedule.layout_rewrite_preproc"  # weights that are packed when the model is compiled


@dataclass(frozen=True, slots=True)
class Outline:
    """Of one program.

    Attributes:
        tile: The results that its heaviest block keeps in registers at a time, e.g. `6 x 2 x 8 lanes`; empty if neither
            unrolled nor vectorised loops run over results.
        lines: Loops and blocks, indented as they are nested; loops of one step are left out.
    """

    tile: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """A block with the loops around it, the outermost first."""

    realize: Any
    loops: tuple[Any, ...]

    @property
    def steps(self) -> int:
        return math.prod(_extent(loop) for loop in self.loops)


def outline(module: tvm.IRModule) -> Outline:
    """Of the function `main` of a scheduled module."""
    places: list[_Place] = []
    lines: list[str] = []
    _walk(module["main"].body, (), places, lines)
    reducing = [place for place in places if analysis.reduction_axes(place.realize.block)]
    heaviest = max(reducing or places, key=lambda place: place.steps, default=None)
    return Outline(_tile(heaviest) if heaviest else "", tuple(lines))


def _walk(node: Any, loops: tuple[Any, ...], places: list[_Place], lines: list[str]) -> None:
    shown = sum(_extent(loop) > 1 for loop in loops)
    if isinstance(node, tirx.SeqStmt):
        for part in node:
            _walk(part, loops, places, lines)
    elif isinstance(node, tirx.For):
        at = len(lines)
        _walk(node.body, (*loops, node), places, lines)
        if _extent(node) > 1 and len(lines) > at:  # what holds nothing to show is not shown
            lines.insert(at, "  " * shown + _described(node))
    elif isinstance(node, s_tir.SBlockRealize):
        if _AHEAD in (node.block.annotations or {}):
            return
        if analysis.walk(node.block.body, s_tir.SBlock):  # the root, or a block that holds others
            _walk(node.block.body, loops, places, lines)
        else:
            places.append(_Place(node, loops))
            lines.append("  " * shown + str(node.block.name_hint))
    elif hasattr(node, "body"):
        _walk(node.body, loops, places, lines)


def _described(loop: Any) -> str:
    """E.g. `parallel 16`, `blockIdx.x 128`, `unrolled 4, prefetch_weights`."""
    kind = loop.kind if isinstance(loop.kind, tirx.ForKind) else tirx.ForKind(loop.kind)
    name = str(loop.thread_binding.thread_tag) if kind == tirx.ForKind.THREAD_BINDING else _KINDS[kind]
    notes = [str(key) for key in loop.annotations or {}]
    return ", ".join([f"{name} {_extent(loop)}", *notes])


def _tile(place: _Place) -> str:
    """See `Outline.tile`: the innermost loops that are unrolled or vectorised, and that no reduction runs over."""
    summed = _variables_of_sums(place.realize)
    sizes, lanes = [], 0
    for loop in reversed(place.loops):
        kind = loop.kind if isinstance(loop.kind, tirx.ForKind) else tirx.ForKind(loop.kind)
        if any(loop.loop_var.same_as(var) for var in summed):
            continue
        if kind == tirx.ForKind.VECTORIZED or dot.MARK in (loop.annotations or {}):
            lanes = _extent(loop)
        elif kind == tirx.ForKind.UNROLLED:
            sizes.append(_extent(loop))
        else:
            break
    texts = [str(size) for size in reversed(sizes) if size > 1] + ([f"{lanes} lanes"] if lanes > 1 else [])
    return " x ".join(texts)


def _variables_of_sums(realize: Any) -> Sequence[Any]:
    values = [realize.iter_values[axis] for axis in analysis.reduction_axes(realize.block)]
    return [var for value in values for var in analysis.walk(value, tirx.Var)]


def _extent(loop: Any) -> int:
    """Steps of a loop; 1 where that is not a constant."""
    return int(loop.extent) if isinstance(loop.extent, tirx.IntImm) else 1
