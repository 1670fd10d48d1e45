"""torch's operators in Relax, where TVM 0.27's importer has none, is wrong, or costs time."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax

from lib.models import torch_indexing, torch_pooling, torch_quantized, torch_recurrence, torch_resize, torch_sampling

Convert = Callable[[Any, Any], relax.Expr]


def dtype_of(value: Any) -> str:
    """The type of a tensor of torch, as TVM calls it."""
    return str(value.dtype).removeprefix("torch.")


def _embedding(node: Any, importer: Any) -> relax.Var:
    """A plain gather by the ids as they come; the importer casts, flattens and restores them."""
    table, ids = (importer.env[argument] for argument in node.args[:2])
    return importer.block_builder.emit(relax.op.take(table, ids, axis=0, mode="clip"))


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
    """A slice without its axis; the importer gathers by a constant index. Complex numbers have an axis more than in
    torch (`lib.models.torch_complex`)."""
    x = importer.env[node.args[0]]
    axis = node.args[1] % node.args[0].meta["val"].ndim
    index = node.args[2] % int(x.ty.shape[axis])
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
_OF_INTEGERS = {"floor": _floor_divided, "trunc": _promoted(relax.op.divide, operator.truediv)}


def _divided(node: Any, importer: Any) -> relax.Expr:
    """Of integers rounded down or towards zero: the importer makes a number of Python an int32, whatever it divides."""
    if "int" in dtype_of(node.meta["val"]):
        return _OF_INTEGERS[node.kwargs["rounding_mode"]](node, importer)
    return importer._div(node)


def _power(node: Any, importer: Any) -> relax.Expr:
    """Of integers in double precision, since TVM's power is of floats."""
    made, emit = dtype_of(node.meta["val"]), importer.block_builder.emit
    if "int" not in made:
        return importer._binary_op(relax.op.power, operator.pow)(node)

    def double(given: Any) -> relax.Expr:
        found = importer.env.get(given, given)
        wide = isinstance(found, relax.Expr)
        return emit(relax.op.astype(found, "float64")) if wide else relax.const(found, "float64")

    power = emit(relax.op.power(*map(double, node.args)))
    return emit(relax.op.astype(emit(relax.op.round(power)), made))


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


def _permute(node: Any, importer: Any) -> relax.Var:
    """Axes counted from the start: ConvertLayout takes no others. That of complex numbers' parts stays the last."""
    x, rank = importer.env[node.args[0]], node.meta["val"].ndim
    order = [*(axis % rank for axis in node.args[1]), *range(rank, x.ty.ndim)]
    return importer.block_builder.emit(relax.op.permute_dims(x, order))


def _squeeze(node: Any, importer: Any) -> relax.Var:
    """Axes counted from the start (ConvertLayout crashes on others), and only those of extent 1, as torch has it."""
    x = importer.env[node.args[0]]
    axes = {axis % x.ty.ndim for axis in np.atleast_1d(node.args[1]).tolist()}
    kept = sorted(axis for axis in axes if int(x.ty.shape[axis]) == 1)
    return importer.block_builder.emit(relax.op.squeeze(x, kept)) if kept else x


def _extreme(of_all: Callable[..., relax.Expr]) -> Convert:
    """The largest or the smallest along axes; of all elements, where none are named."""

    def convert(node: Any, importer: Any) -> relax.Var:
        value = importer.env[node.args[0]]
        axes = list(node.args[1]) if len(node.args) > 1 else []
        keepdims = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
        found = of_all(value, [axis % value.ty.ndim for axis in axes] or None, keepdims) if value.ty.ndim else value
        return importer.block_builder.emit(found)

    return convert


def _smallest_along(node: Any, importer: Any) -> relax.Var:
    """And where it was."""
    x, (axis, *rest), emit = importer.env[node.args[0]], node.args[1:], importer.block_builder.emit
    both = emit(relax.op.topk(x, k=1, axis=axis, largest=False, ret_type="both", dtype="int64"))
    keepdim = rest[0] if rest else node.kwargs.get("keepdim", False)
    parts = [both[0], both[1]] if keepdim else [emit(relax.op.squeeze(both[n], [axis])) for n in (0, 1)]
    return emit(relax.Tuple(parts))


def _product(node: Any, importer: Any) -> relax.Var:
    x, axis, *rest = node.args
    keepdims = rest[0] if rest else node.kwargs.get("keepdim", False)
    value, dtype = importer.env[x], dtype_of(node.meta["val"])
    if str(value.ty.dtype) != dtype:
        value = importer.block_builder.emit(relax.op.astype(value, dtype))
    return importer.block_builder.emit(relax.op.prod(value, axis, keepdims))


def _parts(node: Any, importer: Any) -> Any:
    """A tensor that is one part is that part; Relax's `split` into one is no tuple."""
    return [importer.env[node.args[0]]] if len(node.meta["val"]) == 1 else importer._split(node)


def _of_norm(otherwise: str) -> Convert:
    """A norm; the importer gives its result in place of its mean and its deviation as well."""

    def convert(node: Any, importer: Any) -> Any:
        if any(len(user.args) > 1 and user.args[1] != 0 for user in node.users):
            raise ValueError(f"of {node.target.__name__} nothing but the norm is imported, and its mean is read")
        return getattr(importer, otherwise)(node)

    return convert


def _scattered(node: Any, importer: Any) -> relax.Var:
    """Elements added to others, multiplied with them, or the extreme of both, where indices say."""
    x, axis, index, source, *rest = node.args
    how = _SCATTERS[rest[0] if rest else node.kwargs.get("reduce", "sum")]
    data, places, values = (importer.env[each] for each in (x, index, source))
    emit, extents = importer.block_builder.emit, [int(n) for n in places.ty.shape]
    if [int(n) for n in values.ty.shape] != extents:  # as many as there are indices
        values = emit(relax.op.strided_slice(values, list(range(len(extents))), [0] * len(extents), extents))
    return emit(relax.op.scatter_elements(data, places, values, axis=axis, reduction=how))


_SCATTERS = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max", "amin": "min"}
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
    **torch_indexing.CONVERTERS,
    **torch_pooling.CONVERTERS,
    **torch_quantized.CONVERTERS,
    **torch_resize.CONVERTERS,
    **torch_sampling.CONVERTERS,
    **{f"{name}.{of}": _promoted(*both) for name, both in _OF_TWO.items() for of in ("Tensor", "Scalar")},
    "amax.default": _extreme(relax.op.max),
    "amin.default": _extreme(relax.op.min),
    "cat.default": _joined,
    "clamp.default": _clamp,
    "convolution.default": _convolution,
    "cumsum.default": _cumsum,
    "div.Tensor_mode": _divided,
    "embedding.default": _embedding,
    "full.default": _filled,
    "full_like.default": _filled,
    "min.dim": _smallest_along,
    "_native_batch_norm_legit.no_stats": _of_norm("_batch_norm_legit_no_stats"),
    "_native_batch_norm_legit_no_training.default": _of_norm("_batch_norm_legit_no_training"),
    "native_group_norm.default": _of_norm("_native_group_norm"),
    "native_layer_norm.default": _of_norm("_native_layer_norm"),
    "permute.default": _permute,
    **{f"pow.{of}": _power for of in ("Scalar", "Tensor_Tensor")},
    "prod.dim_int": _product,
    "scatter_add.default": _scattered,
    "scatter.reduce": _scattered,
    "scatter_reduce.two": _scattered,
    "select.int": _select,
    "squeeze.dim": _squeeze,
    "split.Tensor": _parts,
    "split_with_sizes.default": _parts,
    "squeeze.dims": _squeeze,
}
