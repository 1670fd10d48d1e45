"""How torch's operators are taken apart, and written in Relax where TVM 0.27's importer is wrong or costs time."""

import math
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tvm
from tvm import relax

from lib.models import torch_recurrence

Convert = Callable[[Any, Any], relax.Expr]


def decompositions(torch: ModuleType, whole: Sequence[Any] = ()) -> Any:
    """How operators are taken apart: as torch does it, but products stay whole.

    torch makes `addmm` of linear layers and `bmm` of batched products, in reshapes and expansions.

    Args:
        whole: Other operators that stay.
    """
    aten = torch.ops.aten
    table = torch.export.default_decompositions()
    for kept in (aten.linear.default, aten.matmul.default, *whole):
        table.pop(kept, None)
    table[aten.scaled_dot_product_attention.default] = _attention
    return table


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """scaled_dot_product_attention in four operators; torch's own decomposition scans all scores for masked rows.

    Args:
        query: `... x n x d`; key and value are `... x m x d`, of fewer heads if `enable_gqa`.
        attn_mask: Broadcasts to `... x n x m`; where it is False, or adds -inf, nothing is read.

    A row that may read nothing gives zeros, as in torch.
    """
    import torch

    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    scores = (query @ key.transpose(-2, -1)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if attn_mask is None:
        return scores.softmax(-1) @ value
    readable = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -math.inf
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
    result = (scores + attn_mask).softmax(-1) @ value
    return result if is_causal else torch.where(readable.any(-1, keepdim=True), result, 0.0)


def dtype_of(value: Any) -> str:
    """The type of a tensor of torch, as TVM calls it."""
    return str(value.dtype).removeprefix("torch.")


def _embedding(node: Any, importer: Any) -> relax.Var:
    """A plain gather by the ids as they come; the importer casts, flattens and restores them."""
    table, ids = (importer.env[argument] for argument in node.args[:2])
    return importer.block_builder.emit(relax.op.take(table, ids, axis=0, mode="clip"))


def _index(node: Any, importer: Any) -> relax.Var:
    """To read every element once, in order (as the masks of transformers are read), is to reshape."""
    x, indices = importer.env[node.args[0]], [importer.env.get(index) for index in node.args[1]]
    if all(isinstance(index, tvm.ir.Constant) for index in indices):
        numbers = np.arange(math.prod(node.args[0].meta["val"].shape)).reshape(node.args[0].meta["val"].shape)
        read = numbers[tuple(index.value.numpy() for index in indices)]
        if np.array_equal(read.ravel(), numbers.ravel()):
            return importer.block_builder.emit(relax.op.reshape(x, read.shape))
    crossed = _crossed(node, importer)
    return importer._index_tensor(node) if crossed is None else crossed


def _crossed(node: Any, importer: Any) -> relax.Var | None:
    """Neighbouring axes of which each is read at places of its own, as an enlarged volume reads them: axis by axis.
    None for all else; of three the importer broadcasts places to what has no common shape."""
    taken = [(axis, index) for axis, index in enumerate(node.args[1]) if index is not None]
    shapes = [tuple(index.meta["val"].shape) for _, index in taken]
    rank = max(map(len, shapes))
    along = [[rank - len(shape) + n for n, extent in enumerate(shape) if extent != 1] for shape in shapes]
    places = [place for each in along for place in each]
    axes = [axis for axis, _ in taken]
    is_crossed = all(len(each) == 1 for each in along) and places == sorted(set(places))
    if len(taken) == 1 or not is_crossed or axes != list(range(axes[0], axes[0] + len(axes))):
        return None
    found, emit = importer.env[node.args[0]], importer.block_builder.emit
    for axis, index in taken:
        found = emit(relax.op.take(found, emit(relax.op.reshape(importer.env[index], (-1,))), axis=axis))
    return emit(relax.op.reshape(found, tuple(node.meta["val"].shape)))


def _convolution(node: Any, importer: Any) -> relax.Var:
    """Of volumes, transposed: the importer has none."""
    x, weight, bias, strides, padding, dilation, is_transposed, more, groups = importer.retrieve_args(node)
    if not is_transposed or x.ty.ndim != 5:
        return importer._convolution(node)
    emit = importer.block_builder.emit
    found = emit(relax.op.nn.conv3d_transpose(
        x, weight, strides=list(strides), padding=[*padding, *padding], output_padding=list(more),
        dilation=list(dilation), groups=groups, data_layout="NCDHW", kernel_layout="IODHW",
    ))  # fmt: skip
    return found if bias is None else emit(relax.op.add(found, emit(relax.op.reshape(bias, (1, -1, 1, 1, 1)))))


def _select(node: Any, importer: Any) -> relax.Var:
    """A slice without its axis; the importer gathers by a constant index."""
    x = importer.env[node.args[0]]
    axis, index = node.args[1] % x.ty.ndim, node.args[2] % int(x.ty.shape[node.args[1]])
    part = relax.op.strided_slice(x, [axis], [index], [index + 1])
    return importer.block_builder.emit(relax.op.squeeze(importer.block_builder.emit(part), [axis]))


def _cumsum(node: Any, importer: Any) -> relax.Var:
    """Sums of booleans and small integers are int64 in torch; the importer keeps their type."""
    x = importer.env[node.args[0]]
    dtype = dtype_of(node.meta["val"])
    if str(x.ty.dtype) != dtype:
        x = importer.block_builder.emit(relax.op.astype(x, dtype))
    return importer.block_builder.emit(relax.op.cumsum(x, axis=node.args[1]))


def _promoted(operation: Callable[[relax.Expr, relax.Expr], relax.Expr], otherwise: Any) -> Convert:
    """Arithmetic and comparisons of numbers of two kinds, as torch promotes them: an integer and 0.5 are floats, and so
    is a quotient of integers. The importer gives a number the tensor's type, and takes no `alpha`.

    Args:
        otherwise: The same of numbers of Python.
    """

    def convert(node: Any, importer: Any) -> relax.Var:
        import torch

        emit, values = importer.block_builder.emit, [getattr(each, "meta", {}).get("val", each) for each in node.args]
        kind = torch.result_type(*values) if any(isinstance(each, torch.Tensor) for each in values) else torch.bool
        if operation is relax.op.divide and not kind.is_floating_point:
            kind = node.meta["val"].dtype
        if kind == torch.bool:
            both = [importer.env.get(each) for each in node.args[:2]]
            if operation in _OF_TRUTHS and None not in both:
                return emit(_OF_TRUTHS[operation](*both))
            return importer._binary_op(operation, otherwise)(node)

        def number(given: Any) -> relax.Expr:
            dtype, found = str(kind).removeprefix("torch."), importer.env.get(given, given)
            if not isinstance(found, relax.Expr):
                return relax.const(found, dtype)
            return found if str(found.ty.dtype) == dtype else emit(relax.op.astype(found, dtype))

        left, right = map(number, node.args)
        if node.kwargs.get("alpha", 1) != 1:
            right = emit(relax.op.multiply(right, number(node.kwargs["alpha"])))
        return emit(operation(left, right))

    return convert


_floor_divided = _promoted(relax.op.floor_divide, operator.floordiv)


def _divided(node: Any, importer: Any) -> relax.Expr:
    """Rounded down, of integers: the importer makes a number of Python an int32, whatever it divides."""
    if "int" in dtype_of(node.meta["val"]) and node.kwargs["rounding_mode"] == "floor":
        return _floor_divided(node, importer)
    return importer._div(node)


def _clamp(node: Any, importer: Any) -> relax.Var:
    """Integers with a limit on one side; the importer puts infinity on the other."""
    x = importer.env[node.args[0]]
    if "int" not in str(x.ty.dtype):
        return importer._clamp(node)
    limits = dict(zip(("min", "max"), node.args[1:], strict=False)) | node.kwargs
    for name, limited in (("min", relax.op.maximum), ("max", relax.op.minimum)):
        if limits.get(name) is not None:
            x = importer.block_builder.emit(limited(x, relax.const(limits[name], str(x.ty.dtype))))
    return x


def _sampled(node: Any, importer: Any) -> relax.Var:
    """An image at places that have their coordinates last in torch; the importer hands them on as if they came first,
    which is where Relax has them."""
    image, places = (importer.env[each] for each in node.args[:2])
    given = list(node.args[2:])
    method, padding, align_corners = given + [0, 0, False][len(given) :]
    found = relax.op.image.grid_sample(
        image,
        importer.block_builder.emit(relax.op.permute_dims(places, [0, 3, 1, 2])),
        method=("bilinear", "nearest", "bicubic")[method],
        layout="NCHW",
        padding_mode=("zeros", "border", "reflection")[padding],
        align_corners=bool(align_corners),
    )
    return importer.block_builder.emit(found)


def _filled(node: Any, importer: Any) -> relax.Var:
    """One value everywhere; TVM 0.27 cannot legalize `full` of Relax."""
    value, made = node.args[1], node.meta["val"]
    if not isinstance(value, int | float):
        return importer._full(node) if node.target.__name__ == "full.default" else importer._full_like(node)
    emit = importer.block_builder.emit
    return emit(relax.op.broadcast_to(relax.const(value, dtype_of(made)), tuple(map(int, made.shape))))


def _joined(node: Any, importer: Any) -> relax.Var:
    """torch leaves out empty tensors of one axis, with which caches begin."""
    parts = [importer.env[part] for part in node.args[0] if tuple(part.meta["val"].shape) != (0,)]
    axis = node.args[1] if len(node.args) > 1 else 0
    return importer.block_builder.emit(relax.op.concat(parts, axis)) if parts else importer.env[node.args[0][0]]


def _put(node: Any, importer: Any) -> relax.Var:
    """One value where a mask says so; the importer takes places alone."""
    (x, places, values), is_added = node.args[:3], len(node.args) > 3 and node.args[3]
    is_masked = len(places) == 1 and dtype_of(places[0].meta["val"]) == "bool"
    if not is_masked or is_added or values.meta["val"].numel() != 1:
        return importer._index_put(node)
    x, mask, value = (importer.env[each] for each in (x, places[0], values))
    missing = list(range(mask.ty.ndim, x.ty.ndim))
    mask = importer.block_builder.emit(relax.op.expand_dims(mask, missing)) if missing else mask
    return importer.block_builder.emit(relax.op.where(mask, value, x))


def _permute(node: Any, importer: Any) -> relax.Var:
    """Axes counted from the start: ConvertLayout takes no others."""
    x = importer.env[node.args[0]]
    return importer.block_builder.emit(relax.op.permute_dims(x, [axis % x.ty.ndim for axis in node.args[1]]))


def _squeeze(node: Any, importer: Any) -> relax.Var:
    """Axes counted from the start (ConvertLayout crashes on others), and only those of extent 1, as torch has it."""
    x = importer.env[node.args[0]]
    axes = {axis % x.ty.ndim for axis in np.atleast_1d(node.args[1]).tolist()}
    kept = sorted(axis for axis in axes if int(x.ty.shape[axis]) == 1)
    return importer.block_builder.emit(relax.op.squeeze(x, kept)) if kept else x


_OF_TRUTHS = {relax.op.multiply: relax.op.logical_and, relax.op.add: relax.op.logical_or}  # the same of booleans
_OF_TWO = {
    "add": (relax.op.add, operator.add),
    "sub": (relax.op.subtract, operator.sub),
    "mul": (relax.op.multiply, operator.mul),
    "div": (relax.op.divide, operator.truediv),
    "eq": (relax.op.equal, operator.eq),
    "ne": (relax.op.not_equal, operator.ne),
    "lt": (relax.op.less, operator.lt),
    "le": (relax.op.less_equal, operator.le),
    "gt": (relax.op.greater, operator.gt),
    "ge": (relax.op.greater_equal, operator.ge),
}

CONVERTERS: dict[str, Convert] = {
    **torch_recurrence.CONVERTERS,
    **{f"{name}.{of}": _promoted(*both) for name, both in _OF_TWO.items() for of in ("Tensor", "Scalar")},
    "cat.default": _joined,
    "clamp.default": _clamp,
    "convolution.default": _convolution,
    "cumsum.default": _cumsum,
    "div.Tensor_mode": _divided,
    "embedding.default": _embedding,
    "full.default": _filled,
    "full_like.default": _filled,
    "grid_sampler_2d.default": _sampled,
    "index.Tensor": _index,
    "index_put.default": _put,
    "permute.default": _permute,
    "select.int": _select,
    "squeeze.dim": _squeeze,
    "squeeze.dims": _squeeze,
}
