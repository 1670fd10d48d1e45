"""Weights of bytes that are small enough for sums of 16 bits: those of files with seven bits.

CPUs with AVX2 alone, or with AVX-512 that does not add products of bytes itself, multiply unsigned bytes by signed ones
two at a time, and add both products in 16 bits (`INT7` of `lib.machine.dots`): 255 times the sum of two weights must
not leave these. Of weights quantised to seven bits, as files for such CPUs are (`reduce_range` of ONNX Runtime's tools,
which those of Transformers.js have), none does. Where others take the instruction for all weights, sums of two that do
not fit become the largest number of 16 bits. Of most weights with one scale for a tensor, also four have such sums.
Then those of two words are added before they are widened, which saves two instructions of six.

ARMs without dot products multiply signed bytes, eight in an instruction, and add neighbours in 16 bits (`ARM_SMALL`).
There the sums of all weights fit, but for two neighbours that are both -128.

What a function computes does not say how large its weights are. So its reduction is marked, by who knows them, and what
it is run with while tuning is as small.
"""

import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock

from lib.machine.dots import FOR_SMALL, INT7, Dot
from lib.tir import analysis

MARK = "small_weights"  # annotation of the block of a reduction: how many words are added together
_OF_WORD, _PAIR = 4, 2
# Of two weights or four: of either sign by themselves where data are unsigned, of all magnitudes where they are signed.
_LARGEST_SUM = {"uint8": (2**15 - 1) // 255, "int8": (2**15 - 1) // 128}


def words_together(weights: np.ndarray, dot: Dot = INT7) -> int:
    """Of how many words of four input channels, the last axis but one, products may be added in 16 bits, two by two:
    two, one or none, whatever the data.

    Of one word these are the products of the first and second channel, and of the third and fourth; of two words also
    those with the products in the same places of the next word. Missing channels are zeros.

    Args:
        dot: One of `lib.machine.dots.FOR_SMALL`.
    """
    rows = np.moveaxis(weights, -2, 0).astype(np.int16)
    whole = np.pad(rows, [(0, -len(rows) % (dot.words * _OF_WORD)), *[(0, 0)] * (rows.ndim - 1)])
    pairs = whole.reshape(-1, dot.words, _OF_WORD // _PAIR, _PAIR, *rows.shape[1:])
    added = (np.abs(pairs),) if dot.data == "int8" else (np.maximum(pairs, 0), np.maximum(-pairs, 0))
    sums, most = [each.sum(3, dtype=np.int16) for each in added], _LARGEST_SUM[dot.data]
    if not rows.size or max(each.sum(1, dtype=np.int16).max() for each in sums) <= most:
        return dot.words
    return int(max(each.max() for each in sums) <= most)


def largest(words: int, dot: Dot = INT7) -> int:
    """Of what is taken for such weights while tuning: sums of as many as are added are the largest that fit."""
    return _LARGEST_SUM[dot.data] // (_PAIR * words)


def marked(function: tirx.PrimFunc, words: int) -> tirx.PrimFunc:
    """A function with its reductions of bytes marked, for a caller that knows their weights: see `words_together`."""

    def with_mark(block: SBlock) -> SBlock:
        is_taken = block.init is not None and _weight_and_dot(block) is not None
        return analysis.block_with(block, annotations={**block.annotations, MARK: words}) if is_taken else block

    return function.with_body(tvm_ffi.structural_map(function.body, (SBlock, with_mark)))


def _weight_and_dot(block: SBlock) -> tuple[object, Dot] | None:
    """The tensor of the weights of a reduction that sums products of bytes and weights, and the instruction for such;
    None of others."""
    operands = analysis.weight_and_data(block)
    if operands is None:
        return None
    weight, data = operands
    types = str(data.source.dtype), str(weight.source.dtype)
    dot = next((dot for dot in FOR_SMALL if (dot.data, dot.weights) == types), None)
    return None if dot is None else (weight.source, dot)


def bounds(function: tirx.PrimFunc) -> dict[int, int]:
    """The parameters of a function that are small weights, and the largest magnitude of them while tuning."""
    found = {}
    for block in analysis.walk(function.body, SBlock):
        weight_and_dot = _weight_and_dot(block) if MARK in block.annotations else None
        if weight_and_dot is None:
            continue
        weight, dot = weight_and_dot
        for n, param in enumerate(function.params):
            if param.same_as(weight):
                found[n] = largest(int(block.annotations[MARK]), dot)
    return found
