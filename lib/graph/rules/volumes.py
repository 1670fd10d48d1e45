"""Convolutions that see less than their kernels have: of volumes one image at a time, of small images their padding."""

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import CONVOLUTIONS, Rewriter, Rule, alike, constant, dtype, is_channels_last, rule


@rule(*CONVOLUTIONS)
def without_taps_of_padding(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A kernel without the taps that read nothing but padding: the first and the last of three along an axis of one
    element, as at the end of networks for video, or those of a dilation as large as the image, as in DeepLab."""
    weight, shape, out = rewriter.value(call.args[1]), rewriter.shape(call.args[0]), rewriter.shape(call)
    if weight is None or shape is None or out is None:
        return None
    attrs, layout, kernel_layout = call.attrs, str(call.attrs.data_layout), str(call.attrs.kernel_layout)
    axes = [axis for axis in layout if axis not in "NC"]
    before, after = [int(p) for p in attrs.padding][: len(axes)], [int(p) for p in attrs.padding][len(axes) :]
    kept: list[slice] = [slice(None)] * weight.ndim
    for n, axis in enumerate(axes):
        step, distance = int(attrs.strides[n]), int(attrs.dilation[n])
        extent, results = shape[layout.index(axis)], out[str(attrs.out_layout or layout).index(axis)]
        taps = weight.shape[kernel_layout.index(axis)]
        starts = np.arange(results) * step - before[n]
        read = [
            tap for tap in range(taps) if np.any((starts + tap * distance >= 0) & (starts + tap * distance < extent))
        ]
        if not read:
            return None
        first, last = before[n] - read[0] * distance, after[n] - (taps - 1 - read[-1]) * distance
        if min(first, last) >= 0:
            before[n], after[n] = first, last
            kept[kernel_layout.index(axis)] = slice(read[0], read[-1] + 1)
    shorter = weight[tuple(kept)]
    if shorter.shape == weight.shape:
        return None
    return alike(call, call.args[0], constant(shorter), dtype(call), [*before, *after])


@rule("relax.nn.conv3d")
def image_by_image(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A kernel of one image in depth, on a batch of all images; one of one pixel in height and width, on images whose
    lines are the volume's images. So they have what images have: Winograd's programs, added channels, base models."""
    shape, kernel, out = rewriter.shape(call.args[0]), rewriter.shape(call.args[1]), rewriter.shape(call)
    if shape is None or kernel is None or out is None or not is_channels_last(call):
        return None
    (n, depth, height, width, channels), attrs = shape, call.attrs
    strides, dilation = [int(s) for s in attrs.strides], [int(d) for d in attrs.dilation]
    front, top, left, back, bottom, right = (int(p) for p in attrs.padding)
    if kernel[0] == strides[0] == 1 and not front + back:
        image, window, around, axes = (n * depth, height, width), kernel[1:3], (top, left, bottom, right), (1, 2)
    elif kernel[1:3] == (1, 1) and strides[1:] == [1, 1] and not top + left + bottom + right:
        image, window, around, axes = (n, depth, height * width), (kernel[0], 1), (front, 0, back, 0), (0, 1)
    else:
        return None
    made = op.nn.conv2d(
        rewriter.emit(op.reshape(call.args[0], [*image, channels])),
        rewriter.emit(op.reshape(call.args[1], [*window, *kernel[3:]])),
        strides=[strides[axis] for axis in axes], padding=around, dilation=[dilation[axis] for axis in axes],
        groups=int(attrs.groups), data_layout="NHWC", kernel_layout="HWIO", out_dtype=dtype(call),
    )  # fmt: skip
    return op.reshape(rewriter.emit(made), out)


RULES: list[Rule] = [without_taps_of_padding, image_by_image]
