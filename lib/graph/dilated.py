"""A convolution with holes between its taps, as one without them: of each dth line and pixel of its images.

With dilation d an output sees inputs that are d lines and pixels apart, as do all outputs that are a multiple of d
lines and pixels away from it. So d x d smaller images, each of every dth line and pixel, are convolved by themselves,
in the way that is fastest (TensorFlow: `with_space_to_batch`).
"""

from collections.abc import Sequence

from tvm import relax
from tvm.relax import op

from lib.graph.reweight import shape_of


def extents(lines: int, pixels: int, dilation: int) -> tuple[int, int]:
    """Lines and pixels of the smaller images of an image of so many, where they are most."""
    return -(-lines // dilation), -(-pixels // dilation)


def apart(
    builder: relax.BlockBuilder, images: relax.Expr, padding: Sequence[int], dilation: int, lines: int, pixels: int
) -> relax.Expr:  # fmt: skip
    """Images (N, H, W, C), with zeros around them, as d x d times as many smaller ones.

    Args:
        padding: Top, left, bottom and right; what is beyond what the smaller ones need is cut by `together`.
        lines: Of each smaller image; `pixels`: of each of its lines.
    """
    n, height, width, channels = shape_of(images)
    top, left, *_ = padding
    below, right = lines * dilation - height - top, pixels * dilation - width - left
    if any((top, left, below, right)):
        images = builder.emit(op.nn.pad(images, [0, 0, top, below, left, right, 0, 0]))
    split = builder.emit(op.reshape(images, (n, lines, dilation, pixels, dilation, channels)))
    by_place = builder.emit(op.permute_dims(split, (0, 2, 4, 1, 3, 5)))
    return builder.emit(op.reshape(by_place, (n * dilation**2, lines, pixels, channels)))


def together(builder: relax.BlockBuilder, images: relax.Expr, dilation: int, shape: Sequence[int]) -> relax.Expr:
    """What was computed of the smaller images, as those (N, H, W, C) that they are parts of."""
    n, height, width, channels = shape
    _, lines, pixels, _ = shape_of(images)
    split = builder.emit(op.reshape(images, (n, dilation, dilation, lines, pixels, channels)))
    by_line = builder.emit(op.permute_dims(split, (0, 3, 1, 4, 2, 5)))
    whole = builder.emit(op.reshape(by_line, (n, lines * dilation, pixels * dilation, channels)))
    if (lines * dilation, pixels * dilation) == (height, width):
        return whole
    return builder.emit(op.strided_slice(whole, [1, 2], [0, 0], [height, width]))
