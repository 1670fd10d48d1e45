"""PyTorch's operators of quantised files (PT2E), made known to torch without the package that declares them.

This module loads no TVM: torch runs such files in a process of its own.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from lib.models import torch_affine

NAMESPACE = "quantized_decomposed"
TO, BACK, CHOICE = "quantize_per_tensor", "dequantize_per_tensor", "choose_qparams.tensor"
_LIMITS = "int quant_min, int quant_max, ScalarType dtype"
_OUT = "*, ScalarType? out_dtype=None"
_SCHEMAS = {
    TO: f"(Tensor input, float scale, int zero_point, {_LIMITS}) -> Tensor",
    f"{TO}.tensor": f"(Tensor input, Tensor scale, Tensor zero_point, {_LIMITS}) -> Tensor",
    BACK: f"(Tensor input, float scale, int zero_point, {_LIMITS}, {_OUT}) -> Tensor",
    f"{BACK}.tensor": f"(Tensor input, Tensor scale, Tensor zero_point, {_LIMITS}, {_OUT}) -> Tensor",
    "quantize_per_channel": f"(Tensor input, Tensor scales, Tensor zero_points, int axis, {_LIMITS}) -> Tensor",
    "dequantize_per_channel":
        f"(Tensor input, Tensor scales, Tensor? zero_points, int axis, {_LIMITS}, {_OUT}) -> Tensor",
    CHOICE: "(Tensor input, int quant_min, int quant_max, float eps, ScalarType dtype) -> (Tensor, Tensor)",
}  # fmt: skip
_declared: list[Any] = []  # declarations last as long as the object that made them


def declare(torch: ModuleType) -> None:
    """Make these operators known to torch, and those of torchao, unless who defines them did: a file shall not choose
    what is imported."""
    if not _declared:
        of_pt2e = {name: _computed(torch, name.partition(".")[0]) for name in _SCHEMAS}
        _declared.append(_library(torch, NAMESPACE, _SCHEMAS, of_pt2e))
        _declared.append(_library(torch, torch_affine.NAMESPACE, torch_affine.SCHEMAS, torch_affine.FUNCTIONS))


def _library(torch: ModuleType, namespace: str, schemas: Mapping[str, str], functions: Mapping[str, Any]) -> Any:
    known, library = getattr(torch.ops, namespace), torch.library.Library(namespace, "FRAGMENT")
    for name, schema in schemas.items():
        packet, _, overload = name.partition(".")
        if not hasattr(known, packet) or (overload or "default") not in getattr(known, packet).overloads():
            library.define(name + schema)
            library.impl(name, functions[name], "CompositeExplicitAutograd")
    return library


def _computed(torch: ModuleType, packet: str) -> Any:
    """What an operator does, as PyTorch defines it."""

    def aligned(each: Any, x: Any, axis: int | None) -> Any:
        if axis is None or not isinstance(each, torch.Tensor):
            return each
        return each.reshape([-1 if n == axis % x.ndim else 1 for n in range(x.ndim)])

    def quantize(x: Any, scale: Any, zero: Any, *given: Any) -> Any:
        *axis, least, most, dtype = given
        scale, zero = (aligned(each, x, *(axis or [None])) for each in (scale, zero))
        return torch.clamp(torch.round(x * (1.0 / scale)) + zero, least, most).to(dtype)

    def dequantize(x: Any, scale: Any, zero: Any, *given: Any, out_dtype: Any = None) -> Any:
        *axis, _least, _most, _dtype = given
        scale, zero = (aligned(each, x, *(axis or [None])) for each in (scale, 0 if zero is None else zero))
        return ((x.to(torch.float32) - zero) * scale).to(out_dtype or torch.float32)

    def choose(x: Any, least: int, most: int, eps: float, _dtype: Any) -> Any:
        low, high = x.min().clamp(max=0.0), x.max().clamp(min=0.0)
        scale = ((high - low) / (most - least)).clamp(min=eps).reshape(1)
        zero = (least - torch.round(low / scale)).clamp(least, most)
        return scale.to(torch.float64), zero.to(torch.int64)

    return choose if packet.startswith("choose") else quantize if packet.startswith("quantize") else dequantize
