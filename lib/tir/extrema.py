"""Extrema of infinities: the maximum of nothing but -inf, as masks of attention have it, is -inf.

TVM's own begin with the largest finite number, and the primitive that cuts a reduction into vectors, `rfactor`, knows
no other beginning. So extrema begin with that while they are scheduled, in blocks that are marked, and with an infinity
once they are lowered.
"""

import math

import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock

from lib.tir import analysis

MARK = "begins_with_infinity"  # annotation of the block of an extremum


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let marked extrema begin with infinities; before their blocks are lowered."""
    if not any(MARK in block.annotations for block in analysis.walk(function.body, SBlock)):
        return function

    def begun(block: SBlock) -> SBlock:
        if MARK not in block.annotations:
            return block
        body, init = block.body, block.init
        if init is not None:
            init = _from_infinity(init)
        elif isinstance(body, tirx.BufferStore) and isinstance(body.value, tirx.FloatImm):  # decomposed: by itself
            body = _from_infinity(body)
        return analysis.block_with(block, body=body, init=init)

    return function.with_body(tvm_ffi.structural_map(function.body, (SBlock, begun)))


def _from_infinity(store: tirx.BufferStore) -> tirx.BufferStore:
    """The same with an infinity of the sign of the constant that it stores."""
    value = store.value
    return tirx.BufferStore(
        store.buffer, tirx.const(math.copysign(math.inf, value.value), value.ty.dtype), store.indices
    )
