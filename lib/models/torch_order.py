"""Order along an axis: what is sorted, the kth, extremes and sums so far, in torch's operators.

Each function is given what the operator is, and returns what it gives, or `NotImplemented`: see
`lib.models.torch_decompositions`.
"""

import math
from collections.abc import Callable
from typing import Any


def _places_in(
    sorted_numbers: Any, numbers: Any, *, right: bool = False, out_int32: bool = False, **options: Any
) -> Any:
    """`searchsorted`: how many are smaller, or not larger."""
    import torch

    if options.get("sorter") is not None:
        return NotImplemented
    is_right = right or options.get("side") == "right"
    rows = sorted_numbers if sorted_numbers.ndim == 1 else sorted_numbers.unsqueeze(-2)
    are_before = rows <= numbers.unsqueeze(-1) if is_right else rows < numbers.unsqueeze(-1)
    return are_before.to(torch.int32 if out_int32 else torch.int64).sum(-1, dtype=torch.int32 if out_int32 else None)


def _so_far(x: Any, axis: int, nothing: float) -> Any:
    """Along an axis, which becomes the last but one, what there is up to each element, and nothing behind it."""
    import torch

    rows = x.movedim(axis, -1)
    seen = torch.ones(rows.shape[-1], rows.shape[-1], dtype=torch.bool).tril()
    return torch.where(seen, rows.unsqueeze(-2), nothing)


def _extreme_so_far(sign: int) -> Callable[..., Any]:
    """`cummax` (sign 1) and `cummin` (-1): the largest or smallest up to each element, and where it last was."""

    def extreme(x: Any, axis: int) -> Any:
        import torch

        if x.ndim == 0 or not x.is_floating_point():
            return NotImplemented
        apart = _so_far(x * sign, axis, -math.inf)
        largest = apart.amax(-1)
        places = torch.where(apart == largest.unsqueeze(-1), torch.arange(apart.shape[-1]), -1).amax(-1)
        return (largest * sign).movedim(-1, axis), places.movedim(-1, axis)

    return extreme


def _kth(x: Any, k: int, axis: int = -1, keepdim: bool = False) -> Any:
    """The kth smallest along an axis, and where it is."""
    if x.ndim == 0:
        return NotImplemented
    found = [each.narrow(axis, k - 1, 1) for each in x.sort(axis)]
    return tuple(found if keepdim else (each.squeeze(axis) for each in found))


def _cumulative_logsumexp(x: Any, axis: int) -> Any:
    if x.ndim == 0:
        return NotImplemented
    apart = _so_far(x, axis, -math.inf)
    largest = apart.amax(-1, keepdim=True)
    return ((apart - largest).exp().sum(-1).log() + largest.squeeze(-1)).movedim(-1, axis)


def _sorted(x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """TVM's sort is stable anyway."""
    return x.sort(dim, descending)


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "searchsorted.Tensor": _places_in,
    "logcumsumexp.default": _cumulative_logsumexp,
    "cummax.default": _extreme_so_far(1),
    "cummin.default": _extreme_so_far(-1),
    "kthvalue.default": _kth,
    "sort.stable": _sorted,
}
