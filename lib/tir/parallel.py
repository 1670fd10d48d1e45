"""Loops that are to run in parallel, though TVM cannot prove that they may.

TVM's `parallel` wants every block within a loop to be one whose data flow it understands. It gives up on blocks with a
predicate, as those at the end of rows that do not fill whole vectors (`lib.search.spaces.rows`). So a space whose loops
are independent by how they were made marks one, and it is made parallel when programs are lowered.
"""

import tvm_ffi
from tvm import tirx

from lib.tir import analysis

MARK = "parallel"  # annotation of a loop


def mark_to_kind(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make marked loops parallel; programs without marks stay as they are."""
    if not analysis.has_mark(function, MARK):
        return function

    def parallel(loop: tirx.For) -> tirx.For:
        if MARK not in loop.annotations:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.PARALLEL, loop.body)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, parallel)))
