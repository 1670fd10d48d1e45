"""Images in other sizes where TVM 0.27's importer would make others than torch does: by products with matrices.

torch's factors may differ from the quotient of sizes (1.7 times 4 pixels are 6), smaller images may be made of all
pixels (`antialias`), and the nearest pixel is another one where sizes do not divide. All of it is linear, along one
axis after the other: torch itself says how, of unit vectors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax

from lib.models.torch_matrices import along

_Convert = Callable[[Any, Any], relax.Expr]


def _resized(otherwise: str) -> _Convert:
    """As the importer does it, where that is what torch does; by matrices else.

    Args:
        otherwise: A method of the importer; none, if it has none that is right.
    """

    def convert(node: Any, importer: Any) -> relax.Expr:
        is_right = otherwise and _is_by_sizes(node)
        return getattr(importer, otherwise)(node) if is_right else _by_matrices(node, importer)

    return convert


def _is_by_sizes(node: Any) -> bool:
    """Whether places are those of the quotient of sizes."""
    factors, aligned = node.args[-1], any(each is True for each in node.args[2:])
    if len(node.args) < 3 or not isinstance(factors, list | tuple) or aligned:
        return True
    return all(extent * factor == made for extent, made, factor in zip(*_sizes(node), factors, strict=True))


def _sizes(node: Any) -> tuple[list[int], list[int]]:
    return [int(n) for n in node.args[0].meta["val"].shape[2:]], [int(n) for n in node.meta["val"].shape[2:]]


def _nearest(node: Any, importer: Any) -> relax.Var:
    """Of elements that are repeated the importer's; else those that torch takes."""
    if _is_by_sizes(node) and all(made % extent == 0 for extent, made in zip(*_sizes(node), strict=True)):
        return importer._upsample_nearest2d(node)
    found = importer.env[node.args[0]]
    for axis in range(2, found.ty.ndim):
        places = relax.const(_matrix(node, axis).argmax(axis=0), "int64")
        found = importer.block_builder.emit(relax.op.take(found, places, axis=axis))
    return found


def _by_matrices(node: Any, importer: Any) -> relax.Expr:
    found = importer.env[node.args[0]]
    for axis in range(2, found.ty.ndim):
        found = along(importer.block_builder.emit, found, axis, _matrix(node, axis))
    return found


def _matrix(node: Any, axis: int) -> np.ndarray:
    """What each element along an axis counts in each of the result: rows of the former. The other axes have two equal
    elements, which stay as they are; of a single one torch 2.13 makes smaller images that are wrong."""
    import torch

    x, made, place = node.args[0].meta["val"], node.meta["val"], axis - 2
    shape = [x.shape[axis] if n == place else 2 for n in range(x.ndim - 2)]
    along = [x.shape[axis] if n == place else 1 for n in range(x.ndim - 2)]
    units = torch.eye(x.shape[axis]).reshape(-1, 1, *along).expand(-1, 1, *shape)
    found = node.target(units, *_along(node.args[1:], place))
    first = found.movedim(axis, -1).reshape(x.shape[axis], -1, made.shape[axis])[:, 0]
    return first.numpy().astype(np.float32)


def _along(options: Sequence[Any], place: int) -> list[Any]:
    """Options for one axis alone: sizes of the others stay two, and factors one, be they in lists or, one for each
    axis, arguments of their own."""
    factors = [n for n, option in enumerate(options) if isinstance(option, float)]
    found: list[Any] = []
    for n, option in enumerate(options):
        if isinstance(option, list | tuple):
            others = 1.0 if isinstance(option[0], float) else 2
            option = [each if axis == place else others for axis, each in enumerate(option)]
        elif n in factors and factors.index(n) != place:
            option = 1.0
        found.append(option)
    return found


CONVERTERS: dict[str, _Convert] = {
    "upsample_nearest2d.vec": _nearest,
    "upsample_bilinear2d.vec": _resized("_upsample_bilinear2d"),
    "upsample_bicubic2d.vec": _resized("_upsample_bicubic2d"),
    **{f"_upsample_{kind}2d_aa.{of}": _resized("") for kind in ("bilinear", "bicubic") for of in ("default", "vec")},
}
