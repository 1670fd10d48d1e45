"""The operators of torchao, in those of torch: numbers in units of a block, which has so many of them along each axis.

torchao's own tensors must be unwrapped before the export (`torchao.utils.unwrap_tensor_subclass`): then a file has
nothing of torchao but these. Scales and zero points have an axis for each of the tensor's, or none for those axes along
which a block has all.
"""

from collections.abc import Sequence
from typing import Any

NAMESPACE = "torchao"
SCHEMAS = {
    "choose_qparams_affine":
        "(Tensor? input, str mapping_type, SymInt[] block_size, ScalarType target_dtype, Scalar? quant_min=None, "
        "Scalar? quant_max=None, float? eps=None, ScalarType? scale_dtype=None, ScalarType? zero_point_dtype=None, "
        "bool keepdim=False) -> (Tensor, Tensor)",
    "quantize_affine":
        "(Tensor input, SymInt[] block_size, Tensor scale, Tensor? zero_point, ScalarType output_dtype, "
        "Scalar? quant_min=None, Scalar? quant_max=None) -> Tensor",
    "dequantize_affine":
        "(Tensor input, SymInt[] block_size, Tensor scale, Tensor? zero_point, ScalarType input_dtype, "
        "Scalar? quant_min=None, Scalar? quant_max=None, ScalarType output_dtype=6) -> Tensor",
}  # fmt: skip


def _choose(
    x: Any, mapping_type: str, size: Sequence[int], dtype: Any, least: Any = None, most: Any = None, eps: Any = None,
    scale_dtype: Any = None, zero_dtype: Any = None, keepdim: bool = False,
) -> Any:  # fmt: skip
    """Scales and zero points for the values of each block, by the kind of mapping."""
    import torch

    least, most = _limits(dtype, least, most)
    apart, within = _in_blocks(x, size), list(range(1, 2 * x.ndim, 2))
    low, high = apart.amin(within).clamp(max=0.0), apart.amax(within).clamp(min=0.0)
    if mapping_type == "ASYMMETRIC":
        scale = (high - low) / float(most - least)
    elif mapping_type == "SYMMETRIC":
        scale = (-low).maximum(high) / (float(most - least) / 2)
    else:  # SYMMETRIC_NO_CLIPPING_ERR
        scale = (low / least).maximum(high / most)
    scale = scale.clamp(min=torch.finfo(x.dtype).eps if eps is None else eps)
    if mapping_type == "ASYMMETRIC":
        zero = (least - torch.round(low / scale)).clamp(least, most)
    else:
        zero = torch.full_like(scale, int((most + least + 1) / 2))
    if not keepdim:
        pairs = zip(x.shape, size, strict=True)
        kept = [extent // block for extent, block in pairs if block == 1 or block < extent]
        scale, zero = scale.reshape(kept), zero.reshape(kept)
    return scale.to(scale_dtype or x.dtype), zero.to(zero_dtype or torch.int32)


def _quantize(
    x: Any, size: Sequence[int], scale: Any, zero: Any, dtype: Any, least: Any = None, most: Any = None
) -> Any:
    found = (_in_blocks(x, size) * (1.0 / _of_blocks(scale, x, size))).round()
    if zero is not None:
        found = found + _of_blocks(zero, x, size)
    return found.clamp(*_limits(dtype, least, most)).reshape(x.shape).to(dtype)


def _dequantize(
    x: Any, size: Sequence[int], scale: Any, zero: Any, _dtype: Any, _least: Any = None, _most: Any = None,
    output_dtype: Any = None,
) -> Any:  # fmt: skip
    found = _in_blocks(x.float(), size)
    if zero is not None:
        found = found - _of_blocks(zero, x, size).float()
    found = (found * _of_blocks(scale, x, size)).reshape(x.shape)
    return found if output_dtype is None else found.to(output_dtype)


FUNCTIONS = {"choose_qparams_affine": _choose, "quantize_affine": _quantize, "dequantize_affine": _dequantize}


def _in_blocks(x: Any, size: Sequence[int]) -> Any:
    """With two axes for each: the blocks along it, and what a block has of it."""
    return x.reshape([n for extent, block in zip(x.shape, size, strict=True) for n in (extent // block, block)])


def _of_blocks(each: Any, x: Any, size: Sequence[int]) -> Any:
    """What belongs to the blocks of x, so that it fits these."""
    return each.reshape([n for extent, block in zip(x.shape, size, strict=True) for n in (extent // block, 1)])


def _limits(dtype: Any, least: Any, most: Any) -> Any:
    """Those of a type, where none are given."""
    import torch

    whole = torch.iinfo(dtype)
    return whole.min if least is None else least, whole.max if most is None else most
