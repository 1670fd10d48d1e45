"""Images that are made larger or smaller, and then joined, as the heads of segmentation models have it."""

from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import Rewriter, Rule, rule

_TO_CHANNELS_FIRST = [0, 3, 1, 2]
_IN_PLACE = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")  # where equal sizes change nothing


@rule("relax.image.resize2d")
def same_size(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A resize to the size that an image has."""
    shape = rewriter.shape(call.args[0])
    same = shape is not None and shape == rewriter.shape(call) and call.ty == call.args[0].ty
    return call.args[0] if same and str(call.attrs.coordinate_transformation_mode) in _IN_PLACE else None


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
    moved = rewriter.calls(image, "relax.permute_dims")
    if moved is not None:
        return moved.args[0] if _order(moved) == _TO_CHANNELS_FIRST else None
    shaped, shape = rewriter.calls(image, "relax.reshape"), rewriter.shape(image)
    tokens = rewriter.calls(shaped.args[0], "relax.permute_dims") if shaped is not None else None
    if shaped is None or tokens is None or not rewriter.read_once(shaped.args[0]):
        return None
    if shape is None or len(shape) != 4:
        return None
    batch, channels, height, width = shape
    if _order(tokens) != [0, 2, 1] or rewriter.shape(tokens.args[0]) != (batch, height * width, channels):
        return None
    return rewriter.emit(op.reshape(tokens.args[0], (batch, height, width, channels)))


def _order(call: relax.Call) -> list[int] | None:
    return None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]


RULES: list[Rule] = [same_size, channels_stay_last, joined_channels_last]
