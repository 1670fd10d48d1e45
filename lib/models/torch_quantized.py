"""Files that PyTorch quantised (PT2E): its operators (`torch_declared`) in Relax, where `lib.graph.rules.quantization`
makes integers of what stands between them.

A tensor or a channel has a scale that is known, or the scale of a tensor is chosen when its values are (dynamic
quantisation): then as ONNX's `DynamicQuantizeLinear` chooses it (`lib.graph.byte_units`). torch chooses none below a
limit of 2^-12 or so, which matters where all values are within 0.06 of zero.
"""

from typing import Any

import numpy as np
import tvm
from tvm import relax

from lib.graph import byte_units
from lib.graph.rewrite import value_of
from lib.graph.rules.quantization import SIGN
from lib.models.torch_declared import BACK, CHOICE, NAMESPACE, TO

_MOVES = ("view", "reshape", "permute", "transpose", "squeeze", "unsqueeze", "expand", "slice", "clone")


def is_whole(node: Any) -> bool:
    """Whether a node is such an operator: what it makes of constants stays bytes, to be multiplied as such."""
    return str(node.target).startswith(f"{NAMESPACE}.")


def _quantize(node: Any, importer: Any) -> relax.Expr:
    """To bytes; limits that are narrower than theirs are those of the floats."""
    if (chosen := _chosen(node, importer)) is not None:
        return chosen.values
    x, (scale, zero, axis, limits, kind) = importer.env[node.args[0]], _described(node, importer)
    emit, rank = importer.block_builder.emit, x.ty.ndim
    if limits != _limits_of(kind):
        shape = [-1 if n == axis and scale.size > 1 else 1 for n in range(rank)]
        ends = ((np.float32(end) - zero.astype(np.float32)) * scale for end in limits)
        least, most = (relax.const(end.astype(np.float32).reshape(shape)) for end in ends)
        x = emit(relax.op.minimum(emit(relax.op.maximum(x, least)), most))
    units = relax.const(scale), relax.const(zero.astype(kind))
    return emit(relax.op.quantize(x, *units, axis=axis, out_dtype=kind))


def _dequantize(node: Any, importer: Any) -> relax.Expr:
    x, emit = importer.env[node.args[0]], importer.block_builder.emit
    if (chosen := _chosen(node, importer)) is not None:
        return emit(relax.op.dequantize(x, chosen.scale, chosen.zero, out_dtype="float32"))
    scale, zero, axis, _, kind = _described(node, importer)
    return emit(relax.op.dequantize(x, relax.const(scale), relax.const(zero.astype(kind)), axis=axis))


def _choose(node: Any, importer: Any) -> tuple[byte_units.Bytes, byte_units.Bytes]:
    """What is chosen belongs together: both results are all of it.

    Raises:
        ValueError: It is for other numbers than all bytes, for another tensor, or read by others than these operators.
    """
    x, least, most, _eps, dtype = node.args
    kind, users = str(dtype).removeprefix("torch."), [user for item in node.users for user in item.users]
    is_of_others = any(_packet(user) == TO and user.args[0] is not x for user in users)
    is_known = kind in ("uint8", "int8") and _limits_of(kind) == (least, most)
    if not is_known or is_of_others or not all(map(_stays_bytes, users)):
        raise ValueError(f"dynamic quantisation to {kind} in {least} to {most}, of which there is no such program")
    found = byte_units.emit(importer.block_builder, importer.env[x])
    return found, found


def _stays_bytes(node: Any) -> bool:
    """Whether nobody sees bytes that stand for signed ones, and are 128 larger."""
    if _packet(node) == BACK:
        return True
    return _packet(node) in (TO, *_MOVES) and all(map(_stays_bytes, node.users))


def _packet(node: Any) -> str:
    """An operator's name without that of its overload."""
    return str(getattr(node.target, "__name__", "")).partition(".")[0]


def _limits_of(kind: str) -> tuple[int, int]:
    return int(np.iinfo(kind).min), int(np.iinfo(kind).max)


def _chosen(node: Any, importer: Any) -> byte_units.Bytes | None:
    """What was chosen for an operator, where scale and zero point are results of a choice."""
    found = importer.env.get(node.args[1]) if hasattr(node.args[1], "op") else None
    return found if isinstance(found, byte_units.Bytes) else None


def _described(node: Any, importer: Any) -> tuple[np.ndarray, np.ndarray, int, tuple[int, int], str]:
    """Scale and zero point, the axis along which they differ, limits, and the type of the bytes.

    Raises:
        ValueError: They are computed.
    """
    scale, zero, *axis, least, most, kind = node.args[1:]
    found = [np.asarray(0 if each is None else _value(each, importer)) for each in (scale, zero)]
    rank = node.args[0].meta["val"].ndim
    scales, zeros = ((each.reshape(()) if each.size == 1 else each) for each in found)
    return (
        scales.astype(np.float32), np.broadcast_to(zeros, scales.shape), axis[0] % rank if axis else -1, (least, most),
        str(kind).removeprefix("torch."),
    )  # fmt: skip


def _value(each: Any, importer: Any) -> Any:
    if not hasattr(each, "op"):
        return each
    found = importer.env[each]
    if not isinstance(found, tvm.ir.Constant):
        raise ValueError(f"the scale or zero point {each.name!r} is computed, and by no operator that chooses both")
    return value_of(found)


def _integer_product(node: Any, importer: Any) -> relax.Expr:
    """Of signed bytes with a matrix of them; the former as unsigned ones, which are what programs take."""
    (x, w), emit = (importer.env[argument] for argument in node.args), importer.block_builder.emit
    unsigned = emit(relax.op.add(emit(relax.op.astype(x, "int32")), relax.const(SIGN, "int32")))
    sums = emit(relax.op.matmul(emit(relax.op.astype(unsigned, "uint8")), w, out_dtype="int32"))
    of_columns = emit(relax.op.sum(emit(relax.op.astype(w, "int32")), 0, keepdims=True))
    return emit(relax.op.subtract(sums, emit(relax.op.multiply(of_columns, relax.const(SIGN, "int32")))))


CONVERTERS: dict[str, Any] = {
    f"{TO}.default": _quantize,
    f"{TO}.tensor": _quantize,
    f"{BACK}.default": _dequantize,
    f"{BACK}.tensor": _dequantize,
    "quantize_per_channel.default": _quantize,
    "dequantize_per_channel.default": _dequantize,
    CHOICE: _choose,
    "_int_mm.default": _integer_product,
}
