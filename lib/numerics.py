"""Inputs to run programs on, and how far apart two results are."""

import math

import numpy as np

_SPREAD = np.float32(0.2)  # standard deviation; of a sum of 768 products of two such values it is 1.1


def random_values(shape: tuple[int, ...], dtype: str, bound: int, seed: int) -> np.ndarray:
    """Seeded values: small normal ones for floats; for integers, uniform in [0, bound), zeros if that is unknown.

    TVM's own random fill writes float bits into integers; a gather with such an index reads out of bounds. And
    values decide the speed of some functions: sums over a few hundred products must stay near 1, as they do in
    a trained network, or an `erf` after them takes its fast or its slow way for every element.
    """
    rng = np.random.default_rng(seed)
    if dtype.startswith(("float", "bfloat")):
        return (_SPREAD * rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, max(bound, 1), shape).astype(dtype)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest expected magnitude; infinite where only one side is finite."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    if not np.array_equal(np.isfinite(found), np.isfinite(expected)):
        return math.inf
    with np.errstate(invalid="ignore"):  # inf - inf, where both sides are
        difference = np.nan_to_num(np.abs(found - expected), nan=0.0, posinf=0.0)
    largest = np.nan_to_num(np.abs(expected), nan=0.0, posinf=0.0).max(initial=0.0)
    return float(difference.max(initial=0.0) / (largest or 1.0))
