import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.machine.registers import Registers
from lib.search.spaces import tiling

AVX512, AVX2 = Registers(32, 16), Registers(16, 8)


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([AVX512, AVX2]))
def test_every_tile_divides_the_output_and_fits_the_registers(rows, columns, machine):
    for tile in tiling.tiles(rows, columns, machine):
        assert columns % (tile.vectors * tile.lanes) == 0
        assert tile.rows
        for row in tile.rows:
            assert rows % row == 0
            assert row * tile.vectors + tile.vectors + 1 <= machine.count


def test_tiles_of_a_convolution_of_14_pixels_and_256_channels():
    found = {(row, tile.vectors) for tile in tiling.tiles(14, 256, AVX512) for row in tile.rows}

    # 2 rows by 4 vectors would read four vectors of weights for eight multiply-adds: twice what the cache gives.
    assert found == {(7, 1), (14, 1), (7, 2), (14, 2)}


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([AVX512, AVX2]))
def test_what_remains_of_columns_is_whole_vectors_or_part_of_one(rows, columns, machine):
    for tile in tiling.tiles(rows, columns, machine, remainders=True):
        remainder = columns % (tile.vectors * tile.lanes)
        assert remainder % tile.lanes == 0 or remainder < tile.lanes
        assert columns >= tile.vectors * tile.lanes
        assert max(tile.rows) <= rows
        assert max(tile.rows) * tile.vectors + tile.vectors + 1 <= machine.count


def test_tiles_divide_an_output_that_they_can_divide_well():
    for rows, columns in ((14, 256), (128, 1024), (7, 512), (56, 64), (14, 24), (1, 1000)):
        assert tiling.tiles(rows, columns, AVX512, remainders=True) == tiling.tiles(rows, columns, AVX512)


def test_197_tokens_are_cut_into_tiles_of_14_and_one_that_remains():
    found = {(row, tile.vectors) for tile in tiling.tiles(197, 768, AVX512, remainders=True) for row in tile.rows}

    assert (14, 2) in found
    assert (1, 2) not in found  # what divides 197: a quarter of the peak


def test_a_thousand_channels_are_whole_vectors_and_half_a_one():
    [*found] = tiling.tiles(13, 1000, AVX512, remainders=True)

    assert {tile.lanes for tile in found} == {16}
    assert {(row, tile.vectors) for tile in found for row in tile.rows} >= {(13, 1), (13, 2)}


@pytest.mark.parametrize("remainders", [False, True])
def test_columns_that_fill_no_vector_have_no_tiles(remainders):
    assert tiling.tiles(14, 3, AVX512, remainders) == []


def test_columns_that_fill_half_a_vector_take_shorter_ones():
    assert {tile.lanes for tile in tiling.tiles(14, 24, AVX512)} == {8}


def test_one_row_is_no_reason_to_give_up():
    assert tiling.tiles(1, 1000, AVX512)
