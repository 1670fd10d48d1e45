"""Loops over elements that are copied and then over a gap of zeros, apart: else each asks where it is, and no vectors
are read."""

import tvm_ffi
from tvm import tirx

from lib.tir import analysis

DEEPER = "deeper"  # annotation of a block that adds channels to each group: how many one has, and gets
MARK = "gap_from"  # annotation of a loop from zero on: the first iteration of the gap

_SERIAL = tirx.ForKind.SERIAL  # TVM's passes for bf16 know no vectors of constants (TVM 0.27)


def split(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Split marked loops where their gaps begin; programs without marks stay as they are."""

    def split_loop(loop: tirx.For) -> tirx.Stmt:
        if MARK not in loop.annotations:
            return loop
        first = int(loop.annotations[MARK])
        return tirx.SeqStmt([_part(loop, 0, first, loop.kind), _part(loop, first, int(loop.extent), _SERIAL)])

    if not analysis.has_mark(function, MARK):
        return function
    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, split_loop)))


def _part(loop: tirx.For, begin: int, end: int, kind: int) -> tirx.For:
    var = tirx.Var(loop.loop_var.name, loop.loop_var.ty)
    body = analysis.replaced(loop.body, {loop.loop_var: var + begin if begin else var})
    kept = {name: value for name, value in loop.annotations.items() if name != MARK}
    return tirx.For(var, loop.min, end - begin, kind, body, annotations=kept)
