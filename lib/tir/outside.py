"""Lines of a window where a whole tile sees nothing but padding are left out: zeros times weights, which change no sum.

Of a 3x3 convolution with a dilation of 12 on 16x16 pixels, as DeepLab has it, half of the lines of the windows lie
outside of the image; of a 27x27 one on 14x14, as RepLKNet has it, as well. Spaces mark the loop over such lines where
the image is padded by a block of its own, and each iteration then asks once where its line is. So it is with columns.
"""

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer

from lib.tir import analysis

MARK = "skips_lines_outside"  # annotation of a loop; see `mark`
_LEAST_SHARE = 1 / 8  # of the lines of all windows


def mark(pad: SBlock, block: SBlock, position: int) -> str | None:
    """The annotation of the loop over an axis of a reduction that reads what another block pads with zeros; None if
    few of its iterations, or none, read zeros alone, or it is not along an axis that is padded.

    Args:
        position: Of the axis among those of `block`.
    """
    before, filled = analysis.padding_of(pad)
    padded, var, extents = analysis.stored(pad).buffer, block.iter_vars[position].var, analysis.extents(block)
    loads = [load for load in analysis.loaded(analysis.stored(block)) if load.source.same_as(padded)]
    if before is None or filled or len(loads) != 1:
        return None
    [source] = analysis.loaded(analysis.stored(pad))
    for axis, index in enumerate(loads[0].indices):
        used = analysis.variables([index])
        if var not in used or len(used) > 2:
            continue
        first, last = before[axis], before[axis] + int(source.source.shape[axis])
        lines = _lines(index, var, [each for each in used if not each.same_as(var)], extents)
        outside = sum(not first <= line < last for line in lines)
        return f"{padded.name}:{axis}:{first}:{last}" if outside >= _LEAST_SHARE * len(lines) else None
    return None


def _lines(index: Any, var: Any, others: Sequence[Any], extents: dict[Any, int]) -> list[int]:
    """What a linear index is for all values of a variable, and of another one if there is one."""
    used = [var, *others]

    def value(*at: int) -> int:
        places = {each: tirx.IntImm(each.ty.dtype, n) for each, n in zip(used, at, strict=True)}
        return int(Analyzer().simplify(analysis.replaced(index, places)))

    zero = [0] * len(used)
    begin = value(*zero)
    steps = [value(*(int(n == k) for k in range(len(used)))) - begin for n in range(len(used))]
    lines = [begin]
    for each, step in zip(used, steps, strict=True):
        lines = [line + step * n for line in lines for n in range(extents[each])]
    return lines


def skip(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Have marked loops leave out lines outside; programs without marks stay as they are."""
    if not analysis.has_mark(function, MARK):
        return function

    def skipping(loop: tirx.For) -> tirx.For:
        if MARK not in loop.annotations:
            return loop
        name, *numbers = str(loop.annotations[MARK]).split(":")
        axis, first, last = map(int, numbers)
        ends = _ends(loop.body, name, axis)
        kept = {key: value for key, value in loop.annotations.items() if key != MARK}
        body = loop.body
        if ends is not None:
            body = tirx.IfThenElse(tirx.all(ends[1] >= first, ends[0] < last), body, None)
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=kept)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, skipping)))


def _ends(body: tirx.Stmt, name: str, axis: int) -> tuple[Any, Any] | None:
    """The first and the last line, along an axis, of what is read of a tensor; windows slide forward alone."""
    inner = analysis.walk(body, tirx.For)
    for realize in analysis.walk(body, SBlockRealize):
        places = dict(zip([each.var for each in realize.block.iter_vars], realize.iter_values, strict=True))
        for load in analysis.walk(realize.block.body, tvm.ir.TensorLoad):
            if str(load.source.name) == name:
                line = analysis.replaced(load.indices[axis], places)
                first = analysis.replaced(line, {loop.loop_var: loop.min for loop in inner})
                last = analysis.replaced(line, {loop.loop_var: loop.min + loop.extent - 1 for loop in inner})
                return Analyzer().simplify(first), Analyzer().simplify(last)
    return None
