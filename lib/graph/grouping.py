"""Groups of few channels merged into larger ones, with weights of zero for what an output reads of other groups.

ResNeXt's first convolutions have 32 groups of four channels. An instruction for matrices (`lib.machine.dots`) takes
sixteen columns by 32 pairs at once, in the time of four by two: four such groups are as fast as one. To an output zeros
times other channels are added, which changes nothing as long as these are finite.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from tvm import relax

from lib.graph.reweight import Replacement, shape_of
from lib.graph.rewrite import alike, dtype, groups_of, is_call, is_channels_last
from lib.machine.dots import Matrix


def replacement(matrix: Matrix, given: str, call: relax.Call) -> Replacement | None:
    """Of a convolution in NHWC whose groups have fewer columns than an instruction multiplies at once, all of them with
    no more input channels than that.

    Args:
        given: The element type of its weights: that of the instruction, or what is to be rounded to it.
    """
    if not is_call(call, "relax.nn.conv2d") or (dtype(call.args[1]), dtype(call)) != (given, matrix.dot.sums):
        return None
    weight, groups = shape_of(call.args[1]), groups_of(call)
    if groups == 1 or not is_channels_last(call) or not weight:
        return None
    channels, columns = weight[-2], weight[-1] // groups
    merged, left = divmod(matrix.LANES, columns)
    if channels == 1 or merged < 2 or left or groups % merged or merged * channels > matrix.STEPS * matrix.dot.depth:
        return None
    return Replacement(
        kind=("merged groups", groups, merged), value=partial(_merged, groups, merged), dtype=given,
        shape=(*weight[:-2], merged * channels, weight[-1]), emit=partial(_emit, groups // merged),
    )  # fmt: skip


def _merged(groups: int, merged: int, weight: np.ndarray) -> np.ndarray:
    """A weight (..., I, groups * O) as (..., merged * I, groups * O), with zeros between different groups."""
    *window, channels, columns = weight.shape
    apart = weight.reshape(*window, channels, groups // merged, merged, -1)
    made = np.zeros((*window, merged, *apart.shape[len(window) :]), weight.dtype)
    for n in range(merged):
        made[..., n, :, :, n, :] = apart[..., n, :]
    return made.reshape(*window, merged * channels, columns)


def _emit(groups: int, _builder: relax.BlockBuilder, call: relax.Call, args: Sequence[relax.Expr]) -> relax.Expr:
    data, weight = args
    return alike(call, data, weight, dtype(call), groups=groups)
