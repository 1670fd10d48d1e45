import ml_dtypes
import numpy as np
import pytest

from lib.tir.numerics import largest_error, random_values, relative_error


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


def test_integers_with_a_negative_bound_are_from_it_to_its_negative():
    values = random_values((10_000,), "int8", -64, seed=0)

    assert (values.dtype, values.min(), values.max()) == (np.int8, -64, 64)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_without_a_known_bound_are_small_and_positive(dtype):
    values = random_values((1000,), dtype, 0, seed=0)

    assert (values.dtype, set(values.tolist())) == (np.dtype(dtype), {1, 2, 3})


@pytest.mark.parametrize(("dtype", "bound"), [("bool", 0), ("int64", 2), ("int32", 2)])
@pytest.mark.parametrize("shape", [(1, 128), (3, 5, 7), (40, 1), (2, 3)])
def test_at_least_half_of_a_mask_and_of_each_row_are_ones_but_not_all(dtype, bound, shape):
    values = random_values(shape, dtype, bound, seed=0)

    assert (values.dtype, values.shape, set(values.ravel().tolist())) == (np.dtype(dtype), shape, {0, 1})
    assert values.mean() >= 0.5
    if shape[-1] > 3:  # shorter rows than that are masked as a whole
        assert values.mean(axis=-1).min() >= 0.5


@pytest.mark.parametrize("shape", [(), (1,), (0, 4)])
def test_a_mask_of_hardly_any_element_masks_none(shape):
    values = random_values(shape, "bool", 0, seed=0)

    assert values.shape == shape
    assert values.all()


def test_the_error_is_relative_to_the_largest_value():
    assert relative_error(np.array([1.0, 10.1]), np.array([1.0, 10.0])) == pytest.approx(0.01)


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([NAN, 1.0], [0.0, 1.0]),
        ([0.0, 1.0], [NAN, 1.0]),
        ([INF, 1.0], [0.0, 1.0]),
        ([INF, 1.0], [-INF, 1.0]),
        ([NAN, 1.0], [INF, 1.0]),
        ([INF, 1.0], [NAN, 1.0]),
        ([NAN, 1.0, 1.0], [1.0, NAN, 1.0]),
    ],
)
def test_what_is_not_finite_must_agree_in_kind_sign_and_place(found, expected):
    assert relative_error(np.array(found), np.array(expected)) == INF


def test_the_finite_elements_are_compared_beside_what_agrees():
    assert relative_error(np.array([-INF, NAN, 1.1]), np.array([-INF, NAN, 1.0])) == pytest.approx(0.1)
    assert relative_error(np.array([-INF, NAN, 1.0]), np.array([-INF, NAN, 1.0])) == 0.0


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_equal_results_of_which_nothing_is_finite_verify_nothing(value):
    assert relative_error(np.array([value, value]), np.array([value, value])) == INF


def test_results_without_elements_are_equal():
    assert relative_error(np.zeros((0, 4)), np.zeros((0, 4))) == 0.0


def test_programs_that_take_roots_are_compared_on_magnitudes():
    tried = []

    def run(inputs):
        tried.append([array.tolist() for array in inputs])
        with np.errstate(invalid="ignore"):
            roots = np.sqrt(inputs[0])
        return [roots, inputs[1]], [1.1 * roots, inputs[1]]

    error = largest_error(run, [np.array([-4.0, -9.0]), np.array([1, -2])])

    assert error == pytest.approx(0.1)
    assert tried == [[[-4.0, -9.0], [1, -2]], [[4.0, 9.0], [1, 2]]]


def test_programs_of_which_something_is_finite_run_once():
    tried = []

    def run(inputs):
        tried.append(inputs)
        return [np.array([NAN, 2.0])], [np.array([NAN, 1.0])]

    assert largest_error(run, [np.array([-1.0])]) == 0.5
    assert len(tried) == 1


def test_programs_without_any_finite_result_verify_nothing():
    assert largest_error(lambda _: [[np.array([NAN])]] * 2, [np.array([-1.0])]) == INF


def test_neighbouring_bf16_are_no_error_but_those_after_the_next_are():
    expected = np.array([1.0, -3.0, 100.0]).astype(ml_dtypes.bfloat16)
    bits = expected.view(np.uint16)

    def error(steps):
        found = (bits + np.uint16(steps)).view(ml_dtypes.bfloat16)
        return largest_error(lambda _inputs: ([expected], [found]), [])

    assert error(0) == error(1) == 0
    assert error(2) > 0


def test_a_wrong_result_in_bf16_is_an_error():
    expected, found = (np.array(values).astype(ml_dtypes.bfloat16) for values in ([1.0, 2.0], [1.0, 2.5]))

    assert largest_error(lambda _inputs: ([expected], [found]), []) == 0.25


def test_bytes_may_be_their_neighbours_one_in_a_thousand_and_no_more():
    expected = np.full(2000, 100, np.uint8)

    def error(n, by=1):
        found = expected.copy()
        found[:n] += by
        return largest_error(lambda _inputs: ([expected], [found]), [])

    assert error(0) == error(2) == 0
    assert error(3) == 0.01
    assert error(1, by=2) == 0.02


def test_floats_of_neighbouring_bytes_are_no_error_where_a_program_rounds_to_bytes_within():
    expected = np.linspace(-1, 1, 2000, dtype=np.float32)

    def error(n, by=1 / 255, within=True):
        found = expected.copy()
        found[:n] += np.float32(by)
        return largest_error(lambda _inputs: ([expected], [found]), [], has_bytes_within=within)

    assert error(0) == error(2) == 0
    assert error(2, within=False) == pytest.approx(1 / 255, rel=1e-4)
    assert error(3) == pytest.approx(1 / 255, rel=1e-4)
    assert error(1, by=0.02) == pytest.approx(0.02, rel=1e-4)
    assert 0 < error(2000, by=1e-6) < 2e-6  # sums in another order stay what they are


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_bytes_have_all_their_values(dtype):
    values = random_values((100, 100), dtype, 0, seed=0)

    assert values.dtype == dtype
    assert len(np.unique(values)) == 256
