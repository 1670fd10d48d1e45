"""Reshapes, transposes, slices and concatenations, most of which need not be done at run time."""

import math
from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from lib.graph import axes
from lib.graph.axes import Movement, Step
from lib.graph.rewrite import CONTRACTIONS, Rewriter, Rule, constant, dtype, in_order, rule, to_channels_first

_MAX_PARTS = 64  # of a split
_FEW_ROWS = 4  # from which on a register tile of them is not much slower than one of more

_CHAIN = ("relax.reshape", "relax.flatten", "relax.expand_dims", "relax.squeeze", "relax.permute_dims",
          "relax.nn.batch_flatten")  # fmt: skip
_ANY_SHAPE = ("relax.nn.relu", "relax.nn.gelu", "relax.nn.gelu_tanh", "relax.tanh", "relax.erf", "relax.sigmoid",
              "relax.nn.silu", "relax.exp", "relax.sqrt", "relax.negative", "relax.astype", "relax.round",
              "relax.clip")  # fmt: skip
_REDUCTIONS = ("relax.max", "relax.min", "relax.sum", "relax.mean")
_BINARY = ("relax.add", "relax.subtract", "relax.multiply", "relax.divide", "relax.maximum", "relax.minimum")


@rule(*_CHAIN)
def one_movement(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A chain of reshapes and transposes as one reshape, or one reshape, transpose and reshape."""
    # Through a transpose with other readers only if the result needs none: that one is computed in any case.
    for through_shared in (True, False):
        source, steps = chain(rewriter, call, through_shared)
        shape = rewriter.shape(source)
        if not steps or shape is None or not all(shape):
            continue
        movement = axes.compose(shape, steps)
        if movement is None or (through_shared and not movement.is_reshape):
            continue
        made = _steps(movement, shape)
        if len(made) < len(steps) or (movement.is_reshape and any(kind == "permute" for kind, _ in steps)):
            return _emit(rewriter, source, made)
    return None


def chain(rewriter: Rewriter, call: relax.Call, through_shared: bool = True) -> tuple[relax.Expr, list[Step]]:
    """The source of a chain of reshapes and transposes, and its steps."""
    steps: list[Step] = []
    expr: relax.Expr = call
    while True:
        found = expr if expr is call else rewriter.calls(expr, *_CHAIN)
        if found is None:
            return expr, steps
        moves = found.op.name == "relax.permute_dims"
        step = _step(rewriter, found)
        if step is None or (steps and moves and not through_shared and not rewriter.read_once(expr)):
            return expr, steps
        steps.insert(0, step)
        expr = found.args[0]


def order_after(shape: Sequence[int], steps: Sequence[Step]) -> np.ndarray:
    """What a chain makes of a tensor of a shape: where in memory each element was before."""
    order = np.arange(int(np.prod(shape))).reshape(shape)
    for kind, argument in steps:
        order = order.reshape(argument) if kind == "reshape" else order.transpose(argument)
    return order


def _step(rewriter: Rewriter, call: relax.Call) -> Step | None:
    shape = rewriter.shape(call)
    if shape is None:
        return None
    if call.op.name != "relax.permute_dims":
        return "reshape", shape
    order = call.attrs.axes
    return "permute", tuple(int(a) for a in order) if order is not None else tuple(reversed(range(len(shape))))


def _steps(movement: Movement, shape: tuple[int, ...]) -> list[Step]:
    """The steps of a movement that do something to a tensor of a shape."""
    if movement.is_reshape:
        return [] if movement.after == shape else [("reshape", movement.after)]
    # Unit axes are kept where they stand if the chain was a plain transpose: fewer steps.
    moved = tuple(movement.before[axis] for axis in movement.order)
    steps: list[Step] = [("permute", movement.order)]
    if movement.before != shape:
        steps.insert(0, ("reshape", movement.before))
    if movement.after != moved:
        steps.append(("reshape", movement.after))
    return steps


def _emit(rewriter: Rewriter, source: relax.Expr, steps: list[Step]) -> relax.Expr:
    for kind, argument in steps:
        source = op.reshape(source, argument) if kind == "reshape" else op.permute_dims(source, list(argument))
        source = rewriter.emit(source)
    return source


@rule("relax.matmul")
def flatten_in_order(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A flattened transposed image before a dense layer: reorder the rows of the weights instead."""
    reshape = rewriter.calls(call.args[0], "relax.reshape")
    weight = rewriter.value(call.args[1])
    if reshape is None or weight is None or weight.ndim != 2 or not rewriter.read_once(call.args[0]):
        return None
    source, steps = chain(rewriter, reshape, through_shared=False)
    shape, flat = rewriter.shape(source), rewriter.shape(call.args[0])
    if shape is None or flat is None or len(flat) != 2 or flat[0] != shape[0] or not steps:
        return None
    if all(kind == "reshape" for kind, _ in steps):
        return None
    order = order_after(shape, steps)
    rows = order[0]  # which element of an image each column is; the same for all images if the batch stayed in front
    if not np.array_equal(order, rows + np.arange(flat[0])[:, None] * flat[1]):
        return None
    reordered = np.empty_like(weight)
    reordered[rows] = weight
    return op.matmul(rewriter.emit(op.reshape(source, flat)), constant(reordered), out_dtype=dtype(call))


@rule("relax.matmul")
def keep_leading_axes(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """matmul(reshape(x), w) of joined leading axes as reshape(matmul(x, w)): what follows may then be fused."""
    reshape = rewriter.calls(call.args[0], "relax.reshape")
    weight, shape = rewriter.shape(call.args[1]), rewriter.shape(call)
    if reshape is None or weight is None or len(weight) != 2 or shape is None:
        return None
    source = rewriter.shape(reshape.args[0])
    if source is None or source[-1] != weight[0] or len(source) <= len(shape) or has_few_rows(source):
        return None
    return op.reshape(rewriter.emit(op.matmul(reshape.args[0], call.args[1], out_dtype=dtype(call))), shape)


@rule("relax.matmul")
def join_few_rows(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A product of many short matrices with one weight as that of one long matrix: a recurrent network's layer has
    (steps, batch, features), and register tiles are of neighbouring rows."""
    source, weight, shape = (rewriter.shape(each) for each in (*call.args, call))
    if source is None or weight is None or shape is None or len(weight) != 2 or not has_few_rows(source):
        return None
    joined = rewriter.emit(op.reshape(call.args[0], (int(np.prod(source[:-1])), source[-1])))
    return op.reshape(rewriter.emit(op.matmul(joined, call.args[1], out_dtype=dtype(call))), shape)


def has_few_rows(shape: Sequence[int]) -> bool:
    """Whether a tensor is of several matrices, each of few rows."""
    return len(shape) > 2 and shape[-2] < _FEW_ROWS and int(np.prod(shape[:-2])) > 1


@rule("relax.matmul")
def keep_heads(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A batched product of tensors whose batch axes were joined: they stay apart, as in the operators around it."""
    first, second = (rewriter.calls(argument, "relax.reshape") for argument in call.args)
    shape = rewriter.shape(call)
    if first is None or second is None or shape is None or len(shape) != 3:
        return None
    a, b = rewriter.shape(first.args[0]), rewriter.shape(second.args[0])
    if a is None or b is None or len(a) != 4 or len(b) != 4 or a[:2] != b[:2] or a[-1] != b[-2]:
        return None
    if (a[0] * a[1], a[2], b[3]) != shape:
        return None
    return op.reshape(rewriter.emit(op.matmul(first.args[0], second.args[0], out_dtype=dtype(call))), shape)


@rule(*_ANY_SHAPE, *_BINARY)
def reshape_later(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """f(reshape(x)) as reshape(f(x)), so that f is fused with the producer of x; also where that is transposed in
    between, if f has no other operands: the transpose is put off next."""
    is_alone = call.op.name in _ANY_SHAPE
    for position, argument in enumerate(call.args):
        reshape = rewriter.calls(argument, "relax.reshape")
        if reshape is None or rewriter.shape(argument) != rewriter.shape(call) or not rewriter.read_once(argument):
            continue
        source, target = rewriter.shape(reshape.args[0]), rewriter.shape(argument)
        if not source or not target or (source[-1] != target[-1] and not is_alone):
            continue
        # Only for epilogues of contractions, and operands that fit both shapes.
        between = _CHAIN if is_alone else ()
        if rewriter.calls(_root(rewriter, reshape.args[0], between), *CONTRACTIONS, "relax.einsum") is None:
            continue
        args = [_as_before(rewriter, other, source, target) for other in call.args]
        args[position] = reshape.args[0]
        known = [each for each in args if each is not None]
        if len(known) == len(args):
            return op.reshape(rewriter.emit(relax.Call(call.op, known, call.attrs, call.ty_args)), target)
    return None


def _is_number(rewriter: Rewriter, expr: relax.Expr) -> bool:
    value = rewriter.value(expr)
    return value is not None and value.ndim == 0


@rule("relax.multiply")
def gate_later(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """reshape(x) * f(reshape(x)), as SiLU and hard swish are written, as reshape(x * f(x))."""
    for reshaped, gate in (call.args, call.args[::-1]):
        reshape, steps = rewriter.calls(reshaped, "relax.reshape"), _made_of(rewriter, gate, reshaped)
        if reshape is None or not steps:
            continue
        source, shape = reshape.args[0], rewriter.shape(call)
        if shape is None or rewriter.calls(_root(rewriter, source), *CONTRACTIONS, "relax.einsum") is None:
            continue
        made = source
        for step, position in steps:
            args = [made if n == position else arg for n, arg in enumerate(step.args)]
            made = rewriter.emit(relax.Call(step.op, args, step.attrs, step.ty_args))
        return op.reshape(rewriter.emit(op.multiply(source, made)), shape)
    return None


def _made_of(rewriter: Rewriter, expr: relax.Expr, start: relax.Expr) -> list[tuple[relax.Call, int]]:
    """The operators that make an expression of another one and of numbers, the first one first, each with the place of
    what it goes on with among its arguments; empty if it is made otherwise, or something else reads what is between."""
    found: list[tuple[relax.Call, int]] = []
    while not expr.same_as(start):
        call = rewriter.calls(expr, *_ANY_SHAPE, *_BINARY)
        tensors = [] if call is None else [n for n, arg in enumerate(call.args) if not _is_number(rewriter, arg)]
        if call is None or len(tensors) != 1 or not rewriter.read_once(expr):
            return []
        found.insert(0, (call, tensors[0]))
        expr = call.args[tensors[0]]
    return found


@rule(*_ANY_SHAPE, *_BINARY)
def transpose_later(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """f(transpose(x), transpose(y)) as transpose(f(x, y)): transposes become adjacent, and cancel out."""
    moved = [rewriter.calls(argument, "relax.permute_dims") for argument in call.args]
    shapes = [rewriter.shape(argument) for argument in call.args]
    first = next((each for each in moved if each is not None), None)
    if first is None or first.attrs.axes is None:
        return None
    order = [int(axis) for axis in first.attrs.axes]
    args = []
    for argument, each, shape in zip(call.args, moved, shapes, strict=True):
        if shape is None:
            return None
        if each is None and math.prod(shape) == 1 and len(shape) <= len(order):
            args.append(argument)
            continue
        if each is None or each.attrs.axes is None or [int(axis) for axis in each.attrs.axes] != order:
            return None
        if shape != rewriter.shape(call) or not rewriter.read_once(argument):
            return None
        args.append(each.args[0])
    return op.permute_dims(rewriter.emit(relax.Call(call.op, args, call.attrs, call.ty_args)), order)


@rule(*_REDUCTIONS)
def transpose_after_reduction(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A reduction of what was transposed for it alone: the result is transposed, which is smaller."""
    moved = rewriter.calls(call.args[0], "relax.permute_dims")
    order = None if moved is None else order_of(moved)
    if moved is None or order is None or call.attrs.axis is None or not rewriter.read_once(call.args[0]):
        return None
    axes = {int(axis) % len(order) for axis in call.attrs.axis}
    reduce, keepdims = getattr(op, call.op.name.rpartition(".")[2]), bool(call.attrs.keepdims)
    found = rewriter.emit(reduce(moved.args[0], sorted(order[axis] for axis in axes), keepdims))
    kept = [each for axis, each in enumerate(order) if keepdims or axis not in axes]
    return in_order(rewriter, found, [sorted(kept).index(each) for each in kept])


@rule("relax.permute_dims")
def transpose_before_padding(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """transpose(pad(x)) as pad(transpose(x)): padding may then become a part of the convolution that reads it. But what
    brings channels first comes last (`lib.graph.rules.layouts`)."""
    pad = rewriter.calls(call.args[0], "relax.nn.pad")
    order = order_of(call)
    if pad is None or order is None or not rewriter.read_once(call.args[0]):
        return None
    if len(order) in (4, 5) and order == to_channels_first(len(order)):
        return None
    widths = [int(width) for width in pad.attrs.pad_width]
    moved = [width for axis in order for width in widths[2 * axis : 2 * axis + 2]]
    image = rewriter.emit(op.permute_dims(pad.args[0], order))
    return op.nn.pad(image, moved, str(pad.attrs.pad_mode), float(pad.attrs.pad_value))


def _root(rewriter: Rewriter, expr: relax.Expr, between: Sequence[str] = ()) -> relax.Expr:
    """The tensor that a chain of element-wise operators, and of those between them, begins with."""
    while (call := rewriter.calls(expr, *_ANY_SHAPE, *_BINARY, *between)) is not None:
        expr = call.args[0]
    return expr


def _as_before(
    rewriter: Rewriter, other: relax.Expr, source: tuple[int, ...], target: tuple[int, ...]
) -> relax.Expr | None:
    """The other operand for a tensor that is not reshaped yet, or None."""
    if not isinstance(other, relax.Expr) or isinstance(other, (tvm.tirx.FloatImm, tvm.tirx.IntImm)):
        return other
    shape = rewriter.shape(other)
    if shape is None:
        return None
    if not shape or int(np.prod(shape[:-1])) == 1:  # a scalar, or a vector along the last axis
        if len(shape) <= min(len(source), len(target)):
            return other
        value = rewriter.value(other)
        return constant(value.reshape(shape[-1:])) if value is not None else None
    if shape != target:
        apart = _with_units_of(shape, source, target)
        return None if apart is None else rewriter.emit(op.reshape(other, apart))
    same = rewriter.calls(other, "relax.reshape")
    if same is not None and rewriter.shape(same.args[0]) == source:
        return same.args[0]
    if (len(source), source) >= (len(target), target):
        return None  # in one direction alone: what is reshaped for another one would be reshaped back
    return rewriter.emit(op.reshape(other, source))  # of a residual sum, say: a view, which takes no time


def _with_units_of(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...] | None:
    """What is broadcast to `target`, as it is broadcast to a shape that differs in axes of one element alone."""
    if [n for n in source if n != 1] != [n for n in target if n != 1]:
        return None
    aligned = (1,) * (len(target) - len(shape)) + shape
    rest = iter([n for n, whole in zip(aligned, target, strict=True) if whole != 1])
    return tuple(1 if whole == 1 else next(rest) for whole in source)


@rule("relax.broadcast_to", "relax.strided_slice", "relax.nn.pad")
def drop_identity(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A broadcast to the same shape, a slice of everything, or a padding of width 0."""
    if rewriter.shape(call) != rewriter.shape(call.args[0]) or rewriter.shape(call) is None:
        return None
    if call.op.name == "relax.strided_slice" and any(int(s) < 0 for s in _strides(call)):
        return None
    if call.op.name == "relax.nn.pad" and any(int(width) for width in call.attrs.pad_width):
        return None
    return call.args[0]


def _strides(call: relax.Call) -> list[int]:
    given = call.args[4].fields if len(call.args) > 4 and isinstance(call.args[4], relax.Tuple) else []
    return [int(stride) for stride in given]


def bounds(rewriter: Rewriter, call: relax.Call) -> dict[int, tuple[int, int]] | None:
    """What a slice of stride 1 takes along each axis that it names, from the front; None for other slices."""
    return ranges(call, rewriter.shape(call.args[0]), rewriter.shape(call))


def ranges(
    call: relax.Call, before: Sequence[int] | None, after: Sequence[int] | None
) -> dict[int, tuple[int, int]] | None:
    """The same of a slice from one shape to another; None also where one is unknown."""
    axes, begins = (_numbers(part) for part in call.args[1:3])
    if before is None or after is None or axes is None or begins is None or any(step != 1 for step in _strides(call)):
        return None
    found = {}
    for axis, begin in zip(axes, begins, strict=True):
        extent = before[axis]
        first = min(max(begin + (extent if begin < 0 else 0), 0), extent)
        found[axis % len(before)] = (first, first + after[axis])
    return found


def _numbers(items: relax.Expr) -> list[int] | None:
    fields = items.fields if isinstance(items, relax.Tuple) else [items]
    return [int(each) for each in fields] if all(isinstance(each, tvm.tirx.IntImm) for each in fields) else None


def channels_last(rewriter: Rewriter, image: relax.Expr, rank: int) -> relax.Expr | None:
    """What an image, or a volume, with channels first is a transpose of; None if it is something else."""
    moved = rewriter.calls(image, "relax.permute_dims")
    return moved.args[0] if moved is not None and order_of(moved) == to_channels_first(rank) else None


def order_of(call: relax.Call) -> list[int] | None:
    """The axes of a transpose; None where it reverses them without naming any."""
    return None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]


def swaps_matrices(call: relax.Call) -> bool:
    """Whether a transpose is one of matrices: of the last two axes."""
    *batch, rows, columns = range(len(call.ty.shape))
    return order_of(call) == [*batch, columns, rows]


@rule("relax.concat")
def single_concat(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A concatenation of one tensor."""
    fields = rewriter.fields(call.args[0])
    return fields[0] if fields is not None and len(fields) == 1 else None


def _slice_of_split(index: int) -> Rule:
    @rule(f"relax.split[{index}]")
    def slice_of_split(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        """One part of a split as a slice, which is fused into its consumer; a split writes all of its parts."""
        shape = rewriter.shape(call.args[0])
        if shape is None:
            return None
        axis = int(call.attrs.axis) % len(shape)
        parts = call.attrs.indices_or_sections
        if isinstance(parts, (int, tvm.tirx.IntImm)):
            size = -(-shape[axis] // int(parts))
            bounds = [min(n * size, shape[axis]) for n in range(int(parts) + 1)]
        else:
            bounds = [0, *(int(part) for part in parts), shape[axis]]
        begin, end = bounds[index : index + 2]
        return op.strided_slice(call.args[0], [axis], [begin], [end], [1])

    return slice_of_split


@rule("relax.take")
def safe_take(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A lookup with clipped indices: TVM's fast mode reads out of bounds, and warns."""
    if str(call.attrs.mode) != "fast":
        return None
    axis = call.attrs.axis
    return op.take(call.args[0], call.args[1], None if axis is None else int(axis), "clip")


@rule("relax.gather_nd")
def take_of_gather(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Parts that are looked up by their place along the first axis alone."""
    shape = rewriter.shape(call.args[1])
    if not shape or shape[-1] != 1 or int(call.attrs.batch_dims):
        return None
    places = rewriter.emit(op.reshape(call.args[1], shape[:-1]))
    return op.take(call.args[0], places, 0, "clip")


@rule("relax.take")
def slice_of_take(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A lookup of known consecutive rows is a slice."""
    rows, shape = rewriter.value(call.args[1]), rewriter.shape(call.args[0])
    target, mode = rewriter.shape(call), str(call.attrs.mode)
    if (
        mode not in ("fast", "wrap", "clip")
        or rows is None
        or shape is None
        or target is None
        or call.attrs.axis is None
        or rows.size == 0
    ):
        return None
    axis = int(call.attrs.axis) % len(shape)
    given = rows.reshape(-1).astype(np.int64)
    flat = np.asarray(np.clip(given, 0, shape[axis] - 1) if mode == "clip" else given % shape[axis])
    first, last = int(flat[0]), int(flat[-1])
    if first < 0 or last >= shape[axis] or not np.array_equal(flat, np.arange(first, last + 1)):
        return None
    part = op.strided_slice(call.args[0], [axis], [first], [last + 1], [1])
    return op.reshape(rewriter.emit(part), target)


@rule(*_BINARY, "relax.where", "relax.logical_and", "relax.logical_or")
def broadcast_unread(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """A broadcast operand of an operator that broadcasts by itself."""
    for position, argument in enumerate(call.args):
        spread = rewriter.calls(argument, "relax.broadcast_to")
        if spread is None:
            continue
        args = [*call.args[:position], spread.args[0], *call.args[position + 1 :]]
        found = relax.Call(call.op, args, call.attrs, call.ty_args)
        if rewriter.shape(call) is None:
            return None
        if rewriter.shape(found) == rewriter.shape(call):
            return found
        if all(rewriter.shape(other) == () for n, other in enumerate(call.args) if n != position):
            return op.broadcast_to(rewriter.emit(found), rewriter.shape(call))
    return None


@rule("relax.logical_and")
def and_true(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """x & true is x, in the shape of both."""
    for x, other in (call.args, reversed(call.args)):
        value = rewriter.value(other)
        if value is not None and np.all(value) and rewriter.shape(call) is not None:
            return op.broadcast_to(x, rewriter.shape(call))
    return None


@rule("relax.squeeze")
def squeeze_named_axes(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Axes counted from the front: TVM 0.27's ConvertLayout reads memory that is not its own at negative ones."""
    shape, axes = rewriter.shape(call.args[0]), call.attrs.axis
    if shape is None or (axes is not None and all(int(axis) >= 0 for axis in axes)):
        return None
    named = range(len(shape)) if axes is None else [int(axis) % len(shape) for axis in axes]
    return op.squeeze(call.args[0], [axis for axis in named if shape[axis] == 1])


RULES: list[Rule] = [
    squeeze_named_axes,
    one_movement,
    flatten_in_order,
    keep_leading_axes,
    join_few_rows,
    keep_heads,
    reshape_later,
    gate_later,
    transpose_later,
    transpose_after_reduction,
    transpose_before_padding,
    drop_identity,
    single_concat,
    take_of_gather,
    *(_slice_of_split(index) for index in range(_MAX_PARTS)),
    slice_of_take,
    safe_take,
    broadcast_unread,
    and_true,
]
