"""Fourier transforms of torch as products with matrices, whose rows are its waves.

A signal of n elements takes n * n products so, and no memory for what is between the steps of a fast one: of spectra of
short windows, which sound is looked at in, and of small images, which is what networks transform, that is little beside
the rest. Longer ones than `MOST` are refused by name. Complex numbers are two real ones beside each other, as in
`lib.models.torch_complex`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax

from lib.models.torch_matrices import Emit, along

MOST = 4096  # elements along an axis: a matrix of 128 MiB
_BY_ROOT, _BY_COUNT = 1, 2  # torch's fft_norm_mode


def _of_real(node: Any, importer: Any) -> relax.Expr:
    """Real numbers to complex ones: along the last of the axes that are named, then along the others."""
    x, axes, how, onesided = node.args
    emit, found, rank = importer.block_builder.emit, importer.env[x], x.meta["val"].ndim
    *others, last = [axis % rank for axis in axes]
    shape = [int(n) for n in x.meta["val"].shape]
    factor = _factor(how, [shape[axis] for axis in axes])
    count = shape[last] // 2 + 1 if onesided else shape[last]
    found = along(emit, found, last, factor * waves_of_real(shape[last])[:, :count], complex_out=True)
    return _of_others(emit, found, others, sign=-1)


def _of_complex(node: Any, importer: Any) -> relax.Expr:
    x, axes, how, is_forward = node.args
    emit, found = importer.block_builder.emit, importer.env[x]
    extents = [int(n) for n in x.meta["val"].shape]
    made = _of_others(emit, found, [axis % len(extents) for axis in axes], sign=-1 if is_forward else 1)
    factor = _factor(how, [extents[axis] for axis in axes])
    return made if factor == 1 else emit(relax.op.multiply(made, relax.const(factor, "float32")))


def _to_real(node: Any, importer: Any) -> relax.Expr:
    """Half a spectrum to the real signal that it is of: along the others of the axes first."""
    x, axes, how, count = node.args
    emit, found, rank = importer.block_builder.emit, importer.env[x], x.meta["val"].ndim
    *others, last = [axis % rank for axis in axes]
    shape = [int(n) for n in x.meta["val"].shape]
    factor = _factor(how, [*(shape[axis] for axis in others), count])
    found = _of_others(emit, found, others, sign=1)
    return along(emit, found, last, factor * waves_to_real(count, shape[last]), complex_in=True)


def _of_others(emit: Emit, found: relax.Expr, axes: Sequence[int], sign: int) -> relax.Expr:
    for axis in axes:
        wave = waves(int(found.ty.shape[axis]), sign)
        found = along(emit, found, axis, wave, complex_in=True, complex_out=True)
    return found


def waves_of_real(count: int) -> np.ndarray:
    """count x count x 2: exp(-2 pi i j k / count), real and imaginary parts."""
    angles = _angles(count, count)
    return np.stack([np.cos(angles), -np.sin(angles)], -1)


def waves(count: int, sign: int) -> np.ndarray:
    """count x 2 x count x 2: what a complex number counts in each of a transform whose exponent has a sign."""
    angles = _angles(count, count)
    real, imaginary = np.cos(angles), sign * np.sin(angles)
    return np.stack([np.stack([real, imaginary], -1), np.stack([-imaginary, real], -1)], 1)


def waves_to_real(count: int, known: int) -> np.ndarray:
    """known x 2 x count: what the first numbers of a spectrum count in its signal; all but the first, and the last of
    an even number, stand for two."""
    angles, places = _angles(known, count), np.arange(known)
    twice = np.where((places == 0) | (2 * places == count), 1.0, 2.0)[:, None]
    return np.stack([twice * np.cos(angles), -twice * np.sin(angles)], 1)


def _angles(rows: int, columns: int) -> np.ndarray:
    count = max(rows, columns)
    if count > MOST:
        raise ValueError(f"a Fourier transform of {count} elements is not imported: those of up to {MOST} are")
    turns = np.outer(np.arange(rows), np.arange(columns)) % columns  # exact, where products of angles are not
    return 2 * np.pi * turns / columns


def _factor(how: int, extents: Sequence[int]) -> float:
    count = float(np.prod(extents))
    return {_BY_ROOT: count**-0.5, _BY_COUNT: 1 / count}.get(how, 1.0)


CONVERTERS: dict[str, Callable[[Any, Any], relax.Expr]] = {
    "_fft_r2c.default": _of_real,
    "_fft_c2c.default": _of_complex,
    "_fft_c2r.default": _to_real,
}
