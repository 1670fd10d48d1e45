"""Einsums as products, and relative positions of images as columns of attention's products.

Shapes: b batch and heads, n = h w queries, m = k l keys, c size of a head.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import Rewriter, Rule, constant, dtype, in_order, rule
from lib.graph.rules.movement import swaps_matrices

CONTEXT = "bhnm,bhms->bnhs"  # attention's second product, as rules write it: other einsums of two tensors are products


@rule("relax.einsum")
def product_of_einsum(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """An einsum of two tensors, of which each axis is of the result or summed over, as one product of matrices: of the
    first with the second, or the other way round, where less is moved then."""
    operands, text = rewriter.fields(call.args[0]), str(call.attrs.subscripts).replace(" ", "")
    if operands is None or len(operands) != 2 or text == CONTEXT or not _is_plain(text):
        return None
    shapes = [rewriter.shape(each) for each in operands]
    if shapes[0] is None or shapes[1] is None or dtype(operands[0]) != dtype(operands[1]):
        return None
    (first, second), result = text.partition("->")[0].split(","), text.partition("->")[2]
    extents = dict(zip(first + second, shapes[0] + shapes[1], strict=True))
    if any(extents[axis] != extent for axis, extent in zip(first, shapes[0], strict=True)):
        return None  # one is broadcast
    is_known = [rewriter.value(each) is not None for each in operands]
    ways = [_Way.of(first, second, result), _Way.of(second, first, result)]
    costs = [ways[0].moved(extents, *is_known), ways[1].moved(extents, *is_known[::-1])]
    is_swapped = costs[1] < costs[0]
    way, (one, other) = ways[is_swapped], operands[::-1] if is_swapped else operands
    left = _as_matrices(rewriter, one, way.first, (way.batch, way.rows, way.depth), extents)
    right = _as_matrices(rewriter, other, way.second, (way.batch, way.depth, way.columns), extents)
    product = rewriter.emit(op.matmul(left, right))
    apart = rewriter.emit(op.reshape(product, [extents[axis] for axis in way.made]))
    return in_order(rewriter, apart, [way.made.index(axis) for axis in result])


@rule("relax.einsum")
def einsum_in_pairs(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """An einsum of three tensors and more as some of two, where that takes fewer multiplications: of a biaffine parser,
    `xi,oij,yj->xyo` is a loop over all five axes in one."""
    operands, text = rewriter.fields(call.args[0]), str(call.attrs.subscripts).replace(" ", "")
    inputs, arrow, result = text.partition("->")
    names = inputs.split(",")
    if operands is None or not arrow or not "".join(names).isalpha() or len(operands) < 3:
        return None
    shapes = [rewriter.shape(each) or () for each in operands]
    if list(map(len, names)) != list(map(len, shapes)):
        return None  # of extents that are not known
    axes = set(zip("".join(names), itertools.chain.from_iterable(shapes), strict=True))
    if len(axes) != len(dict(axes)):
        return None  # one is broadcast
    path, _ = np.einsum_path(text, *(np.broadcast_to(np.float32(0), shape) for shape in shapes), optimize="greedy")
    rest: list[tuple[str, relax.Expr]] = list(zip(names, operands, strict=True))
    for step in path[1:]:
        if len(step) != 2:
            return None
        (second, right), (first, left) = (rest.pop(n) for n in sorted(step, reverse=True))
        needed = {axis for own, _ in rest for axis in own} | set(result)
        made = "".join(axis for axis in dict.fromkeys(first + second) if axis in needed) if rest else result
        rest.append((made, rewriter.emit(op.einsum((left, right), f"{first},{second}->{made}"))))
    return rest[0][1]


@dataclass(frozen=True, slots=True)
class _Way:
    """An einsum as a product whose rows are axes of the first of two tensors; axes by their letters."""

    first: str
    second: str
    result: str
    batch: list[str]
    rows: list[str]
    depth: list[str]
    columns: list[str]

    @classmethod
    def of(cls, first: str, second: str, result: str) -> "_Way":
        """The product of tensors with these axes."""
        batch = [axis for axis in result if axis in first and axis in second]
        rows, columns = ([axis for axis in result if axis in own and axis not in batch] for own in (first, second))
        return cls(first, second, result, batch, rows, [axis for axis in first if axis not in result], columns)

    @property
    def made(self) -> list[str]:
        """The axes of the product."""
        return [*self.batch, *self.rows, *self.columns]

    def moved(self, extents: Mapping[str, int], first_is_known: bool, second_is_known: bool) -> int:
        """Elements that change their places; those of constants do so once."""
        wanted = [
            (self.first, [*self.batch, *self.rows, *self.depth], first_is_known),
            (self.second, [*self.batch, *self.depth, *self.columns], second_is_known),
            (self.result, self.made, False),
        ]
        return sum(math.prod(extents[axis] for axis in axes) for axes, order, is_known in wanted
                   if list(axes) != order and not is_known)  # fmt: skip


def _is_plain(text: str) -> bool:
    """Whether no axis is met twice in a tensor, and each in both tensors, or in one of them and the result."""
    inputs, arrow, result = text.partition("->")
    first, _, second = inputs.partition(",")
    summed = (set(first) & set(second)) - set(result)
    return (
        bool(arrow and summed)
        and inputs.replace(",", "").isalpha()
        and all(len(set(axes)) == len(axes) for axes in (first, second, result))
        and set(first) | set(second) == set(result) | summed
    )


def _as_matrices(
    rewriter: Rewriter, tensor: relax.Expr, axes: str, parts: tuple[Sequence[str], ...], extents: dict[str, int]
) -> relax.Expr:
    """A tensor with its batches first, each as it is, then two axes of the others."""
    batch, *others = parts
    order = [axes.index(axis) for axis in [*batch, *others[0], *others[1]]]
    shape = [extents[axis] for axis in batch] + [math.prod(extents[axis] for axis in part) for part in others]
    if (value := rewriter.value(tensor)) is not None:
        return constant(value.transpose(order).reshape(shape))
    moved = in_order(rewriter, tensor, order)
    return rewriter.emit(op.reshape(moved, shape)) if rewriter.shape(moved) != tuple(shape) else moved


@rule("relax.reshape")
def positions_as_columns(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Scores of images' attention with decomposed relative positions, as one product.

    `scores[b, h, w, k, l] + rows[b, h, w, k] + columns[b, h, w, l]` is a product of wider query and keys: rows and
    columns stand beside the query, and beside the keys which row and column of the image each of them has. So nothing
    of the size of scores is written (MViT v2, arXiv 2112.01526, equation 4; ViTDet and SAM have the same).
    """
    shape, terms = rewriter.shape(call), _terms(rewriter, call.args[0])
    products = [_scores(rewriter, each, shape) for each in terms]
    known = [product for product in products if product is not None]
    if len(known) != 1 or len(terms) < 2:
        return None
    positions = [each for each, product in zip(terms, products, strict=True) if product is None]
    return _wider(rewriter, known[0], positions, call.args[0])


@rule("relax.add")
def positions_apart_as_columns(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """The same, where positions are summed before they are added to the scores."""
    for scores, positions in (tuple(call.args), tuple(call.args)[::-1]):
        product, reshape = rewriter.calls(scores, "relax.matmul"), rewriter.calls(positions, "relax.reshape")
        if product is None or reshape is None or not rewriter.read_once(scores):
            continue
        if rewriter.shape(call) == rewriter.shape(product) == rewriter.shape(reshape):
            found = _wider(rewriter, product, _terms(rewriter, reshape.args[0]), reshape.args[0])
            if found is not None:
                return found
    return None


def _terms(rewriter: Rewriter, expr: relax.Expr) -> list[relax.Expr]:
    """What is added up to an expression."""
    total = rewriter.calls(expr, "relax.add")
    if total is None or not rewriter.read_once(expr):
        return [expr]
    return [term for part in total.args for term in _terms(rewriter, part)]


def _scores(rewriter: Rewriter, expr: relax.Expr, shape: tuple[int, ...] | None) -> relax.Call | None:
    """The product of some shape that was reshaped to the scores of an image."""
    reshape = rewriter.calls(expr, "relax.reshape")
    if reshape is None or not rewriter.read_once(expr) or not rewriter.read_once(reshape.args[0]):
        return None
    product = rewriter.calls(reshape.args[0], "relax.matmul")
    return None if product is None or shape is None or rewriter.shape(product) != shape else product


def _wider(
    rewriter: Rewriter, product: relax.Call, positions: Sequence[relax.Expr], total: relax.Expr
) -> relax.Expr | None:
    """A product with columns for its positions, which are broadcast to a total of (..., h, w, k, l)."""
    query, keys = product.args
    shapes, wide = (rewriter.shape(query), rewriter.shape(keys)), rewriter.shape(total)
    if shapes[0] is None or shapes[1] is None or wide is None or shapes[0][:-2] != shapes[1][:-2]:
        return None
    if min(len(shapes[0]), len(shapes[1])) < 2:
        return None
    batch, n, m = shapes[0][:-2], shapes[0][-2], shapes[1][-1]
    if len(wide) != len(batch) + 4 or wide[:-4] != batch or (wide[-4] * wide[-3], wide[-2] * wide[-1]) != (n, m):
        return None
    if rewriter.value(query) is not None or rewriter.value(keys) is not None or dtype(query) != dtype(product):
        return None
    places = [_places(rewriter.shape(each), wide) for each in positions]
    known = [each for each in places if each is not None]
    if len(known) < max(1, len(places)):
        return None
    beside = [
        rewriter.emit(op.reshape(each, (*batch, n, len(place)))) for each, place in zip(positions, known, strict=True)
    ]
    return op.matmul(
        rewriter.emit(op.concat([query, *beside], -1)),
        _above(rewriter, keys, np.concatenate(known).astype(dtype(query))),
        out_dtype=dtype(product),
    )


def _above(rewriter: Rewriter, keys: relax.Expr, more: np.ndarray) -> relax.Expr:
    """Keys of (..., c, m) with more rows after the c; where they are transposed for the product, joined before it."""
    turned, shape = rewriter.calls(keys, "relax.permute_dims"), rewriter.shape(keys) or ()
    if turned is None or not swaps_matrices(turned):
        below = rewriter.emit(op.broadcast_to(constant(more), (*shape[:-2], *more.shape)))
        return rewriter.emit(op.concat([keys, below], -2))
    beside = rewriter.emit(op.broadcast_to(constant(more.T), (*shape[:-2], *more.T.shape)))
    joined = rewriter.emit(op.concat([turned.args[0], beside], -1))
    return rewriter.emit(op.permute_dims(joined, turned.attrs.axes))


def _places(shape: tuple[int, ...] | None, wide: tuple[int, ...]) -> np.ndarray | None:
    """Which of an image's keys have which row, or column: (k, k l) or (l, k l), of zeros and ones; None for a tensor
    that is no position of rows or columns."""
    *_, height, width = wide
    if shape == (*wide[:-1], 1):
        return np.kron(np.eye(height), np.ones((1, width)))
    if shape == (*wide[:-2], 1, width):
        return np.kron(np.ones((1, height)), np.eye(width))
    return None


RULES: list[Rule] = [einsum_in_pairs, product_of_einsum, positions_as_columns, positions_apart_as_columns]
