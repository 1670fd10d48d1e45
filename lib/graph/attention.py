"""Attention as one operator: two products and the softmax between them become one function (`lib.tir.attention`).

    softmax(query @ keys * scale + mask) @ values

What stands between the first product and the softmax may be any chain of element-wise operators with tensors that are
broadcast to the scores: scales, masks, relative biases, a choice by a mask. Keys and values are copied in any case,
when they are split into heads; these copies also fill whole vectors, and have the order that products in bf16 want.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import tvm_ffi
from tvm import relax, te, tirx
from tvm.relax import op

from lib.graph import packing, patterns, reweight
from lib.graph.fusion import Model
from lib.graph.rewrite import Rewriter, Rule, dtype, rewrite, static_shape
from lib.machine.dots import Dot
from lib.tir.attention import Logits, Shape, attention

FUNCTION = "attention"  # name of the functions, for people

_WIDE = "float32"
_BINARY: dict[str, Callable[[tirx.Expr, tirx.Expr], tirx.Expr]] = {
    "relax.add": lambda a, b: a + b,
    "relax.subtract": lambda a, b: a - b,
    "relax.multiply": lambda a, b: a * b,
    "relax.divide": lambda a, b: a / b,
    "relax.maximum": tirx.Max,
    "relax.minimum": tirx.Min,
}
_CHOICE = "relax.where"
_FEWEST, _RANK = 3, 4  # axes of scores: with heads; with batches and heads, as the function has them
# Rows of values are filled up to a multiple, for the steps of a loop over them: the first one that adds few.
_MULTIPLES, _FEW = (16, 4), 32


def fuse(model: Model, dot: Dot | None, lanes: int) -> Model:
    """The model with its attention as one operator each; the same model if it has none.

    Args:
        dot: The instruction for its products; None: in float32.
        lanes: Of the machine's vectors.
    """
    module = rewrite(model.module, [Rule(FUNCTION, ("relax.matmul", "relax.einsum"), partial(_fused, dot, lanes))])
    if tvm_ffi.structural_equal(module, model.module):
        return model
    return reweight.made_once(Model(module, model.weights))


@dataclass(frozen=True, slots=True)
class _Step:
    """An element-wise operator between scores and softmax.

    Attributes:
        combine: Makes its result from the score and the elements of `operands`.
        operands: Scalars, and tensors that are broadcast to the scores.
    """

    combine: Callable[..., tirx.Expr]
    operands: tuple[relax.Expr, ...]


def _fused(dot: Dot | None, lanes: int, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    shapes, factors = packing.of_activations(rewriter, call), packing.factors(rewriter, call)
    if shapes is None or dtype(call) != _WIDE or len(shapes[0]) < _FEWEST:
        return None
    softmax, rank = rewriter.calls(factors[0], "relax.nn.softmax"), len(shapes[0])
    if softmax is None or int(softmax.attrs.axis) not in (-1, rank - 1) or not rewriter.read_once(factors[0]):
        return None
    found = _chain(rewriter, softmax.args[0], shapes[0])
    if found is None:
        return None
    product, steps = found
    masks = [each for step in steps for each in step.operands if rewriter.value(each) is None]
    if masks and rank > _RANK:
        return None
    tensors = _tensors(rewriter, product, factors[1], dot, lanes)
    columns, wide = shapes[0][-1], (static_shape(tensors[1]) or ())[3]
    read = [_mask(rewriter, mask, columns, wide) for mask in masks]
    shape = Shape(columns, shapes[1][-1], lanes, dot, call.op.name == "relax.einsum")
    found = rewriter.builder_.call_te(
        partial(attention, shape, _logits(rewriter, steps)), *tensors, *read,
        primfunc_name_hint=FUNCTION, primfunc_attrs=patterns.marks(patterns.OUT_ELEMENTWISE),
    )  # fmt: skip
    return found if rank == _RANK else op.reshape(rewriter.emit(found), (*shapes[0][:-1], shapes[1][-1]))


def _chain(rewriter: Rewriter, expr: relax.Expr, shape: tuple[int, ...]) -> tuple[relax.Call, list[_Step]] | None:
    """The product that softmax gets its scores of, and the steps from there; None if there is something else."""
    call = rewriter.definition(expr)
    if not isinstance(call, relax.Call) or rewriter.shape(expr) != shape or not rewriter.read_once(expr):
        return None
    if rewriter.calls(expr, "relax.matmul") is not None:
        is_wide = dtype(call) == _WIDE == dtype(call.args[0])
        return (call, []) if is_wide and packing.of_activations(rewriter, call) else None
    for scores, step in _steps(call):
        others = [rewriter.shape(each) for each in step.operands]
        found = _chain(rewriter, scores, shape) if all(_is_broadcast(each, shape) for each in others) else None
        if found is not None:
            return found[0], [*found[1], step]
    return None


def _steps(call: relax.Call) -> list[tuple[relax.Expr, _Step]]:
    """An operator as a step from any of its arguments."""
    name = getattr(call.op, "name", "")
    if name == _CHOICE:
        mask, first, second = call.args
        return [
            (first, _Step(lambda score, chosen, other: tirx.Select(chosen, score, other), (mask, second))),
            (second, _Step(lambda score, chosen, other: tirx.Select(chosen, other, score), (mask, first))),
        ]
    if name not in _BINARY:
        return []
    first, second = call.args
    combine = _BINARY[name]
    return [(first, _Step(combine, (second,))), (second, _Step(lambda score, other: combine(other, score), (first,)))]


def _is_broadcast(shape: tuple[int, ...] | None, to: tuple[int, ...]) -> bool:
    """Whether a shape can be broadcast to another one."""
    if shape is None or len(shape) > len(to):
        return False
    return all(have in (1, want) for have, want in zip(reversed(shape), reversed(to), strict=False))


def _tensors(
    rewriter: Rewriter, product: relax.Call, values: relax.Expr, dot: Dot | None, lanes: int
) -> list[relax.Expr]:
    """Query, keys and values, as `lib.tir.attention` takes them."""
    query, keys, values = (_in_four_axes(rewriter, each) for each in (*product.args, values))
    (*_, depth, columns), (*_, size) = static_shape(keys) or (), static_shape(values) or ()
    if dot:
        query, keys, values = (rewriter.emit(op.astype(each, dot.data)) for each in (query, keys, values))
    deeper = -depth % dot.depth if dot else 0
    query = _padded(rewriter, query, 0, deeper)
    keys = _padded(rewriter, keys, deeper, -columns % lanes)
    values = _padded(rewriter, values, _more_rows(columns), -size % lanes)
    if dot:
        keys, values = (packing.interleaved(rewriter, each, dot.depth) for each in (keys, values))
    return [query, keys, values]


def _in_four_axes(rewriter: Rewriter, tensor: relax.Expr) -> relax.Expr:
    """A tensor of heads alone, as of one batch: exporters join the two (SAM's heads, PyTorch's batched products); and
    heads with what else is beside them, as Hiera's windows, as more heads."""
    *batch, rows, columns = static_shape(tensor) or ()
    first, heads = (1, *batch)[-2:] if len(batch) <= _RANK - 2 else (batch[0], math.prod(batch[1:]))
    return tensor if len(batch) == _RANK - 2 else rewriter.emit(op.reshape(tensor, (first, heads, rows, columns)))


def _more_rows(columns: int) -> int:
    more = [-columns % multiple for multiple in _MULTIPLES]
    return next((n for n in more if n * _FEW <= columns), more[-1])


def _padded(rewriter: Rewriter, tensor: relax.Expr, rows: int, columns: int) -> relax.Expr:
    """A tensor with zeros after its last axis but one, and its last one."""
    if not rows and not columns:
        return tensor
    width = [0, 0] * (len(static_shape(tensor) or ()) - 2) + [0, rows, 0, columns]
    return rewriter.emit(op.nn.pad(tensor, width, "constant", 0.0))


def _mask(rewriter: Rewriter, tensor: relax.Expr, columns: int, wide: int) -> relax.Expr:
    """A mask that can be read in whole vectors: what is read beyond its end is not used."""
    shape = static_shape(tensor) or ()
    if wide == columns or not shape or shape[-1] != columns:
        return tensor
    width = [0, 0] * (len(shape) - 1) + [0, wide - columns]
    if dtype(tensor) != "bool":
        return rewriter.emit(op.nn.pad(tensor, width, "constant", 0.0))
    bytes_ = rewriter.emit(op.astype(tensor, "uint8"))
    return rewriter.emit(op.astype(rewriter.emit(op.nn.pad(bytes_, width, "constant", 0.0)), "bool"))


def _logits(rewriter: Rewriter, steps: Sequence[_Step]) -> Logits:
    """What softmax gets, of a score: scalars are parts of the program, other tensors are given to it in order."""
    scalars = [[rewriter.value(each) for each in step.operands] for step in steps]

    def logits(score: tirx.Expr, at: Sequence[tirx.Expr], masks: Sequence[te.Tensor]) -> tirx.Expr:
        left = iter(masks)
        for step, values in zip(steps, scalars, strict=True):
            elements = [
                _element(next(left), at) if value is None else tirx.const(value.item(), str(value.dtype))
                for value in values
            ]
            score = step.combine(score, *elements)
        return score

    return logits


def _element(mask: te.Tensor, at: Sequence[tirx.Expr]) -> tirx.Expr:
    """Of a tensor that is broadcast."""
    shape = [int(extent) for extent in mask.shape]
    return mask(*(0 if extent == 1 else index for extent, index in zip(shape, at[-len(shape) :], strict=True)))
