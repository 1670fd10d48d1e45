"""Integers for what ONNX writes as floats between `dequantize` and `quantize` (QDQ): before all other rules.

A convolution or product of dequantised bytes is one of the bytes themselves, with sums in int32, which are then scaled:

    sum (x - z) * s * w * t  =  (sum x * w  -  z * sum w) * s * t

so that only the scaling, and what follows it, is left in float32, where FuseOps puts it at the end of the kernel; there
the next `quantize` rounds as ONNX defines it, to the nearest, ties to even. What is padded with zeros is, in bytes,
padded with their zero point. Signed activations are made unsigned where they are quantised: that is what instructions
take (`lib.machine.dots`), and the zero point says the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import CONVOLUTIONS, Rewriter, Rule, alike, constant, dtype, rule

_Q, _DQ = "relax.quantize", "relax.dequantize"
_BYTES = {"uint8": (0, 255), "int8": (-128, 127)}
_EXACT = 1 << 16  # bytes whose sum float32 has exactly
SIGN = 128  # by which unsigned bytes are larger than signed ones
_REORDERINGS = ("relax.reshape", "relax.permute_dims", "relax.squeeze", "relax.expand_dims", "relax.flatten")
_MOVES = (*_REORDERINGS, "relax.strided_slice")


@dataclass(frozen=True, slots=True)
class _Weight:
    """Bytes that count in units of a scale for each output channel."""

    values: np.ndarray  # int8
    scales: np.ndarray  # one, or one for each channel
    zeros: np.ndarray  # int32, as many as there are scales: what stands for zero


def _scalars(rewriter: Rewriter, call: relax.Call) -> tuple[float, int] | None:
    """Scale and zero point of a call of either operator, where they are constants for the whole tensor."""
    scale, zero = rewriter.value(call.args[1]), rewriter.value(call.args[2])
    if scale is None or zero is None or scale.size != 1 or zero.size != 1:
        return None
    return float(scale.reshape(())), int(zero.reshape(()))


def _activation(rewriter: Rewriter, expr: relax.Expr) -> tuple[relax.Expr, float, int] | None:
    """Unsigned bytes that an expression dequantises, with their scale and zero point."""
    call = rewriter.calls(expr, _DQ)
    found = _scalars(rewriter, call) if call is not None else None
    if call is None or found is None or dtype(call.args[0]) != "uint8" or rewriter.value(call.args[0]) is not None:
        return None
    return call.args[0], *found


def _any_activation(rewriter: Rewriter, expr: relax.Expr) -> tuple[relax.Expr, float, int | relax.Expr] | None:
    """The same; their zero point may be one that is computed, of DynamicQuantizeLinear."""
    if (known := _activation(rewriter, expr)) is not None:
        return known
    call = rewriter.calls(expr, _DQ)
    scale = rewriter.value(call.args[1]) if call is not None else None
    if call is None or scale is None or scale.size != 1 or rewriter.value(call.args[2]) is not None:
        return None
    if (
        dtype(call.args[0]) != "uint8"
        or dtype(call.args[2]) != "uint8"
        or rewriter.shape(call.args[2]) not in ((), (1,))
    ):
        return None
    return call.args[0], float(scale.reshape(())), call.args[2]


def _weight(rewriter: Rewriter, expr: relax.Expr, channels: int) -> _Weight | None:
    """The signed bytes that an expression dequantises, with scales along an axis."""
    order = None
    if (moved := rewriter.calls(expr, "relax.permute_dims")) is not None:
        order, expr = moved.attrs.axes, moved.args[0]
    call = rewriter.calls(expr, _DQ)
    if call is None:
        return None
    values, scales, zeros = (rewriter.value(arg) for arg in call.args)
    if values is None or scales is None or zeros is None or values.dtype not in (np.int8, np.uint8):
        return None
    offset = SIGN if values.dtype == np.uint8 else 0
    axis = int(call.attrs.axis) % values.ndim
    if scales.ndim > 1 or zeros.size not in (1, scales.size):
        return None
    if order is not None or moved is not None:
        axes = [int(n) for n in order] if order is not None else list(reversed(range(values.ndim)))
        values, axis = np.transpose(values, axes), axes.index(axis)
    if scales.size > 1 and axis != channels % values.ndim:
        return None
    around = np.broadcast_to(zeros.reshape(-1).astype(np.int32) - offset, scales.size)
    return _Weight((values.astype(np.int16) - offset).astype(np.int8), scales.reshape(-1).astype(np.float32), around)


@rule(_DQ)
def unsigned_activation(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Signed bytes that come from `quantize` could as well be unsigned, 128 larger."""
    made, found = rewriter.calls(call.args[0], _Q), _scalars(rewriter, call)
    if made is None or found is None or dtype(call.args[0]) != "int8":
        return None
    before = _scalars(rewriter, made)
    if before is None:
        return None
    quantized = rewriter.emit(_quantize(made.args[0], before[0], before[1] + SIGN, "uint8"))
    return _dequantize(quantized, found[0], found[1] + SIGN, "uint8")


def _quantize(data: relax.Expr, scale: float, zero: int, kind: str) -> relax.Expr:
    return op.quantize(data, constant(np.array(scale, np.float32)), constant(np.array(zero, kind)), out_dtype=kind)


def _dequantize(data: relax.Expr, scale: float, zero: int, kind: str) -> relax.Expr:
    parameters = constant(np.array(scale, np.float32)), constant(np.array(zero, kind))
    return op.dequantize(data, *parameters, out_dtype="float32")


@rule(*CONVOLUTIONS)
def integer_convolution(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Of dequantised bytes, in NCHW, or NCW, as ONNX has it."""
    attrs = call.attrs
    if (str(attrs.data_layout), str(attrs.kernel_layout)) not in (("NCHW", "OIHW"), ("NCW", "OIW")):
        return None
    data, weight = _any_activation(rewriter, call.args[0]), _weight(rewriter, call.args[1], 0)
    if data is None or weight is None:
        return None
    image, scale, zero = data
    padding = [int(n) for n in attrs.padding]  # before each axis of space, then after each
    rank = len(padding) // 2
    along, is_symmetric = (1, -1, *[1] * rank), not weight.zeros.any()
    if not is_symmetric and (int(attrs.groups) not in (1, len(weight.values)) or weight.values[0].size > _EXACT):
        return None
    if any(padding):
        image = _padded(rewriter, image, padding, zero)
    sums = rewriter.emit(alike(call, image, constant(weight.values), "int32", [0] * len(padding)))
    if not is_symmetric:
        total = _windows(rewriter, call, image, weight.values)
        n = int(weight.values[0].size)
        sums = _around_zero(rewriter, sums, total, zero, n, weight.zeros.reshape(along))
    by_channel = weight.values.sum(tuple(range(1, rank + 2)), np.int64)
    return _scaled(rewriter, sums, by_channel, zero, scale * weight.scales, along)


def _windows(rewriter: Rewriter, call: relax.Call, image: relax.Expr, weight: np.ndarray) -> relax.Expr:
    """Sums of what a convolution reads for each pixel, in int32: of all channels at once, before windows are summed, or
    of each by itself where the convolution is depthwise."""
    wide = rewriter.emit(op.astype(image, "int32"))
    if int(call.attrs.groups) == 1:
        wide = rewriter.emit(op.sum(wide, 1, keepdims=True))
        if all(n == 1 for n in (*weight.shape[2:], *call.attrs.strides)):
            return wide
    groups = 1 if int(call.attrs.groups) == 1 else len(weight)
    ones = constant(np.ones((groups, 1, *weight.shape[2:]), np.float32))
    padding, name = [0] * len(call.attrs.padding), call.op.name.rpartition(".")[2]
    found = getattr(op.nn, name)(
        rewriter.emit(op.astype(wide, "float32")), ones, [int(n) for n in call.attrs.strides], padding,
        [int(n) for n in call.attrs.dilation], groups, str(call.attrs.data_layout), str(call.attrs.kernel_layout),
    )  # fmt: skip
    return rewriter.emit(op.astype(rewriter.emit(found), "int32"))


def _padded(rewriter: Rewriter, image: relax.Expr, padding: Sequence[int], zero: int | relax.Expr) -> relax.Expr:
    """Channels first, with zeros around, as bytes. A zero point that is computed is taken from the bytes, which may
    pass below zero and come out at 255, and added again once zeros are there."""
    rank = len(padding) // 2
    around = [0, 0, 0, 0, *(padding[n + side * rank] for n in range(rank) for side in (0, 1))]
    if isinstance(zero, int):
        return rewriter.emit(op.nn.pad(image, around, "constant", float(zero)))
    aligned = rewriter.emit(op.reshape(zero, (1,) * (rank + 2)))
    padded = rewriter.emit(op.nn.pad(rewriter.emit(op.subtract(image, aligned)), around, "constant", 0.0))
    return rewriter.emit(op.add(padded, aligned))


def _around_zero(
    rewriter: Rewriter, sums: relax.Expr, total: relax.Expr, zero: int | relax.Expr, n: int, zeros: np.ndarray
) -> relax.Expr:
    """Sums of products of bytes with weights that have zero points of their own:

        sum (x - z) (w - v)  =  sum (x - z) w  -  v (sum x  -  n z)

    of which the first term is left to `_scaled`.

    Args:
        total: Sums of the bytes alone.
        n: How many were summed.
        zeros: v, in the rank of the sums.
    """
    shape = (1,) * len(rewriter.shape(sums) or ())
    if isinstance(zero, int):
        less: relax.Expr = constant(np.full(shape, n * zero, np.int32))
    else:
        wide = rewriter.emit(op.reshape(rewriter.emit(op.astype(zero, "int32")), shape))
        less = rewriter.emit(op.multiply(wide, constant(np.full(shape, n, np.int32))))
    above = rewriter.emit(op.subtract(total, less))
    return rewriter.emit(op.subtract(sums, rewriter.emit(op.multiply(above, constant(zeros.astype(np.int32))))))


@rule("relax.matmul")
def integer_product(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Of dequantised bytes and a constant matrix of them."""
    weight = _weight(rewriter, call.args[1], -1)
    if weight is None or weight.values.ndim != 2:
        return None
    data = _any_activation(rewriter, call.args[0])
    if data is None:
        return None
    x, scale, zero = data
    sums = rewriter.emit(op.matmul(x, constant(weight.values), out_dtype="int32"))
    if weight.zeros.any():
        total = rewriter.emit(op.sum(rewriter.emit(op.astype(x, "int32")), -1, keepdims=True))
        along = (1,) * (len(rewriter.shape(x) or ()) - 1)
        sums = _around_zero(rewriter, sums, total, zero, len(weight.values), weight.zeros.reshape(*along, -1))
    return _scaled(rewriter, sums, weight.values.sum(0, np.int64), zero, scale * weight.scales, (-1,))


@rule("relax.matmul")
def integer_product_of_activations(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Of two dequantised tensors with the same batch, as attention has them. With y in signed bytes:

        sum (x - z) (y - v) s t  =  (sum x y  -  v sum x  -  z sum y  +  k z v) s t

    where sums over x alone, and over y alone, are computed once for each row, and each column.
    """
    data, other = _activation(rewriter, call.args[0]), _activation(rewriter, call.args[1])
    if data is None or other is None or len(rewriter.shape(call) or ()) < 3:
        return None
    (x, s, z), (unsigned, t, v) = data, other
    shapes = rewriter.shape(x), rewriter.shape(unsigned)
    if shapes[0] is None or shapes[1] is None or shapes[0][:-2] != shapes[1][:-2]:
        return None
    signed = rewriter.emit(op.subtract(rewriter.emit(op.astype(unsigned, "int32")), _integer(SIGN)))
    y, v = rewriter.emit(op.astype(signed, "int8")), v - SIGN
    sums = op.matmul(x, y, out_dtype="int32")
    for factor, axis, zero in ((x, -1, v), (y, -2, z)):
        if zero:
            alone = rewriter.emit(op.sum(rewriter.emit(op.astype(factor, "int32")), axis, keepdims=True))
            sums = op.subtract(rewriter.emit(sums), rewriter.emit(op.multiply(alone, _integer(zero))))
    constant_part = np.array([-shapes[0][-1] * v])
    return _scaled(rewriter, sums, constant_part, z, np.array([s * t]), (1,) * len(shapes[0]))


def _integer(value: int) -> relax.Expr:
    return constant(np.array([value], np.int32))


@rule(_DQ)
def units_that_are_computed(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Bytes in units of a tensor that are chosen when its values are: as numbers, times that scale."""
    values, scale, zero = call.args
    if rewriter.value(scale) is not None or rewriter.shape(scale) not in ((), (1,)):
        return None
    counted = rewriter.emit(op.dequantize(values, constant(np.array(1.0, np.float32)), zero, out_dtype="float32"))
    return op.multiply(counted, rewriter.emit(op.reshape(scale, (1,) * len(rewriter.shape(values) or ()))))


@rule(*CONVOLUTIONS, "relax.matmul")
def units_after_products(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Such a scale multiplies what comes of a product with dequantised weights, so that the product is one of bytes."""
    scaled = rewriter.calls(call.args[0], "relax.multiply")
    if scaled is None or rewriter.calls(scaled.args[0], _DQ) is None:
        return None
    rank, axis = len(rewriter.shape(call) or ()), -1 if str(call.op.name) == "relax.matmul" else 0
    if _weight(rewriter, call.args[1], axis) is None or rewriter.shape(scaled.args[1]) != (1,) * rank:
        return None
    return op.multiply(rewriter.emit(alike(call, scaled.args[0], call.args[1], "float32")), scaled.args[1])


@rule("relax.multiply")
def units_of_sums(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """What is computed, times a constant for all of a tensor: the latter as a tensor, too, so that it is a parameter,
    and subgraphs that differ in it alone are one."""
    for scale, factor in ((0, 1), (1, 0)):
        value = rewriter.value(call.args[factor])
        if value is not None and value.ndim == 0 and rewriter.shape(call.args[scale]) == ():
            long = rewriter.emit(op.reshape(call.args[scale], (1,)))
            product = rewriter.emit(op.multiply(long, constant(value.reshape(1))))
            return op.reshape(product, ())
    return None


@rule("relax.astype")
def integers_again(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Sums that were scaled by one, and are to be integers."""
    scaled = rewriter.calls(call.args[0], "relax.multiply")
    factor = rewriter.value(scaled.args[1]) if scaled is not None else None
    if scaled is None or factor is None or np.any(factor != 1) or str(call.attrs.dtype) != "int32":
        return None
    wide = rewriter.calls(scaled.args[0], "relax.astype")
    return wide.args[0] if wide is not None and dtype(wide.args[0]) == "int32" else None


def _scaled(
    rewriter: Rewriter, sums: relax.Expr, per_zero: np.ndarray, zero: int | relax.Expr, scales: np.ndarray,
    shape: tuple[int, ...],
) -> relax.Expr:  # fmt: skip
    """Sums in int32, less what the zero point adds to them, as floats.

    Args:
        per_zero: What it would add if it were one.
        shape: Of both, with -1 for their axis.
    """
    sums = rewriter.emit(sums)
    if not isinstance(zero, int):
        wide = rewriter.emit(op.reshape(rewriter.emit(op.astype(zero, "int32")), (1,) * len(shape)))
        less = rewriter.emit(op.multiply(constant(per_zero.astype(np.int32).reshape(shape)), wide))
        sums = rewriter.emit(op.subtract(sums, less))
    elif zero and per_zero.any():
        sums = rewriter.emit(op.add(sums, constant((-zero * per_zero).astype(np.int32).reshape(shape))))
    factors = constant(scales.astype(np.float32).reshape((1,) * len(shape) if scales.size == 1 else shape))
    return op.multiply(rewriter.emit(op.astype(sums, "float32")), factors)


@rule("relax.nn.max_pool2d")
def pooled_bytes(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """The largest of dequantised bytes is the largest of the bytes, dequantised."""
    data, attrs = _activation(rewriter, call.args[0]), call.attrs
    if data is None:
        return None
    pooled = op.nn.max_pool2d(
        data[0], [int(n) for n in attrs.pool_size], [int(n) for n in attrs.strides], [int(n) for n in attrs.padding],
        [int(n) for n in attrs.dilation], bool(attrs.ceil_mode), bool(attrs.count_include_pad), str(attrs.layout),
    )  # fmt: skip
    return _dequantize(rewriter.emit(pooled), data[1], data[2], "uint8")


@rule(*_MOVES)
def moved_bytes(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Bytes are moved before they are dequantised."""
    data = _activation(rewriter, call.args[0])
    if data is None:
        return None
    moved = relax.Call(call.op, [data[0], *call.args[1:]], call.attrs, call.ty_args)
    return _dequantize(rewriter.emit(moved), data[1], data[2], "uint8")


@rule(_Q)
def quantized_before_moving(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Floats are quantised where they are computed, and moved as bytes."""
    moved, found = rewriter.calls(call.args[0], *_REORDERINGS), _scalars(rewriter, call)
    if moved is None or found is None or not rewriter.read_once(call.args[0]):
        return None
    quantized = rewriter.emit(_quantize(moved.args[0], *found, str(call.attrs.out_dtype)))
    return relax.Call(moved.op, [quantized, *moved.args[1:]], moved.attrs, moved.ty_args)


@rule(_Q)
def quantized_parts(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Parts of a concatenation are quantised by who computes them, and joined as bytes."""
    joined, found = rewriter.calls(call.args[0], "relax.concat"), _scalars(rewriter, call)
    parts = rewriter.fields(joined.args[0]) if joined is not None else None
    if joined is None or found is None or parts is None or not rewriter.read_once(call.args[0]):
        return None
    if str(call.attrs.out_dtype) != "uint8":
        return None  # signed ones are made unsigned first
    axis = None if joined.attrs.axis is None else int(joined.attrs.axis)
    if axis is not None and (together := _joined_bytes(rewriter, parts, axis)) is not None:
        return _quantize(rewriter.emit(together), *found, "uint8")
    quantized = [rewriter.emit(_quantize(part, *found, "uint8")) for part in parts]
    return op.concat(quantized, axis)


def _joined_bytes(rewriter: Rewriter, parts: Sequence[relax.Expr], axis: int) -> relax.Expr | None:
    """Bytes that are joined as they are, and dequantised then, each part in its own units; if others read most of them.

    A DenseNet joins all images before each layer anew, each time in other units. Who computes an image could not write
    it for all of them, so that each would be read and written once more for each layer after it."""
    known = [found for part in parts if (found := _activation(rewriter, part)) is not None]
    shapes = [shape for part in parts if (shape := rewriter.shape(part)) is not None]
    if len(known) < len(parts) or len(shapes) < len(parts):
        return None
    alone = [
        rewriter.read_once(part) and rewriter.read_once(found[0]) for part, found in zip(parts, known, strict=True)
    ]
    if 2 * sum(alone) >= len(parts):
        return None
    extents = [shape[axis] for shape in shapes]
    scales = constant(np.repeat([scale for _, scale, _ in known], extents).astype(np.float32))
    zeros = constant(np.repeat([zero for _, _, zero in known], extents).astype(np.uint8))
    whole = rewriter.emit(op.concat([found for found, _, _ in known], axis))
    return op.dequantize(whole, scales, zeros, axis=axis, out_dtype="float32")


@rule(_Q)
def quantized_again(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Bytes that are dequantised and quantised as they were."""
    before = rewriter.calls(call.args[0], _DQ)
    if before is None or dtype(before.args[0]) != str(call.attrs.out_dtype):
        return None
    mine, theirs = _scalars(rewriter, call), _scalars(rewriter, before)
    return before.args[0] if mine is not None and mine == theirs else None


# After those above, which need to see them.


@rule("relax.add", "relax.subtract", "relax.multiply", "relax.divide")
def never_bytes(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """What is quantised only to be dequantised is rounded, but stays a float: within a kernel bytes would be made and
    unmade for nothing. The zero point is added to neither: limits are that much lower instead. Where both operands are
    such, one comes from another kernel, and stays bytes until then (`lib.graph.halts`)."""
    found = [_there_and_back(rewriter, arg) for arg in call.args]
    if sum(each is not None for each in found) != 1:
        return None
    args = [_rounded(rewriter, each) if each else arg for arg, each in zip(call.args, found, strict=True)]
    return relax.Call(call.op, args, call.attrs, call.ty_args)


@dataclass(frozen=True, slots=True)
class _ThereAndBack:
    """A tensor that is quantised, and what that is dequantised to."""

    data: relax.Expr
    scales: tuple[float, float]  # there, and back
    limits: tuple[int, int]  # of what is kept, with zero where the zero point is


def _there_and_back(rewriter: Rewriter, expr: relax.Expr) -> _ThereAndBack | None:
    """What an expression dequantises, if that was quantised around the same zero, and nobody else reads either."""
    after = rewriter.calls(expr, _DQ)
    before = rewriter.calls(after.args[0], _Q) if after is not None else None
    if after is None or before is None or not (rewriter.read_once(expr) and rewriter.read_once(after.args[0])):
        return None
    there, back = _scalars(rewriter, before), _scalars(rewriter, after)
    limits = _BYTES.get(str(before.attrs.out_dtype))
    if there is None or back is None or there[1] != back[1] or limits is None:
        return None
    return _ThereAndBack(before.args[0], (there[0], back[0]), (limits[0] - back[1], limits[1] - back[1]))


def _rounded(rewriter: Rewriter, found: _ThereAndBack) -> relax.Expr:
    """What is dequantised, in floats all along."""
    rank = len(rewriter.shape(found.data) or ())
    factor, scale, least, most = (
        constant(np.full([1] * rank, value, np.float32))
        for value in (1.0 / found.scales[0], found.scales[1], *found.limits)
    )
    rounded = rewriter.emit(op.round(rewriter.emit(op.multiply(found.data, factor))))
    kept = rewriter.emit(op.minimum(rewriter.emit(op.maximum(rounded, least)), most))
    return rewriter.emit(op.multiply(kept, scale))


@rule(_DQ)
def plain_dequantize(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Constants are dequantised at once, all else by plain arithmetic."""
    values, scales, zeros = (rewriter.value(arg) for arg in call.args)
    if scales is None or zeros is None:
        return None
    shape = rewriter.shape(call)
    if shape is None or str(call.attrs.out_dtype) != "float32" or zeros.dtype.kind not in "iu":
        return None
    along = _along(scales, int(call.attrs.axis), len(shape)), _along(zeros, int(call.attrs.axis), len(shape))
    if values is not None:
        return constant(((values.astype(np.int64) - along[1]) * along[0].astype(np.float32)).astype(np.float32))
    if dtype(call.args[0]) not in _BYTES:
        return None  # differences of wider integers are not exact in float32
    wide = rewriter.emit(op.astype(call.args[0], "float32"))
    if zeros.any():
        wide = rewriter.emit(op.subtract(wide, constant(along[1].astype(np.float32))))
    return op.multiply(wide, constant(along[0].astype(np.float32)))


@rule(_Q)
def plain_quantize(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """By plain arithmetic, with a product in place of a division, which would take several times as long."""
    scales, zeros = rewriter.value(call.args[1]), rewriter.value(call.args[2])
    kind, shape = str(call.attrs.out_dtype), rewriter.shape(call)
    if scales is None or zeros is None or shape is None or kind not in _BYTES:
        return None
    axis, rank = int(call.attrs.axis), len(shape)
    factors = _along((1.0 / scales.astype(np.float64)).astype(np.float32), axis, rank)
    rounded = rewriter.emit(op.round(rewriter.emit(op.multiply(call.args[0], constant(factors)))))
    if zeros.any():
        rounded = rewriter.emit(op.add(rounded, constant(_along(zeros, axis, rank).astype(np.float32))))
    return op.astype(rewriter.emit(op.clip(rounded, *map(float, _BYTES[kind]))), kind)


def _along(values: np.ndarray, axis: int, rank: int) -> np.ndarray:
    """Values along an axis of a tensor of some rank; one for all as a tensor, too, so that it becomes a parameter, and
    subgraphs that differ in it alone are one."""
    shape = [1] * rank
    if values.size > 1:
        shape[axis % rank] = values.size
    return values.reshape(shape)


INTEGERS: list[Rule] = [
    unsigned_activation, integer_convolution, integer_product, integer_product_of_activations, integers_again,
    units_of_sums, units_that_are_computed, units_after_products, pooled_bytes, moved_bytes, quantized_before_moving,
    quantized_parts, quantized_again,
]  # fmt: skip
BETWEEN: list[Rule] = [never_bytes]
PLAIN: list[Rule] = [plain_dequantize, plain_quantize]
