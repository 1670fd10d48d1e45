"""Products of small matrices in AMX's registers, in place of the loops of a register tile.

A space marks two loops of a contraction's tile: the one that sets its sums to zero, and the one over the steps of a
product, around rows, lanes, and what an instruction of vectors adds to a lane (`lib.tir.dot`). When programs are
lowered, the sums get registers of their own (`lib.machine.dots.Matrix`): these are set to zero, each step of the loops
in between loads rows of data and of packed weights and multiplies them, and after those loops the sums are stored to
where the program has them, for what reads them. Until then a program says what it computes in plain arithmetic, and
where the instruction does not fit, or the CPU lacks it, the loops stay and compute the same.

    set its registers to zero                 for vector, row, lane: sums = 0                    (marked)
    for k.0, kernel window                    for vector, k.0, kernel window
        load data, load weights, multiply         for k.1, row, lane, product: sums += ...       (marked)
    store its registers
    the epilogue                              the epilogue

The loop over vectors is around all others of a tile so that weights, which are packed in the order of the loops, have
one order for any number of vectors: shapes of a model that want other tiles can share them.

A register holds up to 16 rows of 64 bytes; how many of them, and how wide, is set for all eight at once (`ldtilecfg`),
once for a parallel task if all of its tiles agree, else at each tile. Linux lets a process use them only after it asked
(`arch_prctl`): each function does so first, once for all that follows.
Source: Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3; Linux, "Using XSTATE features
in user space applications".
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize

from lib.machine.dots import Matrix, matrix_named
from lib.machine.registers import registers
from lib.tir import analysis, asking, overlap

MARK = "matrix"  # annotation of the loop that sets sums to zero, and of that over steps: the name of an instruction

_PREFIX = "family_tuner_tiles"
_CONFIGURE, _RELEASE, _PERMITTED = f"{_PREFIX}_configure", f"{_PREFIX}_release", f"{_PREFIX}_permitted"
_MULTIPLY, _STORE = f"{_PREFIX}_multiply", f"{_PREFIX}_store"
# Bytes of weights that a tile reads and that stay in L1 (48 KB) for the next tile; where there are more, each tile has
# them from L2, and they would only replace its data, but for those that it reads again (`lib.graph.splitting`).
_STAYS = 1 << 15
_WIDTH, _ELEMENT = 64, 4  # bytes: of a register's row, and of what a step multiplies with a lane
_REFUSED = (
    "this library was compiled for a CPU with AMX, and this CPU lacks it, or the operating system does not let this "
    "process use it (Linux does since 5.16, unless a container forbids it). Compile the model for it: on this machine, "
    "or with --target."
)
_ASKING = """  %refused = call i64
    asm sideeffect "syscall", "={rax},0,{rdi},{rsi},~{rcx},~{r11},~{memory}"(i64 158, i64 4131, i64 18)
  %may = icmp eq i64 %refused, 0
  %found = zext i1 %may to i32"""
# Between memory and a register, whose rows are as far apart as two addresses.
_MOVED = """
define linkonce_odr void @{name}(PARAMETERS) alwaysinline nounwind {{
  %x = ptrtoint ptr %at to i64
  %y = ptrtoint ptr %next to i64
  %stride = sub i64 %y, %x
  call void @llvm.x86.INSTRUCTION(i8 {a}, ptr %at, i64 %stride)
  ret void
}}
declare void @llvm.x86.INSTRUCTION(i8, ptr, i64)
"""


def _moved(parameters: str, instruction: str) -> str:
    return _MOVED.replace("PARAMETERS", parameters).replace("INSTRUCTION", instruction)


_TEXTS = {
    "configure": """
@{name}_data = linkonce_odr constant [64 x i8] c"{data}", align 64
define linkonce_odr void @{name}() alwaysinline nounwind {{
  call void @llvm.x86.ldtilecfg(ptr @{name}_data)
  ret void
}}
declare void @llvm.x86.ldtilecfg(ptr)
""",
    "release": """
define linkonce_odr void @{name}() alwaysinline nounwind {{
  call void @llvm.x86.tilerelease()
  ret void
}}
declare void @llvm.x86.tilerelease()
""",
    "zero": """
define linkonce_odr void @{name}() alwaysinline nounwind {{
  call void @llvm.x86.tilezero(i8 {a})
  ret void
}}
declare void @llvm.x86.tilezero(i8)
""",
    "load": _moved("ptr %at, ptr %next", "tileloadd64"),
    "stream": _moved("ptr %at, ptr %next", "tileloaddt164"),
    "store": _moved("ptr %at, ptr %next, ptr %last", "tilestored64"),
    "multiply": """
define linkonce_odr void @{name}() alwaysinline nounwind {{
  call void @llvm.x86.{instruction}(i8 {a}, i8 {b}, i8 {c})
  ret void
}}
declare void @llvm.x86.{instruction}(i8, i8, i8)
""",
}


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Write instructions of matrices in place of marked loops that they fit; other programs stay as they are.

    Where the function's target lacks them, the loops stay: programs for one CPU compute the same on another.
    """
    if not analysis.has_mark(function, MARK):
        return function
    target = (function.attrs or {}).get("target")
    there = () if target is None else registers(target).matrices
    writer = _Writer()

    def with_matrices(sequence: tirx.SeqStmt) -> Any:
        return writer.written(sequence, there)

    body = tvm_ffi.structural_map(function.body, (tirx.SeqStmt, with_matrices))
    body = tvm_ffi.structural_map(body, (tirx.For, _without_mark))
    if not writer.texts:
        return function.with_body(body)
    body = overlap.insert(body, function.params, overlap.Calls(*map(_calls, (_CONFIGURE, _MULTIPLY, _STORE))))
    writer.texts[_PERMITTED] = asking.once(_PERMITTED, _ASKING)
    permission = asking.required(_PERMITTED, _REFUSED)
    body = tirx.SeqStmt([permission, tvm_ffi.structural_map(body, (tirx.For, writer.in_task))])
    for text in writer.imports():
        body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", tvm.ir.StringImm(text), body)
    return function.with_body(body)


def needed(libraries: Iterable[Path]) -> list[str]:
    """What compiled libraries need of a CPU for it, by LLVM's names."""
    return ["amx-tile"] if any(_PERMITTED.encode() in library.read_bytes() for library in libraries) else []


def _without_mark(loop: tirx.For) -> tirx.For:
    if MARK not in loop.annotations:
        return loop
    kept = {name: value for name, value in loop.annotations.items() if name != MARK}
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, annotations=kept)


@dataclass(frozen=True, slots=True)
class Access:
    """A tensor, and where a tile begins in it, by the variables of the tile's loops."""

    tensor: Any
    indices: Sequence[Any]

    def stride(self, var: Any) -> int:
        """See `analysis.stride`."""
        return analysis.stride(self.indices, self.tensor.ty.shape, var)

    def at(self, where: dict[Any, int]) -> Any:
        """The address with the loops at some iteration."""
        values = {var: tirx.IntImm(var.ty.dtype, n) for var, n in where.items()}
        return tirx.address_of(tirx.BufferLoad(self.tensor, [analysis.replaced(i, values) for i in self.indices]))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tile in one register: so many from the n-th on, where lines have `width`; by (line, row)."""

    n: int
    height: int
    width: int

    def at(self, n: int) -> tuple[int, int]:
        """The n-th of them."""
        return divmod(self.n + n, self.width)


@dataclass(frozen=True)
class Tile:
    """A marked tile that an instruction fits."""

    matrix: Matrix
    vectors: tirx.For
    step: tirx.For
    lines: tirx.For | None
    rows: tirx.For
    lanes: tirx.For
    products: tirx.For
    data: Access
    weights: Access
    sums: Access

    @property
    def loops(self) -> list[tirx.For]:
        """All of them, the outermost first."""
        of_rows = [self.rows] if self.lines is None else [self.lines, self.rows]
        return [self.vectors, self.step, *of_rows, self.lanes, self.products]

    @property
    def n_vectors(self) -> int:
        """Of the sums of a row."""
        return int(self.vectors.extent)

    @property
    def n_steps(self) -> int:
        """Of a product."""
        return int(self.step.extent)

    @cached_property
    def registers_of_rows(self) -> list[Rows]:
        """Rows divided into registers; those of several lines together, if they are equally far apart."""
        n_lines, width = int(self.lines.extent) if self.lines is not None else 1, int(self.rows.extent)
        is_one = n_lines == 1 or self._is_even()
        parts, length = (1, n_lines * width) if is_one else (n_lines, width)
        return [
            Rows(part * length + first * self.matrix.ROWS, height, width)
            for part in range(parts)
            for first, height in enumerate(self.matrix.heights(length))
        ]

    def _is_even(self) -> bool:
        """Whether a line of data, and of sums, begins where the one before it ends."""
        assert self.lines is not None
        return all(
            each.stride(self.lines.loop_var) == int(self.rows.extent) * each.stride(self.rows.loop_var)
            for each in (self.data, self.sums)
        )

    @property
    def heights(self) -> list[int]:
        """Of the registers that rows are divided into."""
        return [rows.height for rows in self.registers_of_rows]

    @property
    def keeps_data(self) -> bool:
        """See `Matrix.keeps_data`."""
        return self.matrix.keeps_data(self.heights, self.n_vectors)

    @property
    def spare(self) -> int:
        """Registers for what is not kept: as many as are left, so that loads need not wait for products."""
        n = len(self.heights)
        kept, others = (n, self.n_vectors) if self.keeps_data else (self.n_vectors, n)
        return min(others, self.matrix.REGISTERS - n * self.n_vectors - kept)

    def where(self, step: int = 0, row: tuple[int, int] = (0, 0), vector: int = 0, lane: int = 0) -> dict[Any, int]:
        """An iteration of its loops."""
        of_line = {} if self.lines is None else {self.lines.loop_var: row[0]}
        return of_line | {self.step.loop_var: step, self.rows.loop_var: row[1], self.vectors.loop_var: vector,
                          self.lanes.loop_var: lane, self.products.loop_var: 0}  # fmt: skip


def _tile(vectors: tirx.Stmt, loop: tirx.For) -> Tile | None:
    """What a loop over vectors and a marked one in it, over steps, are; None if the instruction does not fit them."""
    matrix, inner, body = matrix_named(str(loop.annotations[MARK])), list[tirx.For](), loop.body
    while isinstance(body, tirx.For):
        inner.append(body)
        body = body.body
    if len(inner) not in (3, 4) or not isinstance(body, SBlockRealize) or not isinstance(vectors, tirx.For):
        return None
    lines, (rows, lanes, products) = inner[0] if len(inner) == 4 else None, inner[-3:]
    operands = analysis.added_factors(body.block)
    if operands is None or analysis.variables([body.predicate]) & {each.loop_var for each in (vectors, loop, *inner)}:
        return None
    bound = {axis.var: value for axis, value in zip(body.block.iter_vars, body.iter_values, strict=True)}

    def access(tensor: Any, indices: Sequence[Any]) -> Access:
        return Access(tensor, [analysis.replaced(index, bound) for index in indices])

    store = analysis.stored(body.block)
    first, second = (access(load.source, load.indices) for load in operands)
    data, weights = (first, second) if first.stride(lanes.loop_var) == 0 else (second, first)
    sums = access(store.buffer, store.indices)
    found = Tile(matrix, vectors, loop, lines, rows, lanes, products, data, weights, sums)
    return found if _fits(found) else None


def _fits(tile: Tile) -> bool:
    matrix, dot = tile.matrix, tile.matrix.dot
    sizes = int(tile.lanes.extent), int(tile.products.extent)
    if sizes != (matrix.LANES, dot.depth) or tile.n_steps > matrix.STEPS:
        return False
    if (str(tile.data.tensor.ty.dtype), str(tile.weights.tensor.ty.dtype)) != (dot.data, dot.weights):
        return False
    # By vectors, steps, lines, rows, lanes, products; None: any that is constant.
    of_rows = [None] * (len(tile.loops) - 4)
    strides: dict[str, list[int | None]] = {
        "data": [0, dot.depth, *of_rows, 0, 1],
        "weights": [None, None, *([0] * len(of_rows)), dot.depth, 1],
        "sums": [None, 0, *of_rows, 1, 0],
    }
    is_even = all(
        _is_linear(getattr(tile, name), loop, stride)
        for name, of in strides.items()
        for loop, stride in zip(tile.loops, of, strict=True)
    )
    return is_even and matrix.registers(tile.heights, tile.n_vectors) <= matrix.REGISTERS


def _is_linear(access: Access, loop: tirx.For, wanted: int | None) -> bool:
    extent, stride = int(loop.extent), access.stride(loop.loop_var)
    if extent == 1:
        return True
    is_wanted = stride == wanted if wanted is not None else stride > 0
    return is_wanted and analysis.is_linear(access.indices, access.tensor.ty.shape, loop.loop_var, extent)


class _Writer:
    """Writes tiles as instructions, and keeps the functions in LLVM's language that they call."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def written(self, sequence: tirx.SeqStmt, there: Iterable[Matrix]) -> tirx.SeqStmt:
        """A sequence in which sums are set to zero and then added to, with instructions if they fit."""
        statements = list(sequence.seq)
        for n, (zeros, steps) in enumerate(itertools.pairwise(statements)):
            if not isinstance(zeros, tirx.For) or MARK not in zeros.annotations:
                continue
            marked = [loop for loop in analysis.walk(steps, tirx.For) if MARK in loop.annotations]
            tile = _tile(steps, marked[0]) if len(marked) == 1 else None
            if tile is None or tile.matrix not in there:
                continue
            begin, end = self._around(tile)
            looped = self._multiplied(tile, steps.body)
            return tirx.stmt_seq(*statements[:n], *begin, looped, *end, *statements[n + 2 :])
        return sequence

    def _around(self, tile: Tile) -> tuple[list[tirx.Stmt], list[tirx.Stmt]]:
        """What is done before and after a tile's loops."""
        sums = [(rows, v) for rows in tile.registers_of_rows for v in range(tile.n_vectors)]
        # BF16ComputeLegalize makes float32 of the tensors within a program, unless somebody asks where they lie.
        kept = [tirx.Evaluate(access.tensor.data) for access in (tile.data, tile.weights)]
        zeros = [self._call("zero", a=n) for n in range(len(sums))]
        # Of sums that nobody reads, as of columns that are cut off, TVM would leave out the place, but for an address.
        last = [
            tile.sums.at(tile.where(row=rows.at(rows.height - 1), vector=v, lane=tile.matrix.LANES - 1))
            for rows, v in sums
        ]
        stored = [
            self._call("store", *_places(tile.sums, tile, rows, v), last[n], a=n) for n, (rows, v) in enumerate(sums)
        ]
        return [*kept, self._configure(tile), *zeros], stored

    def _multiplied(self, tile: Tile, body: tirx.Stmt) -> tirx.Stmt:
        """What is in a loop over vectors, with instructions in place of the marked loop."""
        around = next(nest for nest in analysis.nests(body) if MARK in nest[-1].annotations)[:-1]
        n_loads = tile.n_vectors * math.prod(int(loop.extent) for loop in around)
        at = tile.weights.indices, tile.weights.tensor.ty.shape
        is_again = not all(analysis.is_linear(*at, loop.loop_var, int(loop.extent)) for loop in around)
        stays = is_again or n_loads * tile.n_steps * _WIDTH <= _STAYS
        products, vector = list(self._products(tile, "load" if stays else "stream")), tile.vectors.loop_var

        def step(loop: tirx.For) -> tirx.For:
            *prefetches, last = list(loop.body.seq) if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
            if not isinstance(last, tirx.For) or MARK not in last.annotations:
                return loop
            ahead = [
                analysis.replaced(each, {vector: tirx.IntImm(vector.ty.dtype, v)})
                for v in range(tile.n_vectors)
                for each in prefetches
            ]
            return analysis.with_body(loop, tirx.SeqStmt([*ahead, *products]))

        return tvm_ffi.structural_map(body, (tirx.For, step))

    def _products(self, tile: Tile, load: str) -> Iterator[tirx.Stmt]:
        """Those of one step of the loops around the tile.

        Args:
            load: How weights are loaded: `load`, or `stream`, past L1.
        """
        rows, n_vectors = tile.registers_of_rows, tile.n_vectors
        n, n_sums = len(rows), len(rows) * n_vectors

        def load_data(i: int, register: int) -> tirx.Stmt:
            return self._call("load", *_places(tile.data, tile, rows[i]), a=register)

        def load_weights(v: int, register: int) -> tirx.Stmt:
            places = [tile.weights.at(tile.where(step=step, vector=v)) for step in (0, min(1, tile.n_steps - 1))]
            return self._call(load, *places, a=register)

        def multiply(i: int, v: int, data: int, weights: int) -> tirx.Stmt:
            return self._call("multiply", instruction=tile.matrix.name, a=i * n_vectors + v, b=data, c=weights)

        spare, first = tile.spare, n_sums + (n if tile.keeps_data else n_vectors)  # first: what is not kept
        if tile.keeps_data:
            for v in range(n_vectors):
                yield load_weights(v, first + v % spare)
                for i in range(n):
                    if v == 0:
                        yield load_data(i, n_sums + i)
                    yield multiply(i, v, n_sums + i, first + v % spare)
        else:
            for i in range(n):
                yield load_data(i, first + i % spare)
                for v in range(n_vectors):
                    if i == 0:
                        yield load_weights(v, n_sums + v)
                    yield multiply(i, v, first + i % spare, n_sums + v)

    def _configure(self, tile: Tile) -> tirx.Stmt:
        """What sets the registers up for a tile: its sums, then as `_products` has them."""
        shapes = [(height, _WIDTH) for height in tile.heights for _ in range(tile.n_vectors)]
        data, weights = [(height, _ELEMENT * tile.n_steps) for height in tile.heights], (tile.n_steps, _WIDTH)
        several = [weights] * (tile.spare if tile.keeps_data else tile.n_vectors)
        shapes += [*data, *several] if tile.keeps_data else [*several, *data[: tile.spare]]
        self.text("release", _RELEASE)
        key = "_".join(f"{height}x{width}" for height, width in shapes)
        return self._called("configure", f"{_CONFIGURE}_{key}", data=_configuration(shapes))

    def in_task(self, loop: tirx.For) -> tirx.For:
        """A parallel loop whose tasks set their registers up once, if all tiles agree, and leave none in use."""
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        settings = {name: call for call in analysis.walk(loop.body, tvm.ir.Call)
                    if (name := _called_name(call)).startswith(_CONFIGURE)}  # fmt: skip
        if not settings:
            return loop
        parts = [loop.body, tirx.Evaluate(tirx.call_extern("void", _RELEASE))]
        if len(settings) == 1:
            [once] = settings.values()
            nothing = tirx.Evaluate(tirx.const(0, "int32"))
            body = tvm_ffi.structural_map(
                loop.body,
                (tirx.Evaluate, lambda each: nothing if _called_name(each.value).startswith(_CONFIGURE) else each),
            )
            parts = [tirx.Evaluate(once), body, parts[1]]
        return analysis.with_body(loop, tirx.SeqStmt(parts))

    def _call(self, kind: str, *arguments: Any, **numbers: Any) -> tirx.Stmt:
        name = "_".join([_PREFIX, kind, *(str(value) for value in numbers.values())])
        return self._called(kind, name, *arguments, **numbers)

    def _called(self, kind: str, name: str, *arguments: Any, **parts: Any) -> tirx.Stmt:
        self.text(kind, name, **parts)
        return tirx.Evaluate(tirx.call_extern("void", name, *arguments))

    def imports(self) -> list[str]:
        """Those functions, one after the other: equal programs have equal texts."""
        return [self.texts[name] for name in sorted(self.texts)]

    def text(self, kind: str, name: str, **parts: Any) -> None:
        """Have a function of that name."""
        self.texts[name] = _TEXTS[kind].format(name=name, **parts)


def _places(access: Access, tile: Tile, rows: Rows, vector: int = 0) -> list[Any]:
    """The address of a register's first row, and that of the next one, which tells how far apart they are once TVM has
    laid out what is local to a program."""
    return [access.at(tile.where(row=rows.at(n), vector=vector)) for n in (0, min(1, rows.height - 1))]


def _called_name(call: Any) -> str:
    if not isinstance(call, tvm.ir.Call) or not call.args or not isinstance(call.args[0], tvm.ir.StringImm):
        return ""
    return str(call.args[0].value)


def _calls(name: str) -> Callable[[tirx.Stmt], bool]:
    """Whether a statement calls a function whose name begins so."""
    return lambda each: isinstance(each, tirx.Evaluate) and _called_name(each.value).startswith(name)


def _configuration(shapes: Sequence[tuple[int, int]]) -> str:
    """The 64 bytes of `ldtilecfg` for registers of so many rows and bytes in each, as LLVM writes them."""
    data = bytearray(_WIDTH)
    data[0] = 1  # the palette: eight registers of 1 KB
    for n, (rows, width) in enumerate(shapes):
        data[16 + 2 * n : 18 + 2 * n] = width.to_bytes(2, "little")
        data[48 + n] = rows
    return "".join(f"\\{byte:02X}" for byte in data)
