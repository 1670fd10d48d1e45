"""Products of small matrices in AMX's registers, in place of the loops of a register tile.

A space marks two loops of a contraction's tile: the one that sets its sums to zero, and the one over the steps of a
product, around rows, vectors, lanes, and what an instruction of vectors adds to a lane (`lib.tir.dot`). When programs
are lowered, the sums get registers of their own (`lib.machine.dots.Matrix`): these are set to zero, each step of the
loops in between loads rows of data and of packed weights and multiplies them, and after those loops the sums are stored
to where the program has them, for what reads them. Until then a program says what it computes in plain arithmetic, and
where the instruction does not fit, or the CPU lacks it, the loops stay and compute the same.

    set its registers to zero                        for row, vector, lane: sums = 0            (marked)
    for k.0, kernel window                           for k.0, kernel window
        load data, load weights, multiply                for k.1, row, vector, lane, product: sums += ...  (marked)
    store its registers
    the epilogue                                     the epilogue

A register holds up to 16 rows of 64 bytes; how many of them, and how wide, is set for all eight at once (`ldtilecfg`),
once for a parallel task if all of its tiles agree, else at each tile. Linux lets a process use them only after it asked
(`arch_prctl`): each function does so first, once for all that follows.
Source: Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3; Linux, "Using XSTATE features
in user space applications".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize

from lib.machine.dots import Matrix, matrix_named
from lib.machine.registers import registers
from lib.tir import analysis

MARK = "matrix"  # annotation of the loop that sets sums to zero, and of that over steps: the name of an instruction

_PREFIX = "family_tuner_tiles"
_CONFIGURE, _RELEASE, _PERMITTED = f"{_PREFIX}_configure", f"{_PREFIX}_release", f"{_PREFIX}_permitted"
_WIDTH = 64  # bytes of a register's row
_REFUSED = (
    "this library was compiled for a CPU with AMX, which the operating system does not let this process use (Linux "
    "since 5.16 does, unless a container forbids it). Compile the model with a --target without amx-tile."
)
_TEXTS = {
    "permitted": """
@{name}_known = internal global i32 -1
define linkonce_odr i32 @{name}() noinline nounwind {{
  %known = load i32, ptr @{name}_known
  %asked = icmp sge i32 %known, 0
  br i1 %asked, label %done, label %ask
done:
  ret i32 %known
ask:
  %refused = call i64 asm sideeffect "syscall", "={{rax}},0,{{rdi}},{{rsi}},~{{rcx}},~{{r11}},~{{memory}}"(i64 158, i64 4131, i64 18)
  %may = icmp eq i64 %refused, 0
  %found = zext i1 %may to i32
  store i32 %found, ptr @{name}_known
  ret i32 %found
}}
""",
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
    "load": """
define linkonce_odr void @{name}(ptr %at, ptr %next) alwaysinline nounwind {{
  %x = ptrtoint ptr %at to i64
  %y = ptrtoint ptr %next to i64
  %stride = sub i64 %y, %x
  call void @llvm.x86.tileloadd64(i8 {a}, ptr %at, i64 %stride)
  ret void
}}
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
""",
    "store": """
define linkonce_odr void @{name}(ptr %at, ptr %next) alwaysinline nounwind {{
  %x = ptrtoint ptr %at to i64
  %y = ptrtoint ptr %next to i64
  %stride = sub i64 %y, %x
  call void @llvm.x86.tilestored64(i8 {a}, ptr %at, i64 %stride)
  ret void
}}
declare void @llvm.x86.tilestored64(i8, ptr, i64)
""",
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
    if not any(MARK in loop.annotations for loop in analysis.walk(function.body, tirx.For)):
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
    body = tirx.SeqStmt([_permission(writer), tvm_ffi.structural_map(body, (tirx.For, writer.in_task))])
    for name in sorted(writer.texts):
        text = tvm.ir.StringImm(writer.texts[name])
        body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", text, body)
    return function.with_body(body)


def _permission(writer: "_Writer") -> tirx.Stmt:
    writer.text("permitted", _PERMITTED)
    may = tirx.EQ(tirx.call_extern("int32", _PERMITTED), tirx.const(1, "int32"))
    # TVM 0.27's constructor names these two the other way round.
    return tirx.AssertStmt(may, tvm.ir.StringImm("RuntimeError"), [tvm.ir.StringImm(_REFUSED)])


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
class Tile:
    """A marked tile that an instruction fits."""

    matrix: Matrix
    loops: tuple[tirx.For, ...]  # over steps, rows, vectors, lanes, products
    data: Access
    weights: Access
    sums: Access

    def extent(self, n: int) -> int:
        """Iterations of a loop."""
        return int(self.loops[n].extent)

    @property
    def heights(self) -> list[int]:
        """See `Matrix.heights`."""
        return self.matrix.heights(self.extent(1))

    @property
    def keeps_data(self) -> bool:
        """See `Matrix.keeps_data`."""
        return self.matrix.keeps_data(self.extent(1), self.extent(2))

    def where(self, step: int = 0, row: int = 0, vector: int = 0) -> dict[Any, int]:
        """An iteration of its loops."""
        return dict(zip([loop.loop_var for loop in self.loops], (step, row, vector, 0, 0), strict=True))


def _tile(loop: tirx.For) -> Tile | None:
    """What a marked loop over steps is; None if the instruction does not fit it."""
    matrix, loops, body = matrix_named(str(loop.annotations[MARK])), [loop], _last(loop.body)
    while isinstance(body, tirx.For):
        loops.append(body)
        body = body.body
    if len(loops) != 5 or not isinstance(body, SBlockRealize):
        return None
    variables = [each.loop_var for each in loops]
    operands = analysis.added_factors(body.block)
    if operands is None or analysis.variables([body.predicate]) & set(variables):
        return None
    bound = {axis.var: value for axis, value in zip(body.block.iter_vars, body.iter_values, strict=True)}

    def access(tensor: Any, indices: Sequence[Any]) -> Access:
        return Access(tensor, [analysis.replaced(index, bound) for index in indices])

    store = analysis.stored(body.block)
    first, second = (access(load.source, load.indices) for load in operands)
    data, weights = (first, second) if first.stride(variables[3]) == 0 else (second, first)
    found = Tile(matrix, tuple(loops), data, weights, access(store.buffer, store.indices))
    return found if _fits(found) else None


def _last(body: tirx.Stmt) -> tirx.Stmt:
    """Of a body that begins with prefetches, what follows them."""
    return body.seq[-1] if isinstance(body, tirx.SeqStmt) else body


def _fits(tile: Tile) -> bool:
    depth, extents = tile.matrix.dot.depth, [tile.extent(n) for n in range(5)]
    if extents[3] != tile.matrix.LANES or extents[4] != depth or extents[0] > tile.matrix.STEPS:
        return False
    if tile.matrix.registers(*extents[1:3]) > tile.matrix.REGISTERS:
        return False
    if (str(tile.data.tensor.ty.dtype), str(tile.weights.tensor.ty.dtype)) != (
        tile.matrix.dot.data,
        tile.matrix.dot.weights,
    ):
        return False
    # By step, row, vector, lane, product; None: any that is constant.
    strides = {"data": (depth, None, 0, 0, 1), "weights": (None, 0, None, depth, 1), "sums": (0, None, None, 1, 0)}
    return all(
        _is_linear(getattr(tile, name), loop, stride)
        for name, of in strides.items()
        for loop, stride in zip(tile.loops, of, strict=True)
    )


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
        for n, (zeros, steps) in enumerate(zip(statements[:-1], statements[1:], strict=True)):
            if not isinstance(zeros, tirx.For) or MARK not in zeros.annotations:
                continue
            marked = [loop for loop in analysis.walk(steps, tirx.For) if MARK in loop.annotations]
            tile = _tile(marked[0]) if len(marked) == 1 else None
            if tile is None or tile.matrix not in there:
                continue
            begin, step, end = self._instructions(tile)
            looped = tvm_ffi.structural_map(
                steps, (tirx.For, lambda loop, step=step: step(loop) if MARK in loop.annotations else loop)
            )
            return tirx.stmt_seq(*statements[:n], *begin, looped, *end, *statements[n + 2 :])
        return sequence

    def _instructions(self, tile: Tile) -> tuple[list[tirx.Stmt], Any, list[tirx.Stmt]]:
        """What is done before a tile's loops, in place of the marked one, and after them."""
        heights, vectors = tile.heights, tile.extent(2)
        sums = [(i, v) for i in range(len(heights)) for v in range(vectors)]
        rows = [sum(heights[:i]) for i in range(len(heights))]
        # BF16ComputeLegalize makes float32 of the tensors within a program, unless somebody asks where they lie.
        kept = [tirx.Evaluate(access.tensor.data) for access in (tile.data, tile.weights)]
        begin = [*kept, self._configure(tile), *(self._call("zero", a=n) for n in range(len(sums)))]
        end = [
            self._call("store", *_row_pair(tile.sums, tile, heights[i], row=rows[i], vector=v), a=n)
            for n, (i, v) in enumerate(sums)
        ]
        products = [*self._products(tile, rows)]

        def step(loop: tirx.For) -> tirx.Stmt:
            if not isinstance(loop.body, tirx.SeqStmt):
                return tirx.SeqStmt(products)
            prefetches = tirx.stmt_seq(*list(loop.body.seq)[:-1])
            return tirx.SeqStmt([tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, prefetches), *products])

        return begin, step, end

    def _products(self, tile: Tile, rows: Sequence[int]) -> Iterable[tirx.Stmt]:
        """Those of one step of the loops around the tile: of data and weights, what takes fewer registers stays."""
        heights, vectors = tile.heights, tile.extent(2)
        n, n_sums = len(heights), len(heights) * tile.extent(2)

        def load_data(i: int, register: int) -> tirx.Stmt:
            return self._call("load", *_row_pair(tile.data, tile, heights[i], row=rows[i]), a=register)

        def load_weights(v: int, register: int) -> tirx.Stmt:
            places = [tile.weights.at(tile.where(step=step, vector=v)) for step in (0, min(1, tile.extent(0) - 1))]
            return self._call("load", *places, a=register)

        def multiply(i: int, v: int, data: int, weights: int) -> tirx.Stmt:
            return self._call(
                "multiply", a=i * vectors + v, b=data, c=weights, instruction=tile.matrix.name
            )

        if tile.keeps_data:
            yield from (load_data(i, n_sums + i) for i in range(n))
            for v in range(vectors):
                yield load_weights(v, n_sums + n)
                yield from (multiply(i, v, n_sums + i, n_sums + n) for i in range(n))
        else:
            yield from (load_weights(v, n_sums + 1 + v) for v in range(vectors))
            for i in range(n):
                yield load_data(i, n_sums)
                yield from (multiply(i, v, n_sums, n_sums + 1 + v) for v in range(vectors))

    def _configure(self, tile: Tile) -> tirx.Stmt:
        heights, vectors, steps = tile.heights, tile.extent(2), tile.extent(0)
        shapes = [(height, _WIDTH) for height in heights for _ in range(vectors)]
        data, weights = [(height, 4 * steps) for height in heights], (steps, _WIDTH)
        shapes += [*data, weights] if tile.keeps_data else [data[0], *[weights] * vectors]
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
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, tirx.SeqStmt(parts), annotations=loop.annotations)

    def _call(self, kind: str, *arguments: Any, **numbers: Any) -> tirx.Stmt:
        name = "_".join([_PREFIX, kind, *(str(value) for value in numbers.values())])
        return self._called(kind, name, *arguments, **numbers)

    def _called(self, kind: str, name: str, *arguments: Any, **parts: Any) -> tirx.Stmt:
        self.text(kind, name, **parts)
        return tirx.Evaluate(tirx.call_extern("void", name, *arguments))

    def text(self, kind: str, name: str, **parts: Any) -> None:
        """Have a function of that name."""
        self.texts[name] = _TEXTS[kind].format(name=name, **parts)


def _row_pair(access: Access, tile: Tile, height: int, row: int, vector: int = 0) -> list[Any]:
    """The address of a row, and that of the next one, which tells how far apart they are once TVM has laid out what is
    local to a program."""
    return [access.at(tile.where(row=n, vector=vector)) for n in (row, row + min(1, height - 1))]


def _called_name(call: Any) -> str:
    if not isinstance(call, tvm.ir.Call) or not call.args or not isinstance(call.args[0], tvm.ir.StringImm):
        return ""
    return str(call.args[0].value)


def _configuration(shapes: Sequence[tuple[int, int]]) -> str:
    """The 64 bytes of `ldtilecfg` for registers of so many rows and bytes in each, as LLVM writes them."""
    data = bytearray(_WIDTH)
    data[0] = 1  # the palette: eight registers of 1 KB
    for n, (rows, width) in enumerate(shapes):
        data[16 + 2 * n : 18 + 2 * n] = width.to_bytes(2, "little")
        data[48 + n] = rows
    return "".join(f"\\{byte:02X}" for byte in data)
