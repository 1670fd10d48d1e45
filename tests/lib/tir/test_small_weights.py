import numpy as np
import pytest
from tvm import te
from tvm.s_tir import SBlock

from lib.machine.dots import ARM_SMALL, INT7
from lib.tir import analysis, parameters, small_weights
from lib.tir.workload import as_workload


def product(data="uint8", weights="int8"):
    x, w = te.placeholder((4, 8), data, name="x"), te.placeholder((8, 6), weights, name="w")
    k = te.reduce_axis((0, 8), "k")
    out = te.compute((4, 6), lambda i, j: te.sum(x[i, k].astype("int32") * w[k, j].astype("int32"), axis=k), name="out")
    largest = te.compute((4, 1), lambda i, _: te.max(out[i, k], axis=k), name="largest")
    return as_workload(te.create_prim_func([x, w, largest]))["main"]


@pytest.mark.parametrize(
    ("pair", "words"),
    [((64, 64), 2), ((-64, -64), 2), ((127, 1), 2), ((127, 2), 0), ((-128, -1), 0), ((127, -128), 2), ((32, 97), 0)],
)
def test_a_pair_fits_if_255_times_the_sum_of_each_sign_does(pair, words):
    weights = np.zeros((8, 3), np.int8)
    weights[4:6, 1] = pair

    assert small_weights.words_together(weights) == words
    assert (255 * abs(sum(n for n in pair if n * pair[0] > 0)) < 2**15) == (words > 0)


@pytest.mark.parametrize(
    ("channels", "words"),
    [((0, 1, 4, 5), 1), ((2, 3, 6, 7), 1), ((0, 1, 2, 3), 2), ((0, 1, 6, 7), 2), ((4, 5, 8, 9), 2)],
)
def test_two_words_are_added_in_the_places_of_their_pairs(channels, words):
    weights = np.zeros((16, 3), np.int8)
    weights[list(channels), 2] = 33  # of which three fit

    assert small_weights.words_together(weights) == words


def test_what_is_found_is_what_sums_of_16_bits_hold():
    """All pairs and fours of random weights, as the instructions add them, against data of nothing but 255 or 0."""
    rng = np.random.default_rng(0)
    found = []
    for largest in (30, 40, 60, 70, 100):
        weights = rng.integers(-largest, largest + 1, (24, 2)).astype(np.int8)
        apart = weights.astype(int).reshape(3, 2, 2, 2, 2)  # two words of two pairs, columns
        for_each_sign = [np.where(sign * apart > 0, 255 * apart, 0) for sign in (1, -1)]
        fits = [all(abs(sums.sum(axes)).max() < 2**15 for sums in for_each_sign) for axes in (3, (1, 3))]
        assert small_weights.words_together(weights) == sum(fits)
        found.append(sum(fits))
    assert set(found) == {0, 1, 2}


def test_neighbours_are_input_channels_of_one_tap():
    weights = np.zeros((3, 3, 4, 2), np.int8)
    weights[0, :, 0, 0] = 100
    weights[0, 0, 2:, 0] = [28, 100]

    assert small_weights.words_together(weights) == 2
    weights[0, 0, 1, 0] = 29
    assert small_weights.words_together(weights) == 0


def test_missing_channels_are_zeros():
    assert small_weights.words_together(np.full((1, 4), 127, np.int8)) == 2
    assert small_weights.words_together(np.full((3, 4), 127, np.int8)) == 0


@pytest.mark.parametrize(
    ("pair", "words"), [((127, -128), 1), ((-127, -128), 1), ((-128, -128), 0), ((0, -128), 1), ((100, 100), 1)]
)
def test_of_signed_data_any_pair_fits_but_that_of_the_least_numbers(pair, words):
    weights = np.full((8, 3), 64, np.int8)
    weights[4:6, 1] = pair

    assert small_weights.words_together(weights, ARM_SMALL) == words
    sums = [a * pair[0] + b * pair[1] for a in (-128, 127) for b in (-128, 127)]
    assert all(-(2**15) <= each < 2**15 for each in sums) == (words > 0)


@pytest.mark.parametrize(
    ("data", "words", "largest", "dot"), [("uint8", 1, 64, INT7), ("uint8", 2, 32, INT7), ("int8", 1, 127, ARM_SMALL)]
)
def test_the_reduction_of_bytes_is_marked_and_its_weights_are_told(data, words, largest, dot):
    function = small_weights.marked(product(data), words)

    marked = [
        block.name_hint for block in analysis.walk(function.body, SBlock) if small_weights.MARK in block.annotations
    ]
    assert marked == ["out"]
    assert small_weights.bounds(function) == {1: largest}
    assert parameters.value_bounds(function) == {1: -largest}
    assert small_weights.words_together(np.full((8, 6), -largest, np.int8), dot) == words


@pytest.mark.parametrize(("data", "weights"), [("int8", "int16"), ("int16", "int16"), ("uint8", "uint8")])
def test_other_products_are_not(data, weights):
    assert small_weights.bounds(small_weights.marked(product(data, weights), 1)) == {}


def test_without_the_mark_nothing_is_known_of_them():
    assert parameters.value_bounds(product()) == {}
