import numpy as np
import pytest

from lib.numerics import random_values, relative_error


def test_values_are_seeded_and_of_the_asked_type():
    first, second = (random_values((64, 64), "float32", 0, seed=3) for _ in range(2))

    assert first.dtype == np.float32
    assert np.array_equal(first, second)


def test_sums_of_products_stay_near_one():
    x, w = random_values((64, 768), "float32", 0, seed=1), random_values((768, 64), "float32", 0, seed=2)

    assert np.std(x @ w) == pytest.approx(1.1, rel=0.1)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_stay_below_their_bound(dtype):
    values = random_values((1000,), dtype, 7, seed=0)

    assert (values.dtype, values.min(), values.max()) == (np.dtype(dtype), 0, 6)


def test_integers_without_a_known_bound_are_zero():
    assert not random_values((10,), "int32", 0, seed=0).any()


def test_the_error_is_relative_to_the_largest_value():
    assert relative_error(np.array([1.0, 10.1]), np.array([1.0, 10.0])) == pytest.approx(0.01)


def test_what_is_not_finite_on_one_side_only_is_an_infinite_error():
    assert relative_error(np.array([np.nan, 1.0]), np.array([0.0, 1.0])) == np.inf
    assert relative_error(np.array([-np.inf, 1.0]), np.array([-np.inf, 1.0])) == 0.0
