"""Poolings that reduce a whole image."""

from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import Rewriter, Rule, rule


@rule("relax.nn.avg_pool1d", "relax.nn.avg_pool2d", "relax.nn.avg_pool3d",
      "relax.nn.max_pool1d", "relax.nn.max_pool2d", "relax.nn.max_pool3d")  # fmt: skip
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


RULES: list[Rule] = [window_over_everything]
