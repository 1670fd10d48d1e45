"""What nobody reads is not computed: of a classifier's last block, the tokens of which its head takes none.

A head that reads the first token (ViT, BERT) or the last one (a language model's next word) leaves all others of the
last block unread, behind its attention. Where slices take a part of a tensor and nothing reads the rest, whatever makes
it is made for that part: from the slices back, each operator is asked which part of what it reads it needs for the
part that is read of it. A part is a range along each axis, the smallest around all that is read.

What computes as much for a part as for the whole, or cannot be told apart by axes, stays whole; so does a tensor of
which more than half is read: a slice more before an operator costs as much as it spares.
Source: Weiser, "Program slicing" (ICSE 1981), here of elements of tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph.rewrite import arguments, constant, mutated, static_shape, value_of
from lib.graph.rules import movement
from lib.graph.rules.constants import ELEMENTWISE

Region = tuple[tuple[int, int], ...]  # along each axis, from the first element to behind the last
Needs = list[Region]  # of each tensor that a call reads

_MOST = 0.5  # of a tensor that is read, where the rest is left out


def left_out(module: tvm.IRModule) -> tvm.IRModule:
    """A module in which each tensor that slices take a part of is computed for that part alone, where that is worth it;
    the same module if there is none."""
    function = module["main"]
    read = _read(function)
    return mutated(_Narrower(module, read), module) if any(read.values()) else module


def _read(function: relax.Function) -> dict[relax.Var, Region | None]:
    """Of each variable that is read, the part that is to be computed; None for all of it."""
    read: dict[relax.Var, Region] = {}
    found: dict[relax.Var, Region | None] = {}
    _ask(read, [function.body.body])
    for block in reversed(function.body.blocks):
        for binding in reversed(block.bindings):
            value, region = binding.value, read.get(binding.var)
            if region is None:
                continue
            part = region if _is_worthwhile(region, binding.var) else None
            needs = _needs(value, part) if part else None
            if needs is None:
                part, needs = None, None if _is_empty(binding.var) else _needs(value, _whole(binding.var))
            found[binding.var] = part
            _ask(read, arguments(value), needs)
    return found


def _ask(read: dict[relax.Var, Region], tensors: Sequence[relax.Expr], needs: Needs | None = None) -> None:
    """Add to what is read: parts of tensors, or all of them."""
    for tensor, need in zip(tensors, needs or map(_whole, tensors), strict=True):
        if isinstance(tensor, relax.Var) and not _is_nothing(need, tensor):
            read[tensor] = _around(read[tensor], need) if tensor in read else need


def _around(one: Region, other: Region) -> Region:
    return tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(one, other, strict=True))


def _whole(tensor: relax.Expr) -> Region:
    """All of a tensor; of what has no known shape, nothing that could be told apart."""
    return tuple((0, extent) for extent in static_shape(tensor) or ())


def _is_nothing(need: Region, tensor: relax.Expr) -> bool:
    """Whether nothing is needed of a tensor that has elements."""
    return need != _whole(tensor) and not math.prod(_extents(need))


def _is_empty(tensor: relax.Expr) -> bool:
    """Whether it has no elements (the words before the first one): what makes it is left as it is, and so all it reads,
    although it needs nothing of that."""
    return 0 in (static_shape(tensor) or ())


def _extents(region: Region) -> tuple[int, ...]:
    return tuple(last - first for first, last in region)


def _is_worthwhile(region: Region, tensor: relax.Expr) -> bool:
    n_read, n = math.prod(_extents(region)), math.prod(static_shape(tensor) or (0,))
    return n_read <= _MOST * n and region != _whole(tensor)


# Which part of what they read operators need.


def _needs(value: relax.Expr, region: Region) -> Needs | None:
    """Of each tensor among `arguments`, the part that is needed to compute a part of a result; None where that cannot
    be told."""
    rule = _NEEDS.get(value.op.name) if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) else None
    if rule is None or not region or any(isinstance(arg, relax.Var) and not static_shape(arg) for arg in value.args):
        return None
    return rule(value, region)


def _of_elements(call: relax.Call, region: Region) -> Needs | None:
    return [_broadcast(_whole(arg), region) for arg in arguments(call)]


def _broadcast(whole: Region, region: Region) -> Region:
    """Of what is broadcast to a result, what is read for a part of that."""
    parts = region[len(region) - len(whole) :]
    return tuple(each if each == (0, 1) else part for each, part in zip(whole, parts, strict=True))


def _along(axes: Callable[[relax.Call], Sequence[int]]) -> Callable[[relax.Call, Region], Needs | None]:
    """Of what computes whole rows along some axes of its first tensor, and reads all of what else it reads."""

    def needs(call: relax.Call, region: Region) -> Needs | None:
        data, *rest = map(_whole, arguments(call))
        rows = {axis % len(region) for axis in axes(call)}
        return [region, *rest] if all(region[n] == data[n] for n in rows) else None

    return needs


def _of_reduction(call: relax.Call, region: Region) -> Needs | None:
    whole, attrs = _whole(call.args[0]), call.attrs
    if attrs.axis is None:
        return None
    axes = {int(axis) % len(whole) for axis in attrs.axis}
    kept = iter(part for n, part in enumerate(region) if not attrs.keepdims or n not in axes)
    return [tuple(each if n in axes else next(kept) for n, each in enumerate(whole))]


def _of_product(call: relax.Call, region: Region) -> Needs | None:
    """A row of one operand and a column of the other; matrices that are broadcast are needed as they are."""
    a, b = map(_whole, call.args)
    if len(a) < 2 or len(b) < 2:
        return None
    batches = [_broadcast(each[:-2], region[:-2]) for each in (a, b)]
    return [(*batches[0], region[-2], a[-1]), (*batches[1], b[-2], region[-1])]


def _of_einsum(call: relax.Call, region: Region) -> Needs | None:
    text = str(call.attrs.subscripts).replace(" ", "")
    operands, _, result = text.partition("->")
    if not result or "." in text or len(set(result)) < len(result):
        return None
    parts = dict(zip(result, region, strict=True))
    tensors = zip(operands.split(","), map(_whole, arguments(call)), strict=True)
    return [_broadcast(whole, tuple(map(parts.get, labels, whole))) for labels, whole in tensors]


def _of_transpose(call: relax.Call, region: Region) -> Needs | None:
    axes = call.attrs.axes
    order = range(len(region))[::-1] if axes is None else [int(axis) for axis in axes]
    return [tuple(part for _, part in sorted(zip(order, region, strict=True)))]


def _of_reshape(call: relax.Call, region: Region) -> Needs | None:
    """Along axes that a tensor has before and after, behind as many elements: of those alone a part may be needed."""
    before, after = static_shape(call.args[0]), static_shape(call)
    if before is None or after is None:
        return None
    places = {at: n for n, at in enumerate(_places(before)) if before[n] > 1}
    needs = list(_whole(call.args[0]))
    for place, extent, part in zip(_places(after), after, region, strict=True):
        if part == (0, extent):
            continue
        axis = places.get(place)
        if axis is None or before[axis] != extent:
            return None
        needs[axis] = part
    return [tuple(needs), *map(_whole, arguments(call)[1:])]


def _places(shape: Sequence[int]) -> list[int]:
    """Of each axis, how many times over the axes before it are gone through."""
    return [1, *accumulate(shape, lambda a, b: a * b)][: len(shape)]


def _of_broadcast(call: relax.Call, region: Region) -> Needs | None:
    return [_broadcast(_whole(call.args[0]), region), *map(_whole, arguments(call)[1:])]


def _of_concatenation(call: relax.Call, region: Region) -> Needs | None:
    """Of each tensor what of it is in the part; nothing of most, perhaps."""
    tensors, axis, needs, before = arguments(call), int(call.attrs.axis or 0) % len(region), [], 0
    for whole in map(_whole, tensors):
        extent = whole[axis][1]
        first, last = (min(max(end - before, 0), extent) for end in region[axis])
        needs.append((*region[:axis], (first, last) if first < last else (0, 0), *region[axis + 1 :]))
        before += extent
    return needs


def _of_slice(call: relax.Call, region: Region) -> Needs | None:
    """The range itself, where it has no steps."""
    taken = movement.ranges(call, static_shape(call.args[0]), static_shape(call))
    if taken is None:
        return None
    starts = [taken.get(axis, (0, 0))[0] for axis in range(len(region))]
    needs = tuple((start + first, start + last) for start, (first, last) in zip(starts, region, strict=True))
    return [needs, *map(_whole, arguments(call)[1:])]


_MORE_OF_ELEMENTS = (
    "astype", "ceil", "clip", "cos", "mod", "nn.gelu_tanh", "nn.leakyrelu", "nn.softplus", "sign", "sin", "trunc",
)  # fmt: skip
_NEEDS: Mapping[str, Callable[[relax.Call, Region], Needs | None]] = {
    **dict.fromkeys((*ELEMENTWISE, *(f"relax.{name}" for name in _MORE_OF_ELEMENTS)), _of_elements),
    "relax.nn.layer_norm": _along(lambda call: [int(axis) for axis in call.attrs.axes]),
    "relax.nn.rms_norm": _along(lambda call: [int(axis) for axis in call.attrs.axes]),
    "relax.nn.softmax": _along(lambda call: [int(call.attrs.axis)]),
    "relax.nn.log_softmax": _along(lambda call: [int(call.attrs.axis)]),
    **dict.fromkeys((f"relax.{name}" for name in ("sum", "mean", "max", "min", "prod", "variance")), _of_reduction),
    "relax.matmul": _of_product,
    "relax.einsum": _of_einsum,
    "relax.permute_dims": _of_transpose,
    **dict.fromkeys((f"relax.{name}" for name in ("reshape", "flatten", "squeeze", "expand_dims")), _of_reshape),
    "relax.broadcast_to": _of_broadcast,
    "relax.concat": _of_concatenation,
    "relax.strided_slice": _of_slice,
}
_SHAPED = ("relax.reshape", "relax.flatten", "relax.squeeze", "relax.expand_dims")


@mutator
class _Narrower(PyExprMutator):
    """Computes parts in the place of tensors."""

    def __init__(self, module: tvm.IRModule, read: Mapping[relax.Var, Region | None]) -> None:
        super().__init__(module)
        self._read = read
        self._parts: dict[tuple[Any, Region], relax.Expr] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        call, region = binding.value, self._read.get(binding.var)
        if binding.var not in self._read:
            return
        if region is None and not any(self._read.get(arg) for arg in arguments(call) if isinstance(arg, relax.Var)):
            super().visit_var_binding_(binding)
            return
        computed = region or _whole(binding.var)
        needs = _needs(call, computed)
        assert needs is not None, "only what told its needs was narrowed, or read a part"
        pairs = zip(arguments(call), needs, strict=True)
        tensors = [self._part(arg, need) for arg, need in pairs if not _is_nothing(need, arg)]
        # What is read behind a dataflow block is none of the variables within it.
        is_result = self.builder_.current_block_is_dataflow() and not isinstance(binding.var, relax.DataflowVar)
        emit = self.builder_.emit_output if is_result else self.builder_.emit
        self.set_var_remap(binding.var, emit(_alike(call, tensors, _extents(computed))))

    def _part(self, tensor: relax.Expr, need: Region) -> relax.Expr:
        """A part of what a call reads; nothing is done for what is no tensor."""
        if not isinstance(tensor, (relax.Var, tvm.ir.Constant)):
            return tensor
        there = (self._read.get(tensor) if isinstance(tensor, relax.Var) else None) or _whole(tensor)
        if need == there:
            return self.visit_expr(tensor)
        if isinstance(tensor, tvm.ir.Constant):
            return constant(value_of(tensor)[tuple(slice(*each) for each in need)])
        if (tensor, need) not in self._parts:
            axes = [n for n in range(len(need)) if need[n] != there[n]]
            begins, ends = ([need[n][end] - there[n][0] for n in axes] for end in (0, 1))
            self._parts[tensor, need] = self.builder_.emit(
                op.strided_slice(self.visit_expr(tensor), axes, begins, ends)
            )
        return self._parts[tensor, need]


def _alike(call: relax.Call, tensors: Sequence[relax.Expr], shape: Sequence[int]) -> relax.Expr:
    """The same operator on parts, for a result of a shape."""
    if call.op.name == "relax.strided_slice":  # the part is what it takes
        return tensors[0]
    if call.op.name in _SHAPED:
        return op.reshape(tensors[0], tuple(shape))
    if call.op.name == "relax.broadcast_to":
        return op.broadcast_to(tensors[0], tuple(shape))
    args = [relax.Tuple(tensors)] if isinstance(call.args[0], relax.Tuple) else tensors
    return relax.Call(call.op, args, call.attrs, call.ty_args)
