"""How torch's operators are taken apart: as torch does it, but for what it keeps and TVM 0.27's importer lacks.

Each function below is given what the operator is, and returns what it gives, in operators that are imported; or
`NotImplemented`, where the operator stays as it is.
"""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from lib.models import torch_affine, torch_order, torch_pooling, torch_promotion, torch_sampling

# Of which torch has a decomposition that it takes only when asked.
_ASKED_FOR = ("addmv.default", "dist.default")


def decompositions(torch: ModuleType, whole: Sequence[Any] = ()) -> Any:
    """How operators are taken apart: as torch does it, but products stay whole.

    torch makes `addmm` of linear layers and `bmm` of batched products, in reshapes and expansions.

    Args:
        whole: Other operators that stay.
    """
    from torch._decomp import decomposition_table

    aten = torch.ops.aten
    table = torch.export.default_decompositions()
    for kept in (aten.linear.default, aten.matmul.default, *whole):
        table.pop(kept, None)
    operators = {name: _operator(aten, name) for name in (*_ASKED_FOR, *_OURS)}
    table.update({operators[name]: decomposition_table[operators[name]] for name in _ASKED_FOR})
    table.update({operators[name]: ours for name, ours in _OURS.items()})
    of_torchao = getattr(torch.ops, torch_affine.NAMESPACE)
    table.update({getattr(of_torchao, name).default: ours for name, ours in torch_affine.FUNCTIONS.items()})
    return table


def _operator(aten: Any, name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


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


def _elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    """With factors, as SELU is; the importer leaves these out."""
    if scale == input_scale == 1:
        return NotImplemented
    return scale * x.clamp(min=0) + (alpha * scale) * (input_scale * x.clamp(max=0)).expm1()


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """By the batch's own mean and variance, as in training; the importer takes those that were kept, or none."""
    if not training:
        return NotImplemented
    return _batch_norm_that_learns(x, weight, bias, mean, var, training, momentum, eps)[:3]


def _batch_norm_that_learns(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """The same, also with what would be kept for the next batch."""
    import torch

    if not training:
        return NotImplemented
    result, *_ = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    axes, count = [axis for axis in range(x.ndim) if axis != 1], x.numel() // x.shape[1]
    own_mean, own_var = x.mean(axes), x.var(axes, correction=0)
    kept_var = own_var * (count / max(count - 1, 1))
    return (result, own_mean, (own_var + eps).rsqrt(), momentum * own_mean + (1 - momentum) * mean,
            momentum * kept_var + (1 - momentum) * var)  # fmt: skip


def _distances(x: Any, y: Any, p: float, _mode: int | None = None) -> Any:
    """Of each row of one matrix to each of another, in a norm."""
    apart = (x.unsqueeze(-2) - y.unsqueeze(-3)).abs()
    if p == 0:
        return (apart != 0).to(x.dtype).sum(-1)
    if p == math.inf:
        return apart.amax(-1)
    if p == 2:
        return (apart * apart).sum(-1).sqrt()
    return apart.sum(-1) if p == 1 else apart.pow(p).sum(-1).pow(1 / p)


def _windows(x: Any, axis: int, size: int, step: int) -> Any:
    """`Tensor.unfold`: windows along an axis, whose elements come last."""
    import torch

    if x.ndim == 0:
        return x.reshape(1)[:size]
    axis %= x.ndim
    count = (x.shape[axis] - size) // step + 1
    places = torch.arange(count).unsqueeze(-1) * step + torch.arange(size)
    apart = x.index_select(axis, places.reshape(-1)).unflatten(axis, (count, size))
    return apart.movedim(axis + 1, -1)


def _strided(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Elements of a dense tensor by their places in memory."""
    import torch

    if not x.is_contiguous():
        return NotImplemented
    if (
        not offset
        and math.prod(size) == x.numel()
        and list(stride) == [math.prod(size[n + 1 :]) for n in range(len(size))]
    ):
        return x.reshape(size)
    places = torch.zeros((), dtype=torch.int64) + (offset or 0)
    for extent, apart in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(extent) * apart
    return x.reshape(-1).index_select(0, places.reshape(-1)).reshape(size)


def _bags(
    table: Any, ids: Any, offsets: Any, _scale_grad: bool = False, mode: int = 0, _sparse: bool = False,
    weights: Any = None, include_last_offset: bool = False, padding_idx: int = -1,
) -> Any:  # fmt: skip
    """`embedding_bag`: the sum (mode 0), mean (1) or largest (2) of the rows of each bag, which ends where the next
    begins; by a product with what is in which bag. What torch keeps for gradients is not there."""
    import torch

    n = ids.shape[0]
    bounds = offsets if include_last_offset else torch.cat([offsets, offsets.new_full((1,), n)])
    begins, ends, place = bounds[:-1].unsqueeze(1), bounds[1:].unsqueeze(1), torch.arange(n)
    belongs = (begins <= place) & (place < ends) & (ids != padding_idx)
    rows = table.index_select(0, ids)
    rows = rows if weights is None else rows * weights.unsqueeze(1)
    counts = belongs.to(torch.int64).sum(1)
    if mode == 2:
        largest = torch.where(belongs.unsqueeze(2), rows, -math.inf).amax(1)
        result = torch.where((counts > 0).unsqueeze(1), largest, 0.0)
    else:
        result = belongs.to(rows.dtype) @ rows
        result = result if mode == 0 else result / counts.clamp(min=1).unsqueeze(1)
    return result, offsets.new_empty(0), counts, offsets.new_empty(0)


def _trilinear(
    x: Any, y: Any, z: Any, expand_x: Sequence[int], expand_y: Sequence[int], expand_z: Sequence[int],
    summed: Sequence[int], _unrolled: int = 1,
) -> Any:  # fmt: skip
    """Sums of products of three, as a bilinear layer has them."""
    factors = []
    for factor, axes in ((x, expand_x), (y, expand_y), (z, expand_z)):
        for axis in axes:
            factor = factor.unsqueeze(axis)
        factors.append(factor)
    return (factors[0] * factors[1] * factors[2]).sum(list(summed))


def _clamped(x: Any, least: Any = None, most: Any = None) -> Any:
    """Between tensors, which the importer takes for those of the result's shape."""
    x = x if least is None else x.maximum(least.to(x.dtype))
    return x if most is None else x.minimum(most.to(x.dtype))


def _masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """Where a mask says so, the next element of a source: as images' features are put among those of a text."""
    mask = mask.expand_as(x)
    places = (mask.reshape(-1).cumsum(0) - 1).clamp(0, source.numel() - 1)
    return source.reshape(-1).index_select(0, places).reshape(x.shape).where(mask, x)


def _scatter_reduce(x: Any, axis: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    """Without what was there, as if nothing had been, where indices say; means by how many there are; truth values by
    integers."""
    import torch

    if x.dtype == torch.bool:
        x, source = x.to(torch.int32), source.to(torch.int32)
        return x.scatter_reduce(axis, index, source, reduce, include_self=include_self).bool()
    is_real = x.dtype.is_floating_point
    least, most = (-math.inf, math.inf) if is_real else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
    nothing = {"sum": 0, "prod": 1, "amax": least, "amin": most, "mean": 0}[reduce]
    if reduce == "mean":
        ones = source.new_ones(index.shape)
        start = x if include_self else x.scatter(axis, index, nothing)
        count = x.new_ones(x.shape) if include_self else x.new_ones(x.shape).scatter(axis, index, 0.0)
        return start.scatter_add(axis, index, source) / count.scatter_add(axis, index, ones)
    if include_self:
        return NotImplemented
    return x.scatter(axis, index, nothing).scatter_reduce(axis, index, source, reduce)


def _step(x: Any, at_zero: Any) -> Any:
    return at_zero.where(x == 0, (x > 0).to(x.dtype))


def _var_mean(x: Any, axes: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """Both of the same axes."""
    every = axes or list(range(x.ndim))
    return x.var(every, correction=1 if correction is None else correction, keepdim=keepdim), x.mean(every, keepdim)


def _with_sign(x: Any, y: Any) -> Any:
    """Of one number the magnitude, of another one the sign, also of its zeros."""
    return (-x.abs()).where((y < 0) | (1 / y < 0), x.abs())


def _is_any(x: Any) -> Any:
    return (x != 0).reshape(-1).any(-1)


def _is_any_along(x: Any, axes: Any = None, keepdim: bool = False) -> Any:
    """Of numbers, too: the importer would give the largest."""
    import torch

    return NotImplemented if x.dtype == torch.bool else (x != 0).any(axes, keepdim)


def _larger_but_nan(x: Any, y: Any) -> Any:
    return x.where(y.isnan(), y.where(x.isnan(), x.maximum(y)))


def _smaller_but_nan(x: Any, y: Any) -> Any:
    return x.where(y.isnan(), y.where(x.isnan(), x.minimum(y)))


_OURS: dict[str, Any] = {
    **torch_order.DECOMPOSITIONS,
    **torch_pooling.DECOMPOSITIONS,
    **torch_promotion.DECOMPOSITIONS,
    **torch_sampling.DECOMPOSITIONS,
    "scaled_dot_product_attention.default": _attention,
    "elu.default": _elu,
    "_native_batch_norm_legit.default": _batch_norm,
    "_native_batch_norm_legit_functional.default": _batch_norm_that_learns,
    "_cdist_forward.default": _distances,
    "unfold.default": _windows,
    "as_strided.default": _strided,
    "_embedding_bag.default": _bags,
    "_embedding_bag_forward_only.default": _bags,
    "_trilinear.default": _trilinear,
    "addbmm.default": lambda x, a, b, *, beta=1, alpha=1: beta * x + alpha * (a @ b).sum(0),
    "clamp.Tensor": _clamped,
    "heaviside.default": _step,
    "masked_scatter.default": _masked_scatter,
    "scatter_reduce.two": _scatter_reduce,
    "var_mean.correction": _var_mean,
    "copysign.Tensor": _with_sign,
    "any.default": _is_any,
    "any.dim": _is_any_along,
    "any.dims": _is_any_along,
    "fmax.default": _larger_but_nan,
    "fmin.default": _smaller_but_nan,
    "hypot.default": lambda x, y: (x * x + y * y).sqrt(),
    "exp2.default": lambda x: 2.0**x,
    "signbit.default": lambda x: (x < 0) | (1 / x < 0),
    "angle.default": lambda x: math.pi * (x < 0).to(x.dtype),
    "narrow_copy.default": lambda x, axis, start, length: x.narrow(axis, start, length),
    "view_copy.default": lambda x, shape: x.reshape(shape),
    "permute_copy.default": lambda x, axes: x.permute(axes),
    "unbind_copy.int": lambda x, axis=0: x.unbind(axis),
    "erfc.default": lambda x: 1 - x.erf(),
    "ldexp.Tensor": lambda x, exponent: x * 2.0**exponent,
}
