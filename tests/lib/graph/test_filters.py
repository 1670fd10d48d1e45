import numpy as np
import pytest

from lib.graph.filters import integral, minimal


@pytest.mark.parametrize(("tile", "taps"), [(2, 3), (4, 3), (3, 3), (4, 4), (4, 5), (2, 1), (1, 2), (6, 3), (5, 5)])
def test_a_tile_is_what_a_filter_gives(tile, taps):
    rng = np.random.default_rng(0)
    found = minimal(tile, taps)
    data, kernel = rng.normal(size=found.window), rng.normal(size=taps)

    result = found.result @ ((found.kernel @ kernel) * (found.data @ data))

    assert found.window == tile + taps - 1
    np.testing.assert_allclose(result, np.correlate(data, kernel, "valid"), atol=1e-12)


def test_the_matrices_of_two_results_by_hand():
    """Lavin and Gray, section 4.1, the last multiplication with the other sign."""
    found = minimal(2, 3)

    np.testing.assert_array_equal(found.data, [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, -1, 0, 1]])
    np.testing.assert_array_equal(found.kernel, [[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    np.testing.assert_array_equal(found.result, [[1, 1, 1, 0], [0, 1, -1, 1]])


@pytest.mark.parametrize(("tile", "taps"), [(2, 3), (4, 3), (2, 5), (4, 2)])
def test_in_integers_it_is_a_multiple_of_what_a_filter_gives(tile, taps):
    rng = np.random.default_rng(0)
    found, factor = integral(tile, taps)
    data, kernel = rng.integers(0, 256, found.window), rng.integers(-128, 128, taps)

    result = found.result @ ((found.kernel @ kernel) * (found.data @ data))

    for matrix in (found.data, found.kernel, found.result):
        np.testing.assert_array_equal(matrix, np.rint(matrix))
    np.testing.assert_array_equal(result, factor * np.correlate(data, kernel, "valid"))


def test_what_four_results_are_multiplied_with_by_hand():
    """The denominators of Lavin and Gray, section 4.3, are 4, 6 and 24."""
    found, factor = integral(4, 3)

    np.testing.assert_array_equal(
        np.abs(found.kernel), [[1, 0, 0], [1, 1, 1], [1, 1, 1], [1, 2, 4], [1, 2, 4], [0, 0, 1]]
    )
    assert factor == 24


@pytest.mark.parametrize(("tile", "taps"), [(1, 1), (6, 6)])
def test_there_are_points_for_some_filters_alone(tile, taps):
    with pytest.raises(ValueError, match=f"m = {tile} and r = {taps}"):
        minimal(tile, taps)
