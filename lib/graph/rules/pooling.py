"""Poolings that reduce a whole image, and those of an image that was padded for them."""

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import Rewriter, Rule, dtype, rule

_LARGEST = ("relax.nn.max_pool1d", "relax.nn.max_pool2d", "relax.nn.max_pool3d")
_MEANS = ("relax.nn.avg_pool1d", "relax.nn.avg_pool2d", "relax.nn.avg_pool3d")


@rule(*_LARGEST, *_MEANS)
def window_over_everything(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """One window that covers its input is a mean or a maximum over it.

    Exporters write windows that are far larger than the input (EfficientNet: 1,280 x 1,280 over 7 x 7, in ceil mode).
    TVM pads the input to the window's size: 8.6 GB.
    """
    attrs = call.attrs
    shape, pooled = rewriter.shape(call.args[0]), rewriter.shape(call)
    if shape is None or pooled is None:
        return None
    spatial = [axis for axis, letter in enumerate(str(attrs.layout)) if letter in "DHW"]
    windows = [int(extent) for extent in attrs.pool_size]
    before = [int(pad) for pad in attrs.padding][: len(windows)]
    covered = all(
        pooled[axis] == 1 and window - pad >= shape[axis]
        for axis, window, pad in zip(spatial, windows, before, strict=True)
    )
    if not covered or any(int(dilation) != 1 for dilation in attrs.dilation):
        return None
    if "max" in call.op.name:
        return op.max(call.args[0], spatial, keepdims=True)
    exact = not any(before) and windows == [shape[axis] for axis in spatial]
    return op.mean(call.args[0], spatial, keepdims=True) if exact or not attrs.count_include_pad else None


@rule(*_LARGEST, *_MEANS)
def padded_by_itself(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A pooling of an image with elements around it that it would add as well: models that came from TensorFlow pad
    apart, and more behind than before. What makes the image would end in the padding otherwise.
    """
    pad, attrs, shape = rewriter.calls(call.args[0], "relax.nn.pad"), call.attrs, rewriter.shape(call)
    if pad is None or shape is None or str(pad.attrs.pad_mode) != "constant" or not _adds_such(call, pad):
        return None
    spatial = [axis for axis, letter in enumerate(str(attrs.layout)) if letter in "DHW"]
    widths = np.reshape([int(width) for width in pad.attrs.pad_width], (-1, 2))
    if any(np.any(both) for axis, both in enumerate(widths) if axis not in spatial):
        return None
    own = np.reshape([int(width) for width in attrs.padding], (2, -1))  # before each axis, behind each
    pool = getattr(op.nn, call.op.name.rpartition(".")[2])
    made = rewriter.emit(
        pool(
            pad.args[0], [int(n) for n in attrs.pool_size], [int(n) for n in attrs.strides],
            (own + widths[spatial].T).ravel().tolist(), [int(n) for n in attrs.dilation], bool(attrs.ceil_mode),
            call.op.name in _MEANS, str(attrs.layout), str(attrs.out_layout),
        )
    )  # fmt: skip
    return made if rewriter.shape(made) == shape else None


def _adds_such(pool: relax.Call, pad: relax.Call) -> bool:
    """Whether a padding adds what a pooling's own padding stands for: nothing that is larger, or zeros that count."""
    value, attrs = float(pad.attrs.pad_value), pool.attrs
    if pool.op.name in _LARGEST:
        return "float" in dtype(pool) and value <= float(np.finfo(dtype(pool)).min)
    has_own = any(int(width) for width in attrs.padding)
    return value == 0 and not attrs.ceil_mode and (bool(attrs.count_include_pad) or not has_own)


RULES: list[Rule] = [window_over_everything, padded_by_itself]
