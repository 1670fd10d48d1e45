"""Pooling of which TVM 0.27's importer knows nothing: by a divisor, in any grid, and where the largest elements were.

The last of these is in Relax, the others in torch's operators (see `lib.models.torch_decompositions`).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax

_Convert = Callable[[Any, Any], relax.Expr]


def _with_places(otherwise: str) -> _Convert:
    """The largest of each window and its place in the image, where that is read; else the importer's operator."""

    def convert(node: Any, importer: Any) -> relax.Var:
        places_are_read = any(len(user.args) > 1 and user.args[1] == 1 for user in node.users)
        return _largest(node, importer) if places_are_read else getattr(importer, otherwise)(node)

    return convert


def _largest(node: Any, importer: Any) -> relax.Var:
    """One element of all windows after the other: the first of the largest stays."""
    x, emit = importer.env[node.args[0]], importer.block_builder.emit
    made = [int(n) for n in node.meta["val"][0].shape]
    rank = 3 if "3d" in node.target.__name__ else 2
    window, stride, padding, dilation = _options(node, rank)
    shape = [int(n) for n in x.ty.shape]
    image, out, axes = shape[-rank:], made[-rank:], list(range(len(shape) - rank, len(shape)))
    more = beyond(out, window, stride, padding, dilation, image)
    ends = [[before, after] for before, after in zip(padding, more, strict=True)]
    width = [0] * (2 * (len(shape) - rank)) + [end for pair in ends for end in pair]
    padded = emit(relax.op.nn.pad(x, width, "constant", float(np.finfo(np.float32).min))) if any(width) else x
    numbers = np.pad(np.arange(np.prod(image)).reshape(image), ends)
    best = places = None
    for tap in itertools.product(*map(range, window)):
        begin = [n * apart for n, apart in zip(tap, dilation, strict=True)]
        end = [first + (n - 1) * step + 1 for first, n, step in zip(begin, out, stride, strict=True)]
        part = emit(relax.op.strided_slice(padded, axes, begin, end, stride))
        there = relax.const(numbers[tuple(map(slice, begin, end, stride))], "int64")
        if best is None:
            best, places = part, emit(relax.op.broadcast_to(there, tuple(made)))
            continue
        is_larger = emit(relax.op.greater(part, best))
        best = emit(relax.op.where(is_larger, part, best))
        places = emit(relax.op.where(is_larger, there, places))
    return emit(relax.Tuple([best, places]))


def beyond(
    made: Sequence[int], window: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    image: Sequence[int],
) -> list[int]:  # fmt: skip
    """How far the last windows reach beyond the end of an image, along each axis."""
    return [
        max(0, (n - 1) * step + apart * (taps - 1) + 1 - extent - before)
        for n, taps, step, before, apart, extent in zip(made, window, stride, padding, dilation, image, strict=True)
    ]


def for_each_axis(options: Sequence[Sequence[int]], rank: int) -> list[list[int]]:
    """Options with a number for each axis, of which torch may give one for all."""
    return [list(each) * (rank // len(each)) for each in options]


def _options(node: Any, rank: int) -> list[list[int]]:
    """Window, stride, padding and dilation along each axis; torch leaves out what is as usual, and may give one for
    all axes."""
    given = [list(each) for each in node.args[1:5]]
    usual: list[list[int]] = [[], [], [0], [1]]
    window, stride, padding, dilation = given + usual[len(given) :]
    return for_each_axis((window, stride or window, padding, dilation), rank)


def _average_pool(
    x: Any, window: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,), ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    """Sums by a divisor of one's own, which the importer leaves out."""
    import torch

    if divisor_override is None:
        return NotImplemented
    rank = x.ndim - 2 if x.ndim > len(window) + 1 else x.ndim - 1
    window, stride, padding = for_each_axis((window, stride or window, padding), rank)
    pool = torch.nn.functional.avg_pool2d if rank == 2 else torch.nn.functional.avg_pool3d
    made = pool(x, window, stride, padding, ceil_mode).shape[-rank:]
    more = beyond(made, window, stride, padding, [1] * rank, x.shape[-rank:])
    ends = [end for pair in zip(reversed(padding), reversed(more), strict=True) for end in pair]
    return pool(torch.nn.functional.pad(x, ends), window, stride) * (math.prod(window) / divisor_override)


def _adaptive_max_pool(x: Any, size: Sequence[int]) -> Any:
    """The largest elements of as many windows along each axis, and where they were. Where sizes do not divide, windows
    differ in size and overlap: their elements are read apart, the last ones of smaller windows again."""
    import torch

    extents = x.shape[-len(size) :]
    if not any(extent % count for extent, count in zip(extents, size, strict=True)):
        window = [extent // count for extent, count in zip(extents, size, strict=True)]
        aten = torch.ops.aten
        pool = aten.max_pool2d_with_indices if len(size) == 2 else aten.max_pool3d_with_indices
        return pool.default(x, window, window)
    first, rank = x.ndim - len(size), len(size)
    numbers = torch.arange(math.prod(extents)).reshape(extents)
    for n, (extent, count) in enumerate(zip(extents, size, strict=True)):
        places = _window_places(extent, count)
        axis, shape = 2 * n, places.shape  # each axis becomes that of windows and that of their elements
        x = x.index_select(first + axis, places.reshape(-1)).unflatten(first + axis, shape)
        numbers = numbers.index_select(axis, places.reshape(-1)).unflatten(axis, shape)
    order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
    x = x.permute(*range(first), *(first + axis for axis in order)).flatten(-rank)
    numbers = numbers.permute(*order).flatten(-rank).expand(x.shape)
    return x.amax(-1), numbers.gather(-1, x.argmax(-1, keepdim=True)).squeeze(-1)


def _window_places(extent: int, count: int) -> Any:
    """Places of the elements of so many windows along an axis: windows x elements."""
    import torch

    windows = torch.arange(count).unsqueeze(1)
    begins, ends = windows * extent // count, ((windows + 1) * extent + count - 1) // count
    most = max(-((n + 1) * extent // -count) - n * extent // count for n in range(count))
    return (begins + torch.arange(most)).minimum(ends - 1)


CONVERTERS: dict[str, _Convert] = {
    "max_pool2d_with_indices.default": _with_places("_max_pool2d_with_indices"),
    "max_pool3d_with_indices.default": _with_places("_max_pool3d_with_indices"),
}

DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "avg_pool2d.default": _average_pool,
    "avg_pool3d.default": _average_pool,
    "adaptive_max_pool2d.default": _adaptive_max_pool,
    "adaptive_max_pool3d.default": _adaptive_max_pool,
}
