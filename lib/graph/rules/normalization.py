"""Normalisations that exporters and importers write as several operators."""

from collections.abc import Callable

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import Rewriter, Rule, constant, dtype, rule, to_last, undoing


@rule("relax.divide")
def whole_layer_norm(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) over the last axis as one operator."""
    found = _over_root(rewriter, call)
    if found is None:
        return None
    centred, shifted, epsilon = found
    x = centred.args[0]
    squares = _mean_of_last(rewriter, shifted.args[0])
    product = None if squares is None else rewriter.calls(squares, "relax.multiply")
    mean_of, shape = _mean_of_last(rewriter, centred.args[1]), rewriter.shape(x)
    if product is None or mean_of is None or shape is None or not mean_of.same_as(x):
        return None
    if any(rewriter.definition(argument) != centred for argument in product.args):
        return None
    ones, zeros = (constant(make(shape[-1], dtype(x))) for make in (np.ones, np.zeros))
    return op.nn.layer_norm(x, ones, zeros, [-1], float(epsilon.reshape(())))


@rule("relax.nn.layer_norm")
def layer_norm_of_a_row(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A norm over several axes, the last ones, as one over rows of all their elements, for which there is a space."""
    shape = rewriter.shape(call.args[0])
    axes = sorted(int(axis) % len(shape or ()) for axis in call.attrs.axes) if shape else []
    if shape is None or len(axes) < 2 or axes != [*range(axes[0], len(shape))]:
        return None
    elements = int(np.prod(shape[axes[0] :]))
    rows, *factors = (
        rewriter.emit(op.reshape(each, (*outer, elements)))
        for each, outer in zip(call.args, (shape[: axes[0]], (), ()), strict=True)
    )
    norm = op.nn.layer_norm(rows, *factors, [-1], float(call.attrs.epsilon))
    return op.reshape(rewriter.emit(norm), shape)


@rule("relax.divide")
def instance_norm(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """(x - mean(x)) / sqrt(variance(x) + eps), as TVM imports ONNX's InstanceNormalization: see `_normalized`.

    Where rows are groups of an image's channels (exporters write GroupNorm so), of the image itself.
    """
    found = _over_root(rewriter, call)
    if found is None:
        return None
    centred, shifted, epsilon = found
    mean = rewriter.calls(centred.args[1], "relax.mean")
    variance = rewriter.calls(shifted.args[0], "relax.variance")
    if mean is None or variance is None:
        return None
    x, shape = centred.args[0], rewriter.shape(centred.args[0])
    axes = None if shape is None else _axes(mean, len(shape))
    if shape is None or not axes or axes != _axes(variance, len(shape)):
        return None
    if not (mean.args[0].same_as(x) and variance.args[0].same_as(x)):
        return None
    rows = rewriter.calls(x, "relax.reshape")
    image = None if rows is None else rewriter.shape(rows.args[0])
    if rows is not None and image and axes == [2] and _is_grouped(image, shape):
        made = _normalized(rewriter, rows.args[0], image, [*range(2, len(image))], shape[1], epsilon)
        return op.reshape(rewriter.emit(made), shape)
    return _normalized(rewriter, x, shape, axes, 0, epsilon)


@rule("relax.nn.group_norm")
def group_norm(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """See `_normalized`."""
    (x, *affine), attrs = call.args, call.attrs
    shape = rewriter.shape(x)
    if shape is None or len(shape) < 3 or int(attrs.channel_axis) % len(shape) != 1:
        return None
    axes, groups = [int(axis) % len(shape) for axis in attrs.axes], int(attrs.num_groups)
    if sorted(axes) != [*range(2, len(shape))] or shape[1] % groups:
        return None
    made = _normalized(rewriter, x, shape, axes, groups, np.asarray(float(attrs.epsilon), dtype(x)))
    by_channel = (1, shape[1], *[1] * (len(shape) - 2))
    gamma, beta = (rewriter.emit(op.reshape(each, by_channel)) for each in affine)
    scaled = op.multiply(rewriter.emit(made), gamma) if attrs.scale else made
    return op.add(rewriter.emit(scaled), beta) if attrs.center else scaled


def _is_grouped(image: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    """Whether rows (N, groups, elements) are those of an image (N, C, ...) with as many channels in each group."""
    return len(rows) == 3 and len(image) > 2 and image[0] == rows[0] and image[1] % rows[1] == 0


def _normalized(
    rewriter: Rewriter, x: relax.Expr, shape: tuple[int, ...], axes: list[int], groups: int, epsilon: np.ndarray
) -> relax.Expr:
    """x * f - mean(x) * f, where the mean and f = 1 / sqrt(mean((x - mean(x))^2) + eps) are numbers of each channel.

    TVM's variance computes the mean a second time, and both of its reductions in one function, for which there is no
    space: what takes half a millisecond took eight. The factor spares a division for each element. Groups are normed
    on the image, by the sums of their channels, so that nothing has to be transposed where channels come last. Sums,
    since FuseOps makes the squares a part of a sum, but not of a mean.

    Args:
        groups: Of the channels, axis 1, which are normed together; 0: each alone.
    """
    count = int(np.prod([shape[axis] for axis in axes])) * (shape[1] // groups if groups else 1)
    share = constant(np.array(1 / count, dtype(x)))

    def averaged(of: relax.Expr) -> relax.Var:
        total = rewriter.emit(op.sum(of, axes, keepdims=True))
        if groups not in (0, shape[1]):
            apart = rewriter.emit(op.reshape(total, [shape[0], groups, shape[1] // groups]))
            joint = op.broadcast_to(rewriter.emit(op.sum(apart, [2], keepdims=True)), apart.ty.shape)
            total = rewriter.emit(op.reshape(rewriter.emit(joint), total.ty.shape))
        return rewriter.emit(op.multiply(total, share))

    mean = averaged(x)
    difference = rewriter.emit(op.subtract(x, mean))
    spread = averaged(rewriter.emit(op.multiply(difference, difference)))
    deviation = rewriter.emit(op.sqrt(rewriter.emit(op.add(spread, constant(epsilon)))))
    factor = rewriter.emit(op.divide(constant(np.ones((), dtype(x))), deviation))
    shift = rewriter.emit(op.multiply(mean, factor))
    return op.subtract(rewriter.emit(op.multiply(x, factor)), shift)


def _over_root(rewriter: Rewriter, call: relax.Call) -> tuple[relax.Call, relax.Call, np.ndarray] | None:
    """The difference, the sum under the root and its constant of (a - b) / sqrt(c + epsilon); None for another call."""
    centred, root = rewriter.calls(call.args[0], "relax.subtract"), rewriter.calls(call.args[1], "relax.sqrt")
    shifted = None if root is None else rewriter.calls(root.args[0], "relax.add")
    epsilon = None if shifted is None else rewriter.value(shifted.args[1])
    if centred is None or shifted is None or epsilon is None or epsilon.size != 1:
        return None
    return centred, shifted, epsilon


def _axes(reduction: relax.Call, rank: int) -> list[int] | None:
    """That a reduction with `keepdims` runs over, in order; None for another one."""
    if not reduction.attrs.keepdims or reduction.attrs.axis is None:
        return None
    return sorted(int(axis) % rank for axis in reduction.attrs.axis)


@rule("relax.multiply")
def scale_of_layer_norm(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A factor for each feature after a layer norm is a part of it."""
    return _with_affine(rewriter, call, lambda gamma, beta, factor: (gamma * factor, beta * factor))


@rule("relax.add")
def shift_of_layer_norm(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A term for each feature after a layer norm is a part of it."""
    return _with_affine(rewriter, call, lambda gamma, beta, term: (gamma, beta + term))


def _with_affine(
    rewriter: Rewriter, call: relax.Call, join: Callable[..., tuple[np.ndarray, np.ndarray]]
) -> relax.Expr | None:
    """The layer norm before `call`, with the constant of the call joined into its scale and shift."""
    norm = rewriter.calls(call.args[0], "relax.nn.layer_norm")
    value, shape = rewriter.value(call.args[1]), rewriter.shape(call.args[0])
    if norm is None or value is None or shape is None or not rewriter.read_once(call.args[0]):
        return None
    affine = rewriter.values(norm.args[1:])
    if affine is None or [int(axis) % len(shape) for axis in norm.attrs.axes] != [len(shape) - 1]:
        return None
    if not _is_row(value, shape):
        return None
    gamma, beta = join(*affine, value.reshape(-1))
    return op.nn.layer_norm(norm.args[0], constant(gamma), constant(beta), [-1], float(norm.attrs.epsilon))


@rule("relax.nn.softmax", "relax.nn.log_softmax")
def softmax_over_last(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A softmax over another axis as one over the last, of what is transposed: rows are computed in vectors, and who
    computes them, or reads the result, as a rule may do so in that order as well."""
    shape = rewriter.shape(call.args[0])
    axis = int(call.attrs.axis) % len(shape) if shape else 0
    if not shape or axis == len(shape) - 1:
        return None
    order = to_last(len(shape), axis)
    turned = rewriter.emit(op.permute_dims(call.args[0], order))
    result = rewriter.emit(getattr(op.nn, call.op.name.rpartition(".")[2])(turned, -1))
    return op.permute_dims(result, undoing(order))


def _is_row(value: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether a constant has one element for each index of the last axis."""
    return value.ndim <= len(shape) and value.shape[-1:] == shape[-1:] and value.size == shape[-1]


def _mean_of_last(rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """The tensor that an expression is the mean of over the last axis, with `keepdims`."""
    mean = rewriter.calls(expr, "relax.mean")
    shape = None if mean is None else rewriter.shape(mean.args[0])
    if mean is None or shape is None or _axes(mean, len(shape)) != [len(shape) - 1]:
        return None
    return mean.args[0]


RULES: list[Rule] = [
    whole_layer_norm, layer_norm_of_a_row, instance_norm, group_norm, scale_of_layer_norm, shift_of_layer_norm,
    softmax_over_last,
]  # fmt: skip
