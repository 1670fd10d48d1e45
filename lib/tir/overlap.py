"""Software pipelining of tiles with sums in registers of matrices: results of one between the products of the next.

The sums of a tile go through memory to what computes results of them, vector by vector. That takes a quarter to a half
of the time of the products (3x3 convolutions of 64 to 256 channels, Xeon with AMX), and nothing hides it: results wait
for the last products, and what the next tile loads for the stores. So one loop takes the place of all loops over tiles,
whose iterations compute the results of the one before, some rows after each product, before they store their own sums:

    for tile:                             for tile:
        set registers to zero                 set registers to zero
        for step:                             for step:
            multiply                              multiply, and compute results of some rows of the tile before
        store sums                            store sums
        compute results                   compute results of the last tile

Registers are set up again only for tiles of another size than the one before: it takes some 250 cycles.
Source: Lam, "Software pipelining: an effective scheduling technique for VLIW machines" (PLDI 1988).
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer

from lib.tir import analysis

# Sums are stored after the results before them, and read only then. Where outputs leave the caches and there are few
# steps of products in between, tiles wait for memory (two and four steps, 6.4 and 3.2 MB: 0.89 times as fast).
_LARGE = 2 << 20  # bytes of an output
_FEWEST_STEPS = 5
_MOST_VERSIONS = 2  # of a tile: the results of each are written between the products of each
_NOTHING = tirx.Evaluate(tirx.const(0, "int32"))


@dataclass(frozen=True, slots=True)
class Calls:
    """Which statements set registers up, multiply and store."""

    configures: Callable[[tirx.Stmt], bool]
    multiplies: Callable[[tirx.Stmt], bool]
    stores: Callable[[tirx.Stmt], bool]


def insert(body: tirx.Stmt, outputs: Sequence[Any], calls: Calls) -> tirx.Stmt:
    """Pipeline the loops over tiles that have this form; others stay as they are.

    Args:
        outputs: Tensors of a function whose body it is.
    """
    nests: dict[Any, _Nest] = {}
    within = set[Any]()
    for loop in reversed(analysis.walk(body, tirx.For)):  # outer loops come before those in them
        if loop.loop_var not in within and (found := _nest(loop, calls)) and found.is_worthwhile(outputs):
            nests[loop.loop_var] = found
            within |= {each.loop_var for each in found.loops}

    def pipelined(loop: tirx.For) -> tirx.Stmt:
        return nests[loop.loop_var].pipelined() if loop.loop_var in nests else loop

    return tvm_ffi.structural_map(body, (tirx.For, pipelined))


@dataclass(frozen=True, slots=True)
class _Version:
    """A tile of one size, and the conditions under which a tile has it."""

    conditions: list[Any]
    begin: list[tirx.Stmt]
    products: tirx.For
    stores: list[tirx.Stmt]
    results: tirx.For

    @property
    def rows(self) -> list[tirx.For]:
        """The loops over rows of results: all but those over the vectors of a row."""
        return [loop for loop in _loops(self.results) if loop.kind != tirx.ForKind.VECTORIZED][:-1]


@dataclass(frozen=True, slots=True)
class _Iteration:
    """One tile: values of the loops' variables."""

    values: dict[Any, Any]
    sums: Any

    def of(self, node: Any) -> Any:
        """A statement or a condition for this tile."""

        def indices(access: Any) -> list[Any]:
            # Where in a tile does not depend on the tile: said so, TVM finds out how large the tensor is.
            return list(map(Analyzer().simplify, access.indices))

        def loaded(load: tvm.ir.TensorLoad) -> Any:
            return tirx.BufferLoad(load.source, indices(load)) if load.source.same_as(self.sums) else load

        def stored(store: tirx.BufferStore) -> Any:
            is_of_sums = store.buffer.same_as(self.sums)
            return tirx.BufferStore(store.buffer, store.value, indices(store)) if is_of_sums else store

        simple = tvm_ffi.structural_map(node, [(tvm.ir.TensorLoad, loaded), (tirx.BufferStore, stored)])
        return analysis.replaced(simple, self.values)

    def chosen(
        self,
        versions: Sequence[_Version],
        written: Callable[[_Version], tirx.Stmt],
        otherwise: tirx.Stmt | None = None,
    ) -> tirx.Stmt:
        """What is written of the version that this tile has; `otherwise` where it is outside."""
        statement = otherwise
        for version in reversed(versions):
            is_it = [self.of(condition) for condition in version.conditions]
            found = self.of(written(version))
            statement = tirx.IfThenElse(_all(is_it), found, statement) if is_it else found
        return statement


@dataclass(frozen=True, slots=True)
class _Nest:
    """Loops around a tile, the outermost first, with nothing else in them."""

    loops: list[tirx.For]
    block: SBlock
    versions: list[_Version]
    calls: Calls

    def is_worthwhile(self, outputs: Sequence[Any]) -> bool:
        """Whether there are several tiles, and enough products for what is stored of results to leave in."""
        if _iterations(self.loops) == 1:
            return False
        written = [buffer for buffer in _written(self.versions[0].results) if any(map(buffer.same_as, outputs))]
        leaves = any(analysis.itemsize(each.dtype) * math.prod(map(int, each.shape)) > _LARGE for each in written)
        return not leaves or _iterations(_loops(self.versions[0].products)) >= _FEWEST_STEPS

    def pipelined(self) -> tirx.Stmt:
        """One loop in place of all of them."""
        [sums] = self.block.alloc_buffers
        n_tiles = _iterations(self.loops)
        tile = tirx.Var("tile", self.loops[0].loop_var.ty)

        def iteration(index: Any) -> _Iteration:
            return _Iteration(_unfused(index, self.loops), sums)

        def results(version: _Version) -> tirx.Stmt:
            return version.results

        before, last = iteration(tirx.max(tile - 1, 0)), iteration(tirx.IntImm(tile.ty.dtype, n_tiles - 1))
        only_results = tirx.IfThenElse(tile > 0, before.chosen(self.versions, results), None)
        each = iteration(tile).chosen(self.versions, lambda version: self._tile(version, tile, before), only_results)
        body = tirx.SeqStmt(
            [tirx.For(tile, 0, n_tiles, tirx.ForKind.SERIAL, each), last.chosen(self.versions, results)]
        )
        return SBlockRealize([], True, SBlock([], [], [], "", body, alloc_buffers=[sums]))

    def _tile(self, version: _Version, tile: Any, before: _Iteration) -> tirx.Stmt:
        """A tile, but for its results, and those before it."""
        is_same = [before.of(condition) for condition in version.conditions]
        is_other = tirx.Not(_all([tile > 0, *is_same]))
        begin = [tirx.IfThenElse(is_other, each, None) if self.calls.configures(each) else each
                 for each in version.begin]  # fmt: skip
        steps = _loops(version.products)
        step, n_steps = _fused(steps), _iterations(steps)

        def with_results(loop: tirx.For) -> tirx.For:
            if not loop.loop_var.same_as(steps[-1].loop_var):
                return loop
            statements, n = list(loop.body.seq), 0
            n_products, body = sum(map(self.calls.multiplies, statements)), list[tirx.Stmt]()
            for statement in statements:
                body.append(statement)
                if self.calls.multiplies(statement):
                    part = _Part(tile, step, n_steps, n, n_products)
                    body.append(before.chosen(self.versions, part.of_results))
                    n += 1
            return analysis.with_body(loop, tirx.SeqStmt(body))

        return tirx.SeqStmt(
            [*begin, tvm_ffi.structural_map(version.products, (tirx.For, with_results)), *version.stores]
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """What follows a product: the n-th of those of a step."""

    tile: Any
    step: Any
    n_steps: int
    n: int
    n_products: int

    def of_results(self, version: _Version) -> tirx.Stmt:
        """Its rows of the results of a tile; the first steps have none where there are more than rows, as sums are
        stored then."""
        n_rows = _iterations(version.rows)
        of_step = -(-n_rows // self.n_steps)
        begin, end = (of_step * n // self.n_products for n in (self.n, self.n + 1))
        if begin == end:
            return _NOTHING
        row = tirx.Var("row", self.tile.ty)
        at = self.step * of_step + (row + begin - (self.n_steps * of_step - n_rows))
        innermost = version.rows[-1].body if version.rows else version.results
        computed = analysis.replaced(innermost, _unfused(at, version.rows))
        first = tirx.Select(self.tile > 0, tirx.const(0, row.ty.dtype), tirx.const(n_rows, row.ty.dtype))
        return tirx.For(row, 0, end - begin, tirx.ForKind.SERIAL, tirx.IfThenElse(at >= first, computed, None))


def _nest(loop: tirx.For, calls: Calls) -> _Nest | None:
    """A loop and those in it, if all there is in them is a tile."""
    loops = _loops(loop)
    realization = loops[-1].body if loops else None
    if not isinstance(realization, SBlockRealize):
        return None
    block = realization.block
    if len(block.alloc_buffers) != 1 or block.iter_vars or any(each.kind != tirx.ForKind.SERIAL for each in loops):
        return None
    versions = list(_versions(block.body, [], calls))
    found = [each for each in versions if each is not None]
    return _Nest(loops, block, found, calls) if len(found) == len(versions) <= _MOST_VERSIONS else None


def _versions(body: tirx.Stmt, conditions: list[Any], calls: Calls) -> Iterator[_Version | None]:
    """The sizes of a tile, and None for each that has another form."""
    if isinstance(body, tirx.IfThenElse):
        yield from _versions(body.then_case, [*conditions, body.condition], calls)
        if body.else_case is not None:
            yield from _versions(body.else_case, [*conditions, tirx.Not(body.condition)], calls)
    else:
        yield _version(body, conditions, calls)


def _version(body: tirx.Stmt, conditions: list[Any], calls: Calls) -> _Version | None:
    statements = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    found = [n for n, each in enumerate(statements) if _loops(each) and _multiplies_in(_loops(each)[-1], calls)]
    if len(found) != 1:
        return None
    begin, products, after = statements[: found[0]], statements[found[0]], statements[found[0] + 1 :]
    stores, results = [each for each in after if calls.stores(each)], [each for each in after if not calls.stores(each)]
    if len(results) != 1 or not _loops(results[0]) or _written(results[0]) & _read(products):
        return None
    return _Version(conditions, begin, products, stores, tvm_ffi.structural_map(results[0], (SBlockRealize, _opened)))


def _opened(realization: SBlockRealize) -> tirx.Stmt:
    """What is in a block, which would say from where it reads sums."""
    always = isinstance(realization.predicate, tirx.IntImm) and bool(realization.predicate)
    return realization.block.body if always else tirx.IfThenElse(realization.predicate, realization.block.body, None)


def _multiplies_in(loop: tirx.For, calls: Calls) -> bool:
    return isinstance(loop.body, tirx.SeqStmt) and any(map(calls.multiplies, loop.body.seq))


def _written(statement: tirx.Stmt) -> set[Any]:
    return {store.buffer for store in analysis.walk(statement, tirx.BufferStore)}


def _read(statement: tirx.Stmt) -> set[Any]:
    return {load.source for load in analysis.walk(statement, tvm.ir.TensorLoad)}


def _loops(statement: tirx.Stmt) -> list[tirx.For]:
    """Loops with nothing else in them but the next one, from a statement inwards."""
    loops = list[tirx.For]()
    while isinstance(statement, tirx.For) and _is_plain(statement):
        loops.append(statement)
        statement = statement.body
    return loops


def _is_plain(loop: tirx.For) -> bool:
    is_constant = isinstance(loop.extent, tirx.IntImm) and isinstance(loop.min, tirx.IntImm) and int(loop.min) == 0
    return is_constant and loop.kind != tirx.ForKind.PARALLEL


def _iterations(loops: Sequence[tirx.For]) -> int:
    return math.prod(int(loop.extent) for loop in loops)


def _fused(loops: Sequence[tirx.For]) -> Any:
    """The index of an iteration of loops, as if they were one."""
    index: Any = tirx.IntImm(loops[0].loop_var.ty.dtype, 0)
    for loop in loops:
        index = index * loop.extent + loop.loop_var
    return index


def _unfused(index: Any, loops: Sequence[tirx.For]) -> dict[Any, Any]:
    """The variables of loops by such an index."""
    values, rest = {loop.loop_var: loop.min for loop in loops}, index
    several = [loop for loop in loops if int(loop.extent) > 1]
    for loop in reversed(several[1:]):
        values[loop.loop_var], rest = tirx.floormod(rest, loop.extent), tirx.floordiv(rest, loop.extent)
    return values | {loop.loop_var: rest for loop in several[:1]}


def _all(conditions: Sequence[Any]) -> Any:
    return functools.reduce(tirx.And, conditions)
