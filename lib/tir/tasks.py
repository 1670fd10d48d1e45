"""Lowered kernels taken apart: into the shares of work that threads have of their parallel loops, as functions.

What TVM lowers is a function that checks its arguments and then does all of its work. Here that becomes functions that
get memory and do a step of the work, or a part of its iterations: for regions (`lib.tir.regions`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from lib.tir import analysis

_COMPUTES = "compute_scope"  # attribute that TVM's MakePackedAPI puts around what a function computes
_KEPT = ("storage_alignment", "pragma_import_llvm")  # attributes on which that relies
_BYTES = tvm.ir.PointerType(tvm.ir.PrimType("uint8"), "global")


@dataclass(frozen=True, slots=True)
class Lowered:
    """A function that TVM lowered: what it computes, and what is said around that."""

    function: tirx.PrimFunc
    around: list[tirx.AttrStmt]
    before: list[tirx.Stmt]
    tensors: list[Any]  # its parameters
    statements: list[tirx.Stmt]

    @classmethod
    def of(cls, function: tirx.PrimFunc) -> "Lowered":
        around, before, statement = list[tirx.AttrStmt](), list[tirx.Stmt](), function.body
        while not _computes(statement):
            if isinstance(statement, tirx.AttrStmt):
                around.append(statement)
                statement = statement.body
            else:
                parts = flat(statement)
                before += [each for each in parts if not isinstance(each, tirx.AttrStmt | tirx.Return)]
                [statement] = [each for each in parts if isinstance(each, tirx.AttrStmt)]
        statements = list(_opened(statement.body, around))
        tensors = [each.buffer for each in before if isinstance(each, tirx.DeclBuffer)]
        return cls(function, around, before, tensors, statements)

    @property
    def relied_on(self) -> list[tirx.AttrStmt]:
        """Attributes without which its work is another one."""
        return [each for each in self.around if each.attr_key in _KEPT]

    def with_work(self, work: tirx.Stmt) -> tirx.PrimFunc:
        """The function with other work on its tensors, which it takes unseen: nothing is asserted of them."""
        before = [each for each in self.before if not isinstance(each, tirx.AssertStmt | tirx.IfThenElse)]
        return self.function.with_body(sequence([*before, _computed(str(self.function.attrs["global_symbol"]), work)]))


@dataclass(frozen=True, slots=True)
class Step:
    """What can be done at once: the iterations of a parallel loop, or statements that one thread does."""

    loop: tirx.For | None
    statements: list[tirx.Stmt]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The steps of a kernel; none if a parallel loop is within other statements: then it is one function.

    Tensors that it keeps between its steps are given to it.
    """

    name: str
    lowered: Lowered
    steps: list[Step]
    said: list[tirx.Stmt]  # names of tensors and values
    kept: list[tirx.AllocBuffer]
    asserted: list[tirx.Stmt]

    @classmethod
    def of(cls, name: str, function: tirx.PrimFunc) -> "Kernel":
        lowered = Lowered.of(function)
        steps, said, kept, asserted = list[Step](), list[tirx.Stmt](), list[tirx.AllocBuffer](), list[tirx.Stmt]()
        is_plain = True
        for each in lowered.statements:
            if isinstance(each, tirx.Bind | tirx.DeclBuffer):
                is_plain &= not analysis.walk(each, tvm.ir.TensorLoad)  # a value of then, not of when a step is done
                said.append(each)
            elif isinstance(each, tirx.AllocBuffer):
                kept.append(each)
            elif isinstance(each, tirx.AssertStmt):
                asserted.append(each)
            elif _is_parallel(each):
                steps.append(Step(each, [each.body]))
            elif steps and steps[-1].loop is None:
                steps[-1].statements.append(each)
            else:
                steps.append(Step(None, [each]))
        within = [loop for step in steps for each in step.statements for loop in analysis.walk(each, tirx.For)]
        is_plain &= not any(map(_is_parallel, within))
        return cls(name, lowered, steps if is_plain else [], said, kept, asserted)

    @property
    def needed(self) -> list[int]:
        """Bytes of each of the tensors that it keeps."""
        return list(map(_bytes, self.kept)) if self.steps else []

    def requirements(self) -> list[tirx.Stmt]:
        """What it asserts of the machine; nobody looks at what a task returns."""
        return [_surrounded(self.lowered.relied_on, each) for each in self.asserted]

    def functions(self) -> Iterator[tuple[str, tirx.PrimFunc]]:
        """By name: one for each step, or one of all."""
        if not self.steps:
            yield self._task(), self._function(self._task(), [], self.lowered.statements)
        for n, step in enumerate(self.steps):
            own, work = list[Any](), step.statements
            if step.loop is not None:
                begin, end = own = [tirx.Var(name, step.loop.loop_var.ty) for name in ("begin", "end")]
                work = [tirx.For(step.loop.loop_var, begin, end - begin, tirx.ForKind.SERIAL, step.loop.body)]
            yield self._task(n), self._function(self._task(n), own, [*self.said, *work])

    def call(self, memory: Sequence[Any]) -> tirx.Stmt:
        """Do all of it.

        Args:
            memory: Where each of its tensors begins.
        """
        return calls(self._task(), memory)

    def call_step(self, n: int, memory: Sequence[Any], begin: Any = None, end: Any = None) -> tirx.Stmt:
        """Do a step, or of a loop the iterations from `begin` to before `end`; `memory` of what it keeps, too."""
        return calls(self._task(n), [*([] if begin is None else [begin, end]), *memory])

    def _task(self, n: int | None = None) -> str:
        return f"{self.name}_work{'' if n is None else n}"

    def _function(self, name: str, own: Sequence[Any], work: Sequence[tirx.Stmt]) -> tirx.PrimFunc:
        tensors = [*self.lowered.tensors, *(each.buffer for each in self.kept if self.steps)]
        memory = [tirx.Var(f"{each.name}_at", _BYTES) for each in tensors]
        offsets = [each.elem_offset for each in tensors if isinstance(each.elem_offset, tirx.Var)]
        begins = [tirx.Bind(offset, tirx.const(0, offset.ty.dtype)) for offset in offsets]
        given = [tirx.DeclBuffer(each, data=tirx.reinterpret(each.data.ty, at))
                 for each, at in zip(tensors, memory, strict=True)]  # fmt: skip
        body = _surrounded(self.lowered.relied_on, _computed(name, sequence([*begins, *given, *work])))
        attrs = {"global_symbol": name, "target": self.lowered.function.attrs["target"], "tirx.noalias": True}
        return tirx.PrimFunc([*own, *memory], body, tvm.ir.PrimType("int32")).with_attrs(attrs)


def calls(name: str, given: Sequence[Any]) -> tirx.Stmt:
    """Call a function of machine code. It returns 0; where there is no memory, TVM ends the process before."""
    return tirx.Evaluate(tirx.call_extern("int32", name, *given))


def flat(statement: tirx.Stmt) -> list[tirx.Stmt]:
    """Statements one after the other."""
    if not isinstance(statement, tirx.SeqStmt):
        return [statement]
    return [part for each in statement.seq for part in flat(each)]


def sequence(statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """The other way round."""
    parts = [part for each in statements for part in flat(each)]
    return tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]


def _surrounded(attributes: Sequence[tirx.AttrStmt], body: tirx.Stmt) -> tirx.Stmt:
    for each in reversed(attributes):
        body = tirx.AttrStmt(each.node, each.attr_key, each.value, body)
    return body


def _opened(statement: tirx.Stmt, around: list[tirx.AttrStmt]) -> Iterator[tirx.Stmt]:
    """Statements one after the other; attributes on which they rely go to those around all of them."""
    for each in flat(statement):
        if isinstance(each, tirx.AttrStmt) and each.attr_key in _KEPT:
            around.append(each)
            yield from _opened(each.body, around)
        else:
            yield each


def _computes(statement: tirx.Stmt) -> bool:
    return isinstance(statement, tirx.AttrStmt) and statement.attr_key == _COMPUTES


def _computed(name: str, work: tirx.Stmt) -> tirx.Stmt:
    """Work as a lowered function has it. TVM makes it a function that LLVM does not inline: in one with many others it
    would know less of which memory overlaps."""
    work = tirx.AttrStmt(0, _COMPUTES, tvm.ir.StringImm(f"{name}_compute_"), work)
    work = sequence([work, tirx.Return(tirx.const(0, "int32"))])
    for key, value in (("device_type", 1), ("device_id", 0)):
        work = tirx.AttrStmt(tvm.ir.StringImm("default"), key, tirx.const(value, "int32"), work)
    return work


def _is_parallel(statement: tirx.Stmt) -> bool:
    return isinstance(statement, tirx.For) and statement.kind == tirx.ForKind.PARALLEL


def _bytes(allocated: tirx.AllocBuffer) -> int:
    tensor = allocated.buffer
    size = analysis.itemsize(tensor.dtype) * tvm.DataType(str(tensor.dtype)).lanes
    return size * math.prod(int(extent) for extent in tensor.shape)
