"""Sums over a few groups of channels, or over a few branches, as sums of images.

Split attention (ResNeSt, SKNet) has the branches of a block side by side: an axis of its own, along which they are
weighed and added up. With five axes, TVM keeps images with channels first there, and copies them before and after each.
What is added up here are images of four axes, parts of one or what the branches made, in one pass.
"""

import functools
import math
from collections.abc import Sequence
from itertools import pairwise

from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import Rewriter, Rule, rule

_MOST = 4  # branches
_AXIS, _RANK = 1, 5  # of images side by side: (N, branches, C, H, W)


@rule("relax.sum")
def branch_by_branch(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A sum over the branches, or of their products with what weighs them."""
    data, shape, attrs = call.args[0], rewriter.shape(call.args[0]), call.attrs
    if shape is None or len(shape) != _RANK or attrs.axis is None or not 1 < shape[_AXIS] <= _MOST:
        return None
    if [int(axis) % _RANK for axis in attrs.axis] != [_AXIS]:
        return None
    product = rewriter.calls(data, "relax.multiply") if rewriter.read_once(data) else None
    operands = [data] if product is None else list(product.args)
    images = [_images(rewriter, operand) for operand in operands]
    if not any(images):
        return None
    pairs = zip(images, operands, strict=True)
    factors = [each or _weights(rewriter, operand, shape[_AXIS]) for each, operand in pairs]
    known = [each for each in factors if each is not None]
    if len(known) < len(factors):
        return None
    terms = [functools.reduce(lambda a, b: rewriter.emit(op.multiply(a, b)), each) for each in zip(*known, strict=True)]
    found = functools.reduce(lambda a, b: rewriter.emit(op.add(a, b)), terms)
    return op.expand_dims(found, [_AXIS]) if attrs.keepdims else found


def _weights(rewriter: Rewriter, operand: relax.Expr, count: int) -> list[relax.Expr] | None:
    """What weighs each branch; None if it is as large as images, which would have to be copied."""
    shape = rewriter.shape(operand)
    if shape is None or len(shape) != _RANK or math.prod(shape[3:]) > 1:
        return None
    if shape[_AXIS] == 1:
        return [_without_branches(rewriter, operand, shape)] * count
    parts = (rewriter.emit(op.strided_slice(operand, [_AXIS], [n], [n + 1])) for n in range(count))
    return [_without_branches(rewriter, part, shape) for part in parts]


def _images(rewriter: Rewriter, operand: relax.Expr) -> list[relax.Expr] | None:
    """The images that stand side by side in a tensor: groups of the channels of one, or what was stacked."""
    shape, stack = rewriter.shape(operand), rewriter.calls(operand, "relax.concat")
    if shape is None or len(shape) != _RANK:
        return None
    if stack is not None and stack.attrs.axis is not None and int(stack.attrs.axis) % _RANK == _AXIS:
        fields = rewriter.fields(stack.args[0]) or []
        is_stack = bool(fields) and all((rewriter.shape(field) or ())[_AXIS : _AXIS + 1] == (1,) for field in fields)
        return [_without_branches(rewriter, field, shape) for field in fields] if is_stack else None
    split = rewriter.calls(operand, "relax.reshape")
    n, count, channels, *extents = shape
    if split is None or rewriter.shape(split.args[0]) != (n, count * channels, *extents):
        return None
    ends = [channels * group for group in range(count + 1)]
    image = split.args[0]
    return [rewriter.emit(op.strided_slice(image, [_AXIS], [begin], [end])) for begin, end in pairwise(ends)]


def _without_branches(rewriter: Rewriter, tensor: relax.Expr, shape: Sequence[int]) -> relax.Expr:
    extents = (rewriter.shape(tensor) or shape)[_AXIS + 1 :]
    return rewriter.emit(op.reshape(tensor, (shape[0], *extents)))


RULES: list[Rule] = [branch_by_branch]
