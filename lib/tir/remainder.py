"""Loop unswitching for tiles that do not divide an output: full tiles without predicates, and loops for the remainder.

A schedule that splits 197 rows into tiles of 14 gets a predicate on each element, within the innermost loops, where it
keeps accumulators out of registers and loops from being vectorised. Here the predicate is evaluated once for a tile:
full tiles are computed without it, and those at a border by the same loops with smaller extents. Spaces mark the loops
around their tiles; that this is done when programs are lowered keeps traces short, and the weights in one layout.
TVM's `LoopPartition` does the same for loops that are not fused.

Where a shorter vector would remain, and what is computed twice comes out the same, a tile at a border may begin earlier
instead, so that all of it is inside: of 57 channels in vectors of 16, the last begins behind the 41st. That is
for kernels that do not read what they write: where they write in place, other channels.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer

from lib.tir import analysis

MARK = "peel_remainder"  # annotation of a loop whose body is a tile
SHORTER, EARLIER = 1, 2  # its values: what tiles at a border are


def peel(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Split the bodies of marked loops into full tiles and tiles at a border of the output; programs without marks stay
    as they are."""
    loops = analysis.walk(function.body, tirx.For)
    if not any(MARK in loop.annotations for loop in loops):
        return function
    known = _known(loops)

    def peeled(loop: tirx.For) -> tirx.For:
        if MARK not in loop.annotations:
            return loop
        is_earlier = int(loop.annotations[MARK]) == EARLIER
        body = _versions(loop.body, _borders(loop.body, known), known, is_earlier)
        return analysis.with_body(loop, body)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, peeled)))


def _zeros(loops: Sequence[tirx.For]) -> dict[Any, Any]:
    """Zero for the variable of each loop."""
    return {loop.loop_var: tirx.IntImm(loop.loop_var.ty.dtype, 0) for loop in loops}


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a function's loops: `nn % 4` is `nn` where there are four iterations."""

    zeros: Mapping[Any, Any]  # for variables of loops with one iteration
    analyzer: Analyzer

    def simplified(self, index: Any, inner: Sequence[tirx.For] = ()) -> Any:
        """An index, where loops within a tile begin."""
        return self.analyzer.simplify(analysis.replaced(index, {**self.zeros, **_zeros(inner)}))


def _known(loops: Sequence[tirx.For]) -> _Known:
    analyzer = Analyzer()
    static = [loop for loop in loops if isinstance(loop.extent, tirx.IntImm)]
    for loop in static:
        analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))
    return _Known(_zeros([loop for loop in static if int(loop.extent) == 1]), analyzer)


@dataclass(frozen=True, slots=True)
class Border:
    """The end of one axis of an output, which may lie within a tile."""

    begin: Any  # of a tile
    extent: int  # of the axis
    length: int  # of a tile

    @property
    def remainder(self) -> int:
        """Elements of the last tile that are inside."""
        return self.extent % self.length

    def is_same(self, other: "Border | None") -> bool:
        """Whether two predicates compare one tile with one axis."""
        return bool(other and other.extent == self.extent and tvm_ffi.structural_equal(other.begin, self.begin))


def _borders(body: tirx.Stmt, known: _Known) -> list[Border]:
    """The borders that predicates in a tile check, each once."""
    found: list[Border] = []
    for condition, inner in _conditions(body):
        border = _border(condition, inner, known)
        if border and not any(border.is_same(other) for other in found):
            found.append(border)
    return found


def _conditions(body: tirx.Stmt) -> list[tuple[tirx.LT, Sequence[tirx.For]]]:
    """The predicates `index < extent` of the blocks in a tile, with the loops of the tile around each block, the
    outermost first."""
    loops = list(reversed(analysis.walk(body, tirx.For)))
    found: list[tuple[tirx.LT, Sequence[tirx.For]]] = []
    for realization in analysis.walk(body, SBlockRealize):
        around = [loop for loop in loops if realization in analysis.walk(loop.body, SBlockRealize)]
        found += [(part, around) for part in _parts(realization.predicate) if isinstance(part, tirx.LT)]
    return found


def _parts(predicate: Any) -> list[Any]:
    return [*_parts(predicate.a), *_parts(predicate.b)] if isinstance(predicate, tirx.And) else [predicate]


def _border(condition: tirx.LT, inner: Sequence[tirx.For], known: _Known) -> Border | None:
    """The border that a predicate checks, where some variables are known to be zero.

    None if the elements of a tile are not contiguous along the axis, or tiles do not begin at multiples of their
    length, or a loop of the tile has other blocks in its body, too.
    """
    if not all(isinstance(number, tirx.IntImm) for number in (condition.b, *(loop.extent for loop in inner))):
        return None
    extent, length = int(condition.b), 1
    for loop, stride in _strides(condition.a, inner):
        if stride != length or len(analysis.walk(loop.body, SBlockRealize)) > 1:
            return None
        length *= int(loop.extent)
    begin = known.simplified(condition.a, inner)
    aligned = known.analyzer.can_prove_equal(tirx.floormod(begin, length), 0)
    return Border(begin, extent, length) if aligned and extent > length else None


def _strides(index: Any, loops: Sequence[tirx.For]) -> list[tuple[tirx.For, int]]:
    """The stride of an index with each of some loops, the innermost first; loops that it does not depend on, or of one
    iteration, are left out."""
    strides = [(loop, analysis.stride([index], [1], loop.loop_var)) for loop in reversed(loops) if int(loop.extent) > 1]
    return [(loop, stride) for loop, stride in strides if stride]


def _versions(body: tirx.Stmt, borders: Sequence[Border], known: _Known, is_earlier: bool = False) -> tirx.Stmt:
    """A tile in a version for each combination of borders that it may lie at."""
    if not borders:
        return body
    border, *others = borders
    full = _inside(body, border, border.length, known)
    partial = _earlier(body, border, known) if is_earlier else _inside(body, border, border.remainder, known)
    full, partial = (_versions(version, others, known, is_earlier) for version in (full, partial))
    at_border = tirx.IfThenElse(border.begin < border.extent, partial, None)  # else the tile is outside
    return tirx.IfThenElse(border.begin < border.extent - border.remainder, full, at_border)


def _inside(body: tirx.Stmt, border: Border, length: int, known: _Known) -> tirx.Stmt:
    """A tile of which `length` elements are inside, without the predicates that check this."""
    extents: dict[Any, int] = {}
    proven: list[tirx.LT] = []
    for condition, inner in _checks(body, border, known):
        shorter = _shortened(_strides(condition.a, inner), length)
        if shorter is not None:
            extents.update(shorter)
            proven.append(condition)

    def with_extent(loop: tirx.For) -> tirx.For:
        extent = extents.get(loop.loop_var)
        return loop if extent is None or extent == int(loop.extent) else _shorter(loop, extent)

    def without_condition(realization: SBlockRealize) -> SBlockRealize:
        return _without(realization, proven)

    return tvm_ffi.structural_map(body, [(tirx.For, with_extent), (SBlockRealize, without_condition)])


def _checks(body: tirx.Stmt, border: Border, known: _Known) -> list[tuple[tirx.LT, Sequence[tirx.For]]]:
    """The predicates in a tile that check a border."""
    return [found for found in _conditions(body) if border.is_same(_border(*found, known))]


def _without(realization: SBlockRealize, proven: Sequence[tirx.LT], block: SBlock | None = None) -> SBlockRealize:
    """A block, or another in its place, without some of its predicates."""
    parts = _parts(realization.predicate)
    left = [part for part in parts if not any(part.same_as(condition) for condition in proven)]
    predicate = functools.reduce(tirx.And, left) if left else True
    return SBlockRealize(realization.iter_values, predicate, block or realization.block)


def _earlier(body: tirx.Stmt, border: Border, known: _Known) -> tirx.Stmt:
    """A tile at a border that begins as much earlier as it lacks: of tensors in memory. Accumulators, which are in
    registers, keep their places, which do not depend on where a tile begins."""
    conditions = [condition for condition, _ in _checks(body, border, known)]
    earlier, lost = border.length - border.remainder, []

    def moved(realization: SBlockRealize) -> SBlockRealize:
        proven = [each for each in conditions if any(each.same_as(part) for part in _parts(realization.predicate))]
        if not proven:
            return realization
        block, index = realization.block, known.simplified(proven[0].a)
        axes = zip(block.iter_vars, realization.iter_values, strict=True)
        found = [axis.var for axis, value in axes if known.analyzer.can_prove_equal(known.simplified(value), index)]
        if len(found) != 1:
            lost.append(realization)
            return realization
        body = _in_memory(block.body, {found[0]: found[0] - earlier})
        return _without(realization, proven, analysis.block_with(block, body=body))

    made = tvm_ffi.structural_map(body, (SBlockRealize, moved))
    return _inside(body, border, border.remainder, known) if lost else made


def _in_memory(body: tirx.Stmt, values: Mapping[Any, Any]) -> tirx.Stmt:
    """A block's body with other places in all tensors but those that are in registers."""

    def loaded(load: tvm.ir.TensorLoad) -> Any:
        if load.source.scope() == "local":
            return load
        return tirx.BufferLoad(load.source, [analysis.replaced(index, values) for index in load.indices])

    def stored(store: tirx.BufferStore) -> Any:
        if store.buffer.scope() == "local":
            return store
        return tirx.BufferStore(store.buffer, store.value, [analysis.replaced(at, values) for at in store.indices])

    return tvm_ffi.structural_map(body, [(tvm.ir.TensorLoad, loaded), (tirx.BufferStore, stored)])


def _shortened(strides: Sequence[tuple[tirx.For, int]], length: int) -> dict[Any, int] | None:
    """Extents with which loops, given the innermost first, cover `length` elements together; None if there are none."""
    extents: dict[Any, int] = {}
    for loop, stride in reversed(strides):
        if length % stride == 0:
            return {**extents, loop.loop_var: length // stride}
        if length > stride:
            return None
        extents[loop.loop_var] = 1
    return None


def _shorter(loop: tirx.For, extent: int) -> tirx.For:
    """A loop of a smaller extent, with a variable of its own: TVM's analyzer keeps one range for a variable."""
    var = tirx.Var(loop.loop_var.name, loop.loop_var.ty)
    body = analysis.replaced(loop.body, {loop.loop_var: var})
    return tirx.For(var, loop.min, extent, loop.kind, body, annotations=loop.annotations)
