"""Images and volumes at places that tensors say, as torch's `grid_sample` has them."""

import itertools
import math
from collections.abc import Callable
from typing import Any

from tvm import relax


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


def _sampled_volume(x: Any, places: Any, mode: int = 0, padding: int = 0, align_corners: bool = False) -> Any:
    """`grid_sample` of volumes: of the eight voxels around a place, by how near they are, or of the nearest.

    Args:
        x: `N x C x D x H x W`; places: `N x D' x H' x W' x 3`, of which the first is along W.
        mode: 0 linear, 1 nearest. padding: beyond the volume there are zeros (0), its border (1), its reflection (2).
    """
    import torch

    extents, n_places = x.shape[2:], places.shape[1:-1]
    flat = x.flatten(2)
    found = [
        _unnormalized(places[..., 2 - axis], extent, padding, align_corners) for axis, extent in enumerate(extents)
    ]
    result = x.new_zeros(x.shape[0], x.shape[1], math.prod(n_places))
    corners = itertools.product((0, 1), repeat=3) if mode == 0 else [(0, 0, 0)]
    for corner in corners:
        weight, index = torch.ones_like(found[0]), torch.zeros_like(found[0]).to(torch.int64)
        for at, extent, end in zip(found, extents, corner, strict=True):
            low = at.floor() if mode == 0 else at.round()
            place = low + end
            near = (1 - (at - place).abs()) if mode == 0 else torch.ones_like(at)
            weight = weight * torch.where((place >= 0) & (place <= extent - 1), near, 0.0)
            index = index * extent + place.clamp(0, extent - 1).to(torch.int64)
        read = flat.gather(2, index.flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1))
        result = result + read * weight.flatten(1).unsqueeze(1)
    return result.unflatten(2, n_places)


def _unnormalized(at: Any, extent: int, padding: int, align_corners: bool) -> Any:
    """Coordinates of -1 to 1 as places along an axis."""
    at = (at + 1) / 2 * (extent - 1) if align_corners else ((at + 1) * extent - 1) / 2
    if padding == 2:
        low, span = (0.0, extent - 1.0) if align_corners else (-0.5, float(extent))
        if span == 0:
            return at * 0
        apart = (at - low).abs()
        times = (apart / span).floor()
        within = apart - times * span
        is_even = times - 2 * (times / 2).floor() == 0
        at = within.where(is_even, span - within) + low
    return at if padding == 0 else at.clamp(0, extent - 1)


CONVERTERS: dict[str, Callable[[Any, Any], relax.Expr]] = {"grid_sampler_2d.default": _sampled}
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {"grid_sampler_3d.default": _sampled_volume}
