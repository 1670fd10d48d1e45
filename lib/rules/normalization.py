"""Normalisations that older exporters write in pieces."""

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.rewrite import Graph, Rule, constant, rule


@rule("relax.add")
def whole_layer_norm(graph: Graph, call: relax.Call) -> relax.Expr | None:
    """(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * gamma + beta over the last axis: one pass, not five."""
    scaled = graph.calls(call.args[0], "relax.multiply")
    if scaled is None:
        return None
    gamma, beta = graph.value(scaled.args[1]), graph.value(call.args[1])
    found = _normalized(graph, scaled.args[0])
    if gamma is None or beta is None or found is None:
        return None
    x, epsilon = found
    shape = graph.shape(x)
    if shape is None or not all(_is_row(each, shape) for each in (gamma, beta)):
        return None
    return op.nn.layer_norm(x, constant(gamma.reshape(-1)), constant(beta.reshape(-1)), [-1], epsilon)


def _is_row(value: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether a constant gives one number to each place along the last axis."""
    return value.ndim <= len(shape) and value.shape[-1:] == shape[-1:] and value.size == shape[-1]


def _normalized(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, float] | None:
    """x and epsilon, if an expression is (x - mean(x)) / sqrt(variance + epsilon)."""
    quotient = graph.calls(expr, "relax.divide")
    if quotient is None:
        return None
    centred, root = graph.calls(quotient.args[0], "relax.subtract"), graph.calls(quotient.args[1], "relax.sqrt")
    if centred is None or root is None:
        return None
    shifted = graph.calls(root.args[0], "relax.add")
    epsilon = None if shifted is None else graph.value(shifted.args[1])
    if shifted is None or epsilon is None or epsilon.size != 1:
        return None
    x = centred.args[0]
    squares = _mean_of_last(graph, shifted.args[0])
    product = None if squares is None else graph.calls(squares, "relax.multiply")
    mean_of = _mean_of_last(graph, centred.args[1])
    if product is None or mean_of is None or not mean_of.same_as(x):
        return None
    if any(graph.definition(argument) != centred for argument in product.args):
        return None
    return x, float(epsilon.reshape(()))


def _mean_of_last(graph: Graph, expr: relax.Expr) -> relax.Expr | None:
    """What an expression is the mean of, over the last axis, which stays with extent 1."""
    mean = graph.calls(expr, "relax.mean")
    shape = None if mean is None else graph.shape(mean.args[0])
    if mean is None or shape is None or not mean.attrs.keepdims or mean.attrs.axis is None:
        return None
    axes = [int(axis) % len(shape) for axis in mean.attrs.axis]
    return mean.args[0] if axes == [len(shape) - 1] else None


RULES: list[Rule] = [whole_layer_norm]
