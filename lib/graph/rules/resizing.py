"""Images that are made larger or smaller, and then joined, as the heads of segmentation models have it."""

from collections.abc import Sequence
from functools import reduce

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import Rewriter, Rule, constant, rule, to_channels_first
from lib.graph.rules import movement

_TO_CHANNELS_FIRST = to_channels_first(4)
_LARGER, _MORE = 2, 2  # times the pixels that a resize makes; times the channels that it then has at most
IN_PLACE = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")  # where equal sizes change nothing


@rule("relax.image.resize2d")
def same_size(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A resize to the size that an image has."""
    shape = rewriter.shape(call.args[0])
    same = shape is not None and shape == rewriter.shape(call) and call.ty == call.args[0].ty
    return call.args[0] if same and str(call.attrs.coordinate_transformation_mode) in IN_PLACE else None


@rule("relax.image.resize2d")
def channels_stay_last(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A resize in NCHW of what is in NHWC, or of the tokens of a transformer, as one in NHWC: channels are vectors
    there, and the transposes after it cancel out."""
    if str(call.attrs.layout) != "NCHW":
        return None
    image = _channels_last(rewriter, call.args[0])
    if image is None:
        return None
    attrs = call.attrs
    resized = op.image.resize2d(
        image, call.args[1], [float(each) for each in attrs.roi], "NHWC", str(attrs.method),
        str(attrs.coordinate_transformation_mode), str(attrs.rounding_method), float(attrs.cubic_alpha),
        int(attrs.cubic_exclude), float(attrs.extrapolation_value), attrs.out_dtype,
    )  # fmt: skip
    return op.permute_dims(rewriter.emit(resized), _TO_CHANNELS_FIRST)


@rule("relax.concat")
def joined_channels_last(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A concatenation of images that all were NHWC before, in NHWC: what reads it is likely to want that."""
    parts = rewriter.fields(call.args[0]) or []
    is_moved = [rewriter.calls(part, "relax.permute_dims") is not None for part in parts]
    if len(parts) < 2 or call.attrs.axis is None or not any(is_moved):
        return None
    found = [_channels_last(rewriter, part) for part in parts]
    images = [each for each in found if each is not None]
    if len(images) < len(parts):
        return None
    joined = op.concat(images, _TO_CHANNELS_FIRST[int(call.attrs.axis)])
    return op.permute_dims(rewriter.emit(joined), _TO_CHANNELS_FIRST)


def _channels_last(rewriter: Rewriter, image: relax.Expr) -> relax.Expr | None:
    """What an image in NCHW is a transpose of, in NHWC; None if it is something else, or read by others too."""
    if not rewriter.read_once(image):
        return None
    if (moved := movement.channels_last(rewriter, image, 4)) is not None:
        return moved
    shaped, shape = rewriter.calls(image, "relax.reshape"), rewriter.shape(image)
    tokens = rewriter.calls(shaped.args[0], "relax.permute_dims") if shaped is not None else None
    if shaped is None or tokens is None or not rewriter.read_once(shaped.args[0]):
        return None
    if shape is None or len(shape) != 4:
        return None
    batch, channels, height, width = shape
    if movement.order_of(tokens) != [0, 2, 1] or rewriter.shape(tokens.args[0]) != (batch, height * width, channels):
        return None
    return rewriter.emit(op.reshape(tokens.args[0], (batch, height, width, channels)))


@rule("relax.nn.conv2d")
def products_before_resizes(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A 1x1 convolution of images that were enlarged, and maybe joined with others, as a sum of enlarged products: each
    pixel that a resize makes is a sum of others with the same weights for all channels, so the order does not matter,
    and there are fewer pixels before. Nor is the joined image written, which has the most channels of all.
    """
    weight, parts = _pointwise(rewriter, call), _joined(rewriter, call.args[0])
    if weight is None or not parts or not rewriter.read_once(call.args[0]):
        return None
    resizes = [_enlarging(rewriter, part, weight.shape[-1]) for part in parts]
    if all(resize is None for resize in resizes):
        return None
    ends = np.cumsum([(rewriter.shape(part) or (0,))[-1] for part in parts])
    weights = np.split(weight, ends[:-1], axis=2)

    def product(image: relax.Expr, factors: Sequence[np.ndarray]) -> relax.Expr:
        kernel = constant(np.concatenate(factors, axis=2))
        return rewriter.emit(relax.Call(call.op, [image, kernel], call.attrs, call.ty_args))

    terms, others = [], []
    for part, resize, own in zip(parts, resizes, weights, strict=True):
        if resize is None:
            others.append((part, own))
        else:
            args = [product(resize.args[0], [own]), resize.args[1]]
            terms.append(rewriter.emit(relax.Call(resize.op, args, resize.attrs, resize.ty_args)))
    if others:
        images, kept = zip(*others, strict=True)
        terms.append(product(rewriter.emit(op.concat(list(images), 3)) if len(images) > 1 else images[0], kept))
    return reduce(lambda total, term: op.add(rewriter.emit(total), term), terms)


def _joined(rewriter: Rewriter, image: relax.Expr) -> list[relax.Expr]:
    """The images whose channels one in NHWC has; empty if they were joined otherwise."""
    call = rewriter.calls(image, "relax.concat")
    if call is None:
        return [image]
    along_channels = call.attrs.axis is not None and int(call.attrs.axis) in (3, -1)
    return list(rewriter.fields(call.args[0]) or []) if along_channels else []


def _pointwise(rewriter: Rewriter, call: relax.Call) -> np.ndarray | None:
    """The weights (1, 1, I, O) of a convolution of floats that takes each pixel by itself, in NHWC."""
    attrs, weight = call.attrs, rewriter.value(call.args[1])
    if weight is None or (str(attrs.data_layout), str(attrs.kernel_layout)) != ("NHWC", "HWIO"):
        return None
    is_plain = all(int(n) == 1 for n in (*attrs.strides, attrs.groups)) and not any(int(n) for n in attrs.padding)
    is_float = weight.dtype == np.float32  # integers are rounded where they are resized
    return weight if is_plain and is_float and weight.shape[:2] == (1, 1) else None


def _enlarging(rewriter: Rewriter, image: relax.Expr, channels: int) -> relax.Call | None:
    """The resize that made an image, if it may as well come after a product with so many channels."""
    resize = rewriter.calls(image, "relax.image.resize2d")
    if resize is None or not rewriter.read_once(image) or str(resize.attrs.layout) != "NHWC":
        return None
    before, after = rewriter.shape(resize.args[0]), rewriter.shape(image)
    if not before or not after or resize.ty.dtype != resize.args[0].ty.dtype:
        return None
    if str(resize.attrs.coordinate_transformation_mode) not in IN_PLACE or channels > _MORE * after[-1]:
        return None
    return resize if after[1] * after[2] >= _LARGER * before[1] * before[2] else None


RULES: list[Rule] = [same_size, channels_stay_last, joined_channels_last, products_before_resizes]
