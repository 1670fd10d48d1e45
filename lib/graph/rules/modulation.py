"""Weights that are made of constants and of factors of their channels, as StyleGAN2 has them for each picture.

Exporters write what training does: the weights are multiplied by a style, brought to length one again, and convolved
with. Factors of channels may as well be those of the data and of the result, which are smaller: the weights stay
constants, that all other rules know what to do with, and no picture transposes or packs them.
Source: Karras et al., "Analyzing and Improving the Image Quality of StyleGAN" (CVPR 2020), section 2.2 and appendix B.
"""

import math

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import CONVOLUTIONS, Rewriter, Rule, alike, constant, dtype, rule

_PRODUCTS = ("relax.multiply", "relax.divide")


@rule(*CONVOLUTIONS)
def factors_of_channels(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """conv(x, w * s) as conv(x * s, w) with a factor for each input channel, or conv(x, w) * s for each output."""
    data, weight = call.args
    scaled, shape = rewriter.calls(weight, *_PRODUCTS), rewriter.shape(weight)
    if scaled is None or shape is None or int(call.attrs.groups) != 1:
        return None
    inner, factor = scaled.args
    if rewriter.shape(inner) != shape and scaled.op.name == "relax.multiply":
        inner, factor = factor, inner
    given = rewriter.shape(factor)
    if rewriter.shape(inner) != shape or given is None or not _is_of_constants(rewriter, inner):
        return None
    axes, kernel = str(call.attrs.data_layout), str(call.attrs.kernel_layout)
    of_outputs = _is_along(given, shape, kernel.index("O"))
    if not of_outputs and not _is_along(given, shape, kernel.index("I")):
        return None
    spread = [math.prod(given) if axis == "C" else 1 for axis in axes]
    channels = rewriter.emit(op.reshape(factor, spread))
    if of_outputs:
        result = rewriter.emit(alike(call, data, inner, dtype(call)))
        return relax.Call(scaled.op, [result, channels], scaled.attrs, scaled.ty_args)
    image = rewriter.emit(relax.Call(scaled.op, [data, channels], scaled.attrs, scaled.ty_args))
    return alike(call, image, inner, dtype(call))


def _is_of_constants(rewriter: Rewriter, weight: relax.Expr) -> bool:
    """Whether what is left is a constant once all factors are gone."""
    while (scaled := rewriter.calls(weight, *_PRODUCTS)) is not None:
        first, second = scaled.args
        is_first = rewriter.shape(first) == rewriter.shape(weight)
        weight = first if is_first or scaled.op.name == "relax.divide" else second
    return rewriter.value(weight) is not None


def _is_along(given: tuple[int, ...], shape: tuple[int, ...], axis: int) -> bool:
    """Whether a tensor that is multiplied with one of some shape has a number for each index of one axis."""
    return len(given) == len(shape) and given[axis] == shape[axis] == math.prod(given)


@rule("relax.multiply")
def square_of_product(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """(w * s)^2 as w^2 * s^2, of which the first is a constant."""
    first, second = (rewriter.definition(argument) for argument in call.args)
    if first != second or rewriter.calls(call.args[0], "relax.multiply") is None:
        return None
    weight, factor = first.args
    if rewriter.value(weight) is None:
        weight, factor = factor, weight
    value, given = rewriter.value(weight), rewriter.shape(factor)
    if value is None or given is None or value.shape != rewriter.shape(call) or math.prod(given) >= value.size:
        return None
    return op.multiply(constant(value * value), rewriter.emit(op.multiply(factor, factor)))


@rule("relax.sum")
def sum_as_product(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """sum(w * s) over all axes that s has, and others, as a product of s with a matrix of sums of w."""
    scaled = rewriter.calls(call.args[0], "relax.multiply")
    shape, out = rewriter.shape(call.args[0]), rewriter.shape(call)
    if scaled is None or not shape or not out or call.attrs.axis is None:
        return None
    weight, factor = scaled.args
    value, given = rewriter.value(weight), rewriter.shape(factor)
    if value is None or given is None or value.shape != shape or len(given) != len(shape):
        return None
    summed = {int(axis) % len(shape) for axis in call.attrs.axis}
    own = [axis for axis, extent in enumerate(given) if extent > 1]
    if not own or not set(own) <= summed or any(given[axis] != shape[axis] for axis in own):
        return None
    sums = value.sum(tuple(summed - set(own)), dtype=np.float64)
    kept = sorted((set(range(len(shape))) - summed) | set(own))
    order = [kept.index(axis) for axis in own] + [n for n, axis in enumerate(kept) if axis not in own]
    rows = math.prod(given)
    matrix = constant(sums.transpose(order).reshape(rows, -1).astype(value.dtype))
    product = op.matmul(rewriter.emit(op.reshape(factor, (1, rows))), matrix)
    return op.reshape(rewriter.emit(product), out)


RULES: list[Rule] = [factors_of_channels, square_of_product, sum_as_product]
