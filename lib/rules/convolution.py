"""Batch norms, scales, shifts and paddings move into the convolution or the dense layer before them."""

import numpy as np
from tvm import relax
from tvm.relax import op

from lib import structure
from lib.rewrite import Graph, Rule, constant, dtype, rule


@rule("relax.nn.batch_norm[0]")
def fold_batch_norm(graph: Graph, norm: relax.Call) -> relax.Expr | None:
    """A batch norm at inference is a scale and a shift of each channel."""
    values = graph.values(norm.args[1:])
    shape = graph.shape(norm.args[0])
    if values is None or shape is None or norm.attrs.training:
        return None
    gamma, beta, mean, variance = values
    scale = (gamma if norm.attrs.scale else 1) / np.sqrt(variance + float(norm.attrs.epsilon))
    shift = (beta if norm.attrs.center else 0) - mean * scale
    channels, kind = [1] * len(shape), dtype(norm.args[0])
    channels[int(norm.attrs.axis)] = -1
    scaled = graph.emit(op.multiply(norm.args[0], constant(scale.reshape(channels).astype(kind))))
    return op.add(scaled, constant(shift.reshape(channels).astype(kind)))


@rule("relax.add", "relax.multiply")
def equal_ranks(graph: Graph, call: relax.Call) -> relax.Expr | None:
    """A constant gets the rank of the image it is added to; ConvertLayout knows no other."""
    value, shape = graph.value(call.args[1]), graph.shape(call.args[0])
    if value is None or shape is None or len(shape) != 4 or not 0 < value.ndim < 4:
        return None
    wider = value.reshape([1] * (4 - value.ndim) + list(value.shape))
    return relax.Call(call.op, [call.args[0], constant(wider)], call.attrs, call.ty_args)


@rule("relax.multiply")
def scale_into_weights(graph: Graph, call: relax.Call) -> relax.Expr | None:
    """conv(x, w) * s is conv(x, w * s), and likewise for a dense layer."""
    factor = graph.value(call.args[1])
    if factor is None or not graph.read_once(call.args[0]) or factor.dtype != np.float32:
        return None
    made_by = graph.calls(call.args[0], "relax.nn.conv2d", "relax.matmul")
    weight = None if made_by is None else graph.value(made_by.args[1])
    shape = graph.shape(call.args[0])
    if made_by is None or weight is None or shape is None or weight.dtype != np.float32:
        return None
    in_weight, in_output = _output_axes(made_by)
    if (made_by.op.name == "relax.matmul" and weight.ndim != 2) or not _varies_along(factor, shape, in_output):
        return None
    along = [1] * weight.ndim
    along[in_weight] = factor.size
    scaled = constant(weight * factor.reshape(along))
    return relax.Call(made_by.op, [made_by.args[0], scaled], made_by.attrs, made_by.ty_args)


def _output_axes(made_by: relax.Call) -> tuple[int, int]:
    """The axis of output channels in the weights, and in the result."""
    if made_by.op.name == "relax.matmul":
        return -1, -1
    layouts = str(made_by.attrs.kernel_layout), str(made_by.attrs.out_layout or made_by.attrs.data_layout)
    return layouts[0].index("O"), layouts[1].index("C")


def _varies_along(value: np.ndarray, shape: tuple[int, ...], axis: int) -> bool:
    """Whether a constant that is broadcast to a shape is a scalar, or differs along one axis alone."""
    if value.size == 1:
        return value.ndim <= len(shape)
    padded = (1,) * (len(shape) - value.ndim) + value.shape
    return len(padded) == len(shape) and padded[axis] == value.size == shape[axis]


@rule("relax.multiply")
def scale_before_shift(graph: Graph, call: relax.Call) -> relax.Expr | None:
    """(x * a + b) * s is x * (a * s) + b * s, so that the scale comes to a convolution."""
    factor = graph.value(call.args[1])
    made_by = graph.calls(call.args[0], "relax.add", "relax.multiply")
    inner = None if made_by is None else graph.value(made_by.args[1])
    if factor is None or made_by is None or inner is None or not graph.read_once(call.args[0]):
        return None
    if graph.shape(made_by.args[0]) != graph.shape(call) or inner.dtype != factor.dtype:
        return None
    if made_by.op.name == "relax.multiply":
        return op.multiply(made_by.args[0], constant(inner * factor))
    scaled_before = graph.calls(made_by.args[0], "relax.multiply")
    if graph.calls(made_by.args[0], "relax.nn.conv2d", "relax.matmul") is None and (
        scaled_before is None or graph.value(scaled_before.args[1]) is None
    ):
        return None  # x + b, scaled, is as good as x scaled, + b
    scaled = graph.emit(op.multiply(made_by.args[0], constant(factor)))
    return op.add(scaled, constant(inner * factor))


@rule("relax.add")
def join_shifts(graph: Graph, call: relax.Call) -> relax.Expr | None:
    """(x + a) + b is x + (a + b)."""
    term = graph.value(call.args[1])
    made_by = graph.calls(call.args[0], "relax.add")
    inner = None if made_by is None else graph.value(made_by.args[1])
    if term is None or made_by is None or inner is None or not graph.read_once(call.args[0]):
        return None
    if graph.shape(made_by.args[0]) != graph.shape(call) or inner.dtype != term.dtype:
        return None
    return op.add(made_by.args[0], constant(inner + term))


@rule("relax.call_tir")
def plain_pad(graph: Graph, call: relax.Call) -> relax.Expr | None:
    """The importer writes ONNX's Pad as raw TIR: out[i] = if_then_else(inside, in[i - before], value)."""
    arguments = call.args[1].fields
    if call.args[0].name_hint.rstrip("0123456789") != "pad" or len(arguments) != 1:
        return None
    before, value = structure.padding(graph.builder_.get()[call.args[0]])
    source, target = graph.shape(arguments[0]), graph.shape(call)
    if before is None or source is None or target is None:
        return None
    width = [(b, t - s - b) for b, s, t in zip(before, source, target, strict=True)]
    if not any(any(pair) for pair in width):
        return arguments[0]
    return op.nn.pad(arguments[0], [w for pair in width for w in pair], "constant", value)


@rule("relax.nn.conv2d")
def pad_in_convolution(graph: Graph, call: relax.Call) -> relax.Expr | None:
    """Zeros put around an image before a convolution are the convolution's own padding."""
    pad = graph.calls(call.args[0], "relax.nn.pad")
    if pad is None or str(pad.attrs.pad_mode) != "constant" or float(pad.attrs.pad_value) != 0:
        return None
    width = [int(w) for w in pad.attrs.pad_width]
    layout = str(call.attrs.data_layout)
    around = {axis: width[2 * n : 2 * n + 2] for n, axis in enumerate(layout)}
    if len(width) != 2 * len(layout) or any(around["N"]) or any(around["C"]) or min(width) < 0:
        return None
    top, left, bottom, right = (int(p) for p in call.attrs.padding)
    padding = [top + around["H"][0], left + around["W"][0], bottom + around["H"][1], right + around["W"][1]]
    attrs = call.attrs
    return op.nn.conv2d(
        pad.args[0], call.args[1], strides=[int(s) for s in attrs.strides], padding=padding,
        dilation=[int(d) for d in attrs.dilation], groups=int(attrs.groups), data_layout=layout,
        kernel_layout=str(attrs.kernel_layout), out_layout=str(attrs.out_layout),
        out_dtype=dtype(call),
    )  # fmt: skip


RULES: list[Rule] = [
    fold_batch_norm, equal_ranks, scale_into_weights, scale_before_shift, join_shifts, plain_pad,
    pad_in_convolution,
]  # fmt: skip
