import numpy as np
import pytest
from tvm import te
from tvm.s_tir import SBlock

from lib.tir import analysis, parameters, small_weights
from lib.tir.workload import as_workload


def product(data="uint8", weights="int8"):
    x, w = te.placeholder((4, 8), data, name="x"), te.placeholder((8, 6), weights, name="w")
    k = te.reduce_axis((0, 8), "k")
    out = te.compute((4, 6), lambda i, j: te.sum(x[i, k].astype("int32") * w[k, j].astype("int32"), axis=k), name="out")
    largest = te.compute((4, 1), lambda i, _: te.max(out[i, k], axis=k), name="largest")
    return as_workload(te.create_prim_func([x, w, largest]))["main"]


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ((64, 64), True),
        ((-64, -64), True),
        ((127, 1), True),
        ((127, 2), False),
        ((-128, -1), False),
        ((127, -128), True),
    ],
)
def test_a_pair_fits_if_255_times_its_sum_does_whatever_the_signs_of_data(pair, expected):
    weights = np.zeros((8, 3), np.int8)
    weights[4:6, 1] = pair

    assert small_weights.are_small(weights) == expected
    assert (255 * abs(sum(n for n in pair if n * pair[0] > 0)) < 2**15) == expected


def test_neighbours_are_input_channels_of_one_tap_two_by_two():
    weights = np.zeros((3, 3, 4, 2), np.int8)
    weights[0, 0, 1:3] = 127  # of two pairs
    weights[0, :, 0, 0] = 100  # of several taps
    weights[2, 2, 2] = [100, 28]
    weights[2, 2, 3] = [28, 100]

    assert small_weights.are_small(weights) is False  # the first pair of the first tap: 100 and 127
    weights[0, 0, 0] = 1
    assert small_weights.are_small(weights) is True


def test_the_last_of_an_odd_number_has_a_zero_for_a_neighbour():
    assert small_weights.are_small(np.full((1, 4), 127, np.int8)) is True
    assert small_weights.are_small(np.full((3, 4), 127, np.int8)) is False


def test_the_reduction_of_bytes_is_marked_and_its_weights_are_told():
    function = small_weights.marked(product())

    marked = [
        block.name_hint for block in analysis.walk(function.body, SBlock) if small_weights.MARK in block.annotations
    ]
    assert marked == ["out"]
    assert small_weights.positions(function) == {1}
    assert parameters.value_bounds(function) == {1: -64}


@pytest.mark.parametrize(("data", "weights"), [("int8", "int8"), ("int16", "int16"), ("uint8", "uint8")])
def test_other_products_are_not(data, weights):
    assert small_weights.positions(small_weights.marked(product(data, weights))) == set()


def test_without_the_mark_nothing_is_known_of_them():
    assert parameters.value_bounds(product()) == {}
