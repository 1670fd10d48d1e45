"""Inputs to run programs on, and how far apart two results are."""

import math
from collections.abc import Callable, Sequence

import numpy as np

_SPREAD = np.float32(0.2)  # standard deviation; of a sum of 768 products of two such values it is 1.1
_SMALL = 4  # exclusive bound of positive integers of which nothing is known
_BF16_ULP = 2.0**-7  # of a number's magnitude, at most: the distance of neighbouring bf16
_ROUNDED_OTHERWISE = 1e-3  # share of bytes that may be their neighbours
_OF_NEIGHBOURS = 0.01  # of the largest value: how far floats may be apart that are computed from neighbouring bytes
_EQUAL = 1e-4  # of the largest value: floats that are no farther apart differ by how sums were rounded
_BYTES = {"int8": (-128, 128), "uint8": (0, 256), "int16": (-128, 256)}  # from, to; the last are either of the former
ONES = -1  # in place of a bound: nothing but ones
_MASKED = 4  # one element in so many is masked
VANISHING = 1e-30  # below this largest magnitude, values are denormals soon, which processors may flush to zero


def random_values(shape: tuple[int, ...], dtype: str, bound: int, seed: int) -> np.ndarray:
    """Seeded values: small normal ones for floats, a mask for booleans, and for integers by their bound.

    Floats with a bound are small enough that a sum of so many products of them with numbers up to one stays below one.
    Integers are uniform in [0, bound); a bound of 2 makes a mask, `ONES` nothing but ones, and a number below that
    integers from it to its negative; without a bound (0) bytes have all their values, as quantised ones do, also in 16
    bits, and wider integers are small and positive, since programs divide by them. Of a mask at least half are ones, in
    each row and on the whole: where all is masked, attention no longer depends on queries and keys.

    TVM's own random fill writes float bits into integers; a gather with such an index reads out of bounds. And
    values decide the speed of some functions: sums over a few hundred products must stay near 1, as they do in
    a trained network, or an `erf` after them takes its fast or its slow way for every element.
    """
    rng = np.random.default_rng(seed)
    if bound == ONES:
        return np.ones(shape, dtype)
    if dtype.startswith(("float", "bfloat")):
        spread = np.float32(0.5 / math.sqrt(bound)) if bound else _SPREAD
        return (spread * rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
    if dtype == "bool" or bound == 2:
        return _mask(shape, rng).astype(dtype)
    if bound < ONES:
        return rng.integers(bound, -bound, shape, dtype, endpoint=True)
    if dtype in _BYTES and not bound:
        return rng.integers(*_BYTES[dtype], shape, dtype)
    return rng.integers(*((0, bound) if bound else (1, _SMALL)), shape).astype(dtype)


def _mask(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Ones, but for a quarter of each row (of all elements, where rows are shorter than that takes)."""
    n_elements = math.prod(shape)
    extent = shape[-1] if shape and shape[-1] >= _MASKED else max(n_elements, 1)
    rows = np.ones((n_elements // extent, extent), bool)
    rows[:, : extent // _MASKED] = False
    return rng.permuted(rows, axis=1).reshape(shape)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference of finite elements over the largest finite magnitude expected (over `VANISHING` at least,
    unless all is zero).

    Infinite where elements that are not finite differ in kind, sign or place; and where there are elements but none is
    finite: nothing was compared then.
    """
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(np.where(finite, 0.0, expected), np.where(np.isfinite(found), 0.0, found), equal_nan=True):
        return math.inf
    if expected.size and not finite.any():
        return math.inf
    difference = np.abs(found[finite] - expected[finite]).max(initial=0.0)
    largest = np.abs(expected[finite]).max(initial=0.0)
    return float(difference / (max(largest, VANISHING) if largest else 1.0))


def error_but_rounding(found: np.ndarray, expected: np.ndarray) -> float:
    """`relative_error`, where neighbouring bf16 count as equal: other sums may be rounded to the next one."""
    if str(expected.dtype) != "bfloat16" or not math.isfinite(relative_error(found, expected)):
        return relative_error(found, expected)
    a, b = found.astype(np.float64), expected.astype(np.float64)
    are_neighbours = np.abs(a - b) <= _BF16_ULP * np.maximum(np.abs(a), np.abs(b))
    return relative_error(np.where(are_neighbours, b, a), b)


def largest_magnitude(results: Sequence[np.ndarray]) -> float:
    """Of all finite elements; 0 if there are none."""
    values = [result.astype(np.float64) for result in results]
    return max((float(np.abs(v[np.isfinite(v)]).max(initial=0.0)) for v in values), default=0.0)


def largest_error(
    run: Callable[[Sequence[np.ndarray]], Sequence[Sequence[np.ndarray]]],
    inputs: Sequence[np.ndarray],
    *,
    has_bytes_within: bool = False,
) -> float:
    """The largest `relative_error` among the results of a program, against those of a reference on equal inputs.

    Sums in another order may be rounded to the next number of a narrow type. So neighbouring bf16 count as equal, and
    so do neighbouring bytes, if they are no more than one in a thousand; and as many floats that are computed from
    bytes which the program itself rounds, where they are no farther apart than neighbours make them.

    A subgraph may begin with the root or the logarithm of what others make positive. If a result has nothing finite to
    compare, both run again on the magnitudes of the inputs.

    Args:
        run: From inputs to the results of the reference, and those of the program.
        has_bytes_within: The program rounds to bytes, and goes on with them.
    """
    expected, found = run(inputs)
    if any(result.size and not np.isfinite(result.astype(np.float64)).any() for result in expected):
        expected, found = run([np.abs(array) for array in inputs])
    return max(_error(new, old, has_bytes_within) for new, old in zip(found, expected, strict=True))


def _error(found: np.ndarray, expected: np.ndarray, has_bytes_within: bool) -> float:
    kind = str(expected.dtype)
    if kind in ("int8", "uint8"):
        are_neighbours = np.abs(found.astype(np.int16) - expected) == 1
        if np.mean(are_neighbours) <= _ROUNDED_OTHERWISE:
            return relative_error(np.where(are_neighbours, expected, found), expected)
    if has_bytes_within and math.isfinite(relative_error(found, expected)):
        limits = np.array([_EQUAL, _OF_NEIGHBOURS]) * largest_magnitude([expected])
        differences = np.abs(found.astype(np.float64) - expected)
        are_neighbours = (differences > limits[0]) & (differences <= limits[1])
        if np.mean(are_neighbours) <= _ROUNDED_OTHERWISE:
            return relative_error(np.where(are_neighbours, expected, found), expected)
    return error_but_rounding(found, expected)
