"""Normalisations that older exporters write as several operators."""

from collections.abc import Callable

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import Rewriter, Rule, constant, dtype, rule


@rule("relax.divide")
def whole_layer_norm(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) over the last axis as one operator."""
    centred, root = rewriter.calls(call.args[0], "relax.subtract"), rewriter.calls(call.args[1], "relax.sqrt")
    shifted = None if root is None else rewriter.calls(root.args[0], "relax.add")
    epsilon = None if shifted is None else rewriter.value(shifted.args[1])
    if centred is None or shifted is None or epsilon is None or epsilon.size != 1:
        return None
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


def _is_row(value: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether a constant has one element for each index of the last axis."""
    return value.ndim <= len(shape) and value.shape[-1:] == shape[-1:] and value.size == shape[-1]


def _mean_of_last(rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """The tensor that an expression is the mean of over the last axis, with `keepdims`."""
    mean = rewriter.calls(expr, "relax.mean")
    shape = None if mean is None else rewriter.shape(mean.args[0])
    if mean is None or shape is None or not mean.attrs.keepdims or mean.attrs.axis is None:
        return None
    axes = [int(axis) % len(shape) for axis in mean.attrs.axis]
    return mean.args[0] if axes == [len(shape) - 1] else None


RULES: list[Rule] = [whole_layer_norm, scale_of_layer_norm, shift_of_layer_norm]
