"""Weights of bytes that are small enough for sums of 16 bits: those of files with seven bits.

CPUs with AVX2 alone multiply unsigned bytes by signed ones two at a time, and add both products in 16 bits (`INT7` of
`lib.machine.dots`): 255 times the sum of two weights must not leave these. Of weights quantised to seven bits, as files
for such CPUs are (`reduce_range` of ONNX Runtime's tools, which those of Transformers.js have), none does. Where others
take the instruction for all weights, sums of two that do not fit become the largest number of 16 bits.

What a function computes does not say how large its weights are. So its reduction is marked, by who knows them, and what
it is run with while tuning is as small.
"""

import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock

from lib.machine.dots import INT7
from lib.tir import analysis

MARK = "small_weights"  # annotation of the block of a reduction
LARGEST = 64  # of what is taken for such weights while tuning: two of the most that sums allow
_MOST_DATA, _NEIGHBOURS = 255, 2
_LARGEST_SUM = (2**15 - 1) // _MOST_DATA  # of neighbouring weights


def are_small(weights: np.ndarray) -> bool:
    """Whether no sum of two products of neighbours along the input channels, the last axis but one, leaves 16 bits,
    whatever the data; missing channels are zeros."""
    rows = np.moveaxis(weights, -2, 0).astype(np.int32)
    whole = np.pad(rows, [(0, -len(rows) % _NEIGHBOURS), *[(0, 0)] * (rows.ndim - 1)])
    pairs = whole.reshape(-1, _NEIGHBOURS, *rows.shape[1:])
    most, least = np.maximum(pairs, 0).sum(1).max(initial=0), np.minimum(pairs, 0).sum(1).min(initial=0)
    return bool(most <= _LARGEST_SUM and least >= -_LARGEST_SUM)


def marked(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with its reductions of bytes marked, for a caller that knows their weights."""

    def with_mark(block: SBlock) -> SBlock:
        is_taken = block.init is not None and weight_of(block) is not None
        return analysis.block_with(block, annotations={**block.annotations, MARK: 1}) if is_taken else block

    return function.with_body(tvm_ffi.structural_map(function.body, (SBlock, with_mark)))


def weight_of(block: SBlock) -> object | None:
    """The tensor of the weights of a reduction that sums products of unsigned bytes and weights; None of others."""
    operands = analysis.weight_and_data(block)
    if operands is None:
        return None
    weight, data = operands
    is_of_bytes = (str(data.source.dtype), str(weight.source.dtype)) == (INT7.data, INT7.weights)
    return weight.source if is_of_bytes else None


def positions(function: tirx.PrimFunc) -> set[int]:
    """The parameters of a function that are small weights."""
    blocks = [block for block in analysis.walk(function.body, SBlock) if MARK in block.annotations]
    weights = [weight for block in blocks if (weight := weight_of(block)) is not None]
    return {n for n, param in enumerate(function.params) if any(param.same_as(weight) for weight in weights)}
