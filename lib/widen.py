"""Output channels that fill vectors: 1000 become 1008, of which the last eight are computed for nothing.

A tile of registers is made of whole vectors (`lib.spaces.tiling`). With 1,000 channels it would be made of vectors half
as wide, since 16 does not divide them, and run at half the speed. So the weights get channels of zeros, and what they
give is cut off where the results leave the registers.
"""

from functools import partial

import numpy as np
from tvm import relax, te, tirx
from tvm.relax import op

from lib.reweight import Choose, Replacement, shape_of
from lib.rewrite import dtype, is_call

FUNCTION = "cut"  # how the functions are named that drop the channels again
_MIN_ROWS = 8  # with fewer, reading the weights takes the time, and more of them only more


def replacement(lanes: int) -> Choose:
    """What widens convolutions and products with weights to multiples of so many channels, where that is faster."""
    return partial(_replacement, lanes)


def _replacement(lanes: int, call: relax.Call) -> Replacement | None:
    if not is_call(call, "relax.nn.conv2d", "relax.matmul") or dtype(call) != "float32":
        return None
    weight, out = shape_of(call.args[1]), shape_of(call)
    if not weight or not out or not _has_columns_last(call, weight):
        return None
    groups = _groups(call)
    columns = weight[-1] // groups
    wider = -(-columns // lanes) * lanes
    if int(np.prod(out[:-1])) < _MIN_ROWS or not _pays(columns, wider, lanes):
        return None
    if groups > 1 and columns < lanes // 2:  # depthwise, or nearly: most of what was computed would be for nothing
        return None
    return Replacement(
        kind=(FUNCTION, groups, wider),
        value=partial(_padded, groups, wider - columns),
        shape=(*weight[:-1], groups * wider),
        emit=partial(_emit, columns),
    )


def _groups(call: relax.Call) -> int:
    """Into how many groups the columns fall, each with channels of its own."""
    return 1 if is_call(call, "relax.matmul") else int(call.attrs.groups)


def _padded(groups: int, more: int, weight: np.ndarray) -> np.ndarray:
    """A weight with so many columns of zeros after those of each group."""
    apart = weight.reshape(*weight.shape[:-1], groups, -1)
    return np.pad(apart, [(0, 0)] * (apart.ndim - 1) + [(0, more)]).reshape(*weight.shape[:-1], -1)


def _has_columns_last(call: relax.Call, weight: tuple[int, ...]) -> bool:
    """Whether the last axis of the weight is the last one of the result."""
    if is_call(call, "relax.matmul"):
        return len(weight) == 2
    attrs = call.attrs
    layouts = [str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout) or "NHWC"]
    return layouts == ["NHWC", "HWIO", "NHWC"]


def _pays(columns: int, wider: int, lanes: int) -> bool:
    """Whether the share of vectors that is filled is larger than the width of vectors that would be filled."""
    narrow = next(n for n in (lanes, lanes // 2, lanes // 4, 1) if columns % n == 0)
    return columns / wider > narrow / lanes


def _emit(columns: int, builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    if is_call(call, "relax.matmul"):
        wide = op.matmul(*call.args, out_dtype=attrs.out_dtype)
    else:
        wide = op.nn.conv2d(
            *call.args, strides=[int(s) for s in attrs.strides], padding=[int(p) for p in attrs.padding],
            dilation=[int(d) for d in attrs.dilation], groups=int(attrs.groups), data_layout="NHWC",
            kernel_layout="HWIO", out_dtype=dtype(call),
        )  # fmt: skip
    cut = partial(_cut, _groups(call), columns)
    return builder.call_te(cut, builder.emit(wide), primfunc_name_hint=FUNCTION)


def _cut(groups: int, columns: int, wide: te.Tensor) -> te.Tensor:
    shape, wider = [*wide.shape[:-1], tirx.IntImm("int64", groups * columns)], int(wide.shape[-1]) // groups

    def place(column: tirx.Var) -> tirx.Expr:
        return column if groups == 1 else column // columns * wider + column % columns

    return te.compute(shape, lambda *index: wide(*index[:-1], place(index[-1])), name=FUNCTION)
