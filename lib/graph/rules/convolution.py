"""Batch norms, scales, shifts and paddings are folded into the convolution or the dense layer before or after them."""

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import CONTRACTIONS, CONVOLUTIONS, Rewriter, Rule, alike, constant, dtype, rule
from lib.tir import analysis

_IMAGES = (4, 5)  # ranks of images and volumes


@rule("relax.nn.batch_norm[0]")
def fold_batch_norm(rewriter: Rewriter, norm: relax.Call) -> relax.Expr | None:
    """A batch norm at inference as a scale and a shift of each channel."""
    values = rewriter.values(norm.args[1:])
    shape = rewriter.shape(norm.args[0])
    if values is None or shape is None or norm.attrs.training:
        return None
    gamma, beta, mean, variance = values
    scale = (gamma if norm.attrs.scale else 1) / np.sqrt(variance + float(norm.attrs.epsilon))
    shift = (beta if norm.attrs.center else 0) - mean * scale
    channels, kind = [1] * len(shape), dtype(norm.args[0])
    channels[int(norm.attrs.axis)] = -1
    scaled = rewriter.emit(op.multiply(norm.args[0], constant(scale.reshape(channels).astype(kind))))
    return op.add(scaled, constant(shift.reshape(channels).astype(kind)))


@rule("relax.add", "relax.multiply")
def equal_ranks(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A constant gets the rank of the image or volume it is added to; ConvertLayout knows no other."""
    value, shape = rewriter.value(call.args[1]), rewriter.shape(call.args[0])
    if value is None or shape is None or len(shape) not in _IMAGES or not 0 < value.ndim < len(shape):
        return None
    wider = value.reshape([1] * (len(shape) - value.ndim) + list(value.shape))
    return relax.Call(call.op, [call.args[0], constant(wider)], call.attrs, call.ty_args)


@rule("relax.multiply")
def scale_into_weights(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """conv(x, w) * s is conv(x, w * s), and likewise for a dense layer."""
    factor = rewriter.value(call.args[1])
    if factor is None or not rewriter.read_once(call.args[0]) or factor.dtype != np.float32:
        return None
    producer = rewriter.calls(call.args[0], *CONTRACTIONS)
    weight = None if producer is None else rewriter.value(producer.args[1])
    shape = rewriter.shape(call.args[0])
    if producer is None or weight is None or shape is None or weight.dtype != np.float32:
        return None
    in_weight, in_output = _output_axes(producer)
    if (producer.op.name == "relax.matmul" and weight.ndim != 2) or not _varies_along(factor, shape, in_output):
        return None
    along = [1] * weight.ndim
    along[in_weight] = factor.size
    scaled = constant(weight * factor.reshape(along))
    return relax.Call(producer.op, [producer.args[0], scaled], producer.attrs, producer.ty_args)


def _output_axes(producer: relax.Call) -> tuple[int, int]:
    """The axis of output channels in the weights, and in the result."""
    if producer.op.name == "relax.matmul":
        return -1, -1
    layouts = str(producer.attrs.kernel_layout), str(producer.attrs.out_layout or producer.attrs.data_layout)
    return layouts[0].index("O"), layouts[1].index("C")


def _varies_along(value: np.ndarray, shape: tuple[int, ...], axis: int) -> bool:
    """Whether a constant that is broadcast to a shape is a scalar, or differs along one axis alone."""
    if value.size == 1:
        return value.ndim <= len(shape)
    padded = (1,) * (len(shape) - value.ndim) + value.shape
    return len(padded) == len(shape) and padded[axis] == value.size == shape[axis]


@rule("relax.multiply")
def scale_before_shift(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """(x * a + b) * s is x * (a * s) + b * s, so that the scale comes to a convolution."""
    factor = rewriter.value(call.args[1])
    producer = rewriter.calls(call.args[0], "relax.add", "relax.multiply")
    inner = None if producer is None else rewriter.value(producer.args[1])
    if factor is None or producer is None or inner is None or not rewriter.read_once(call.args[0]):
        return None
    if rewriter.shape(producer.args[0]) != rewriter.shape(call) or inner.dtype != factor.dtype:
        return None
    if producer.op.name == "relax.multiply":
        return op.multiply(producer.args[0], constant(inner * factor))
    scaled_before = rewriter.calls(producer.args[0], "relax.multiply")
    if rewriter.calls(producer.args[0], *CONTRACTIONS) is None and (
        scaled_before is None or rewriter.value(scaled_before.args[1]) is None
    ):
        return None  # x + b, scaled, is as good as x scaled, + b
    scaled = rewriter.emit(op.multiply(producer.args[0], constant(factor)))
    return op.add(scaled, constant(inner * factor))


@rule("relax.add")
def join_shifts(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """(x + a) + b is x + (a + b)."""
    term = rewriter.value(call.args[1])
    producer = rewriter.calls(call.args[0], "relax.add")
    inner = None if producer is None else rewriter.value(producer.args[1])
    if term is None or producer is None or inner is None or not rewriter.read_once(call.args[0]):
        return None
    if rewriter.shape(producer.args[0]) != rewriter.shape(call) or inner.dtype != term.dtype:
        return None
    return op.add(producer.args[0], constant(inner + term))


@rule("relax.call_tir")
def plain_pad(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """The importer writes ONNX's Pad as raw TIR: out[i] = if_then_else(inside, in[i - before], value)."""
    arguments = call.args[1].fields
    if call.args[0].name_hint.rstrip("0123456789") != "pad" or len(arguments) != 1:
        return None
    before, value = analysis.padding(rewriter.builder_.get()[call.args[0]])
    source, target = rewriter.shape(arguments[0]), rewriter.shape(call)
    if before is None or source is None or target is None:
        return None
    width = [(b, t - s - b) for b, s, t in zip(before, source, target, strict=True)]
    if not any(any(pair) for pair in width):
        return arguments[0]
    return op.nn.pad(arguments[0], [w for pair in width for w in pair], "constant", value)


@rule(*CONVOLUTIONS)
def pad_in_convolution(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Zeros put around an image before a convolution are the convolution's own padding."""
    pad = rewriter.calls(call.args[0], "relax.nn.pad")
    if pad is None or str(pad.attrs.pad_mode) != "constant" or float(pad.attrs.pad_value) != 0:
        return None
    width = [int(w) for w in pad.attrs.pad_width]
    layout = str(call.attrs.data_layout)
    around = {axis: width[2 * n : 2 * n + 2] for n, axis in enumerate(layout)}
    if len(width) != 2 * len(layout) or any(around["N"]) or any(around["C"]) or min(width) < 0:
        return None
    more = [around[axis][side] for side in (0, 1) for axis in layout if axis not in "NC"]  # top, left, bottom, right
    padding = [int(p) + w for p, w in zip(call.attrs.padding, more, strict=True)]
    return alike(call, pad.args[0], call.args[1], dtype(call), padding)


RULES: list[Rule] = [
    fold_batch_norm, equal_ranks, scale_into_weights, scale_before_shift, join_shifts,
    plain_pad, pad_in_convolution,
]  # fmt: skip
