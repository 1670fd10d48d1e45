import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.machine.dots import AMX_BF16
from lib.machine.registers import Registers
from lib.search.spaces import tiling

AVX512, AVX2 = Registers(32, 16), Registers(16, 8, spreads=False)


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


@pytest.mark.parametrize("rows", [19, 38])
def test_rows_that_only_tiles_of_one_vector_divide_have_others_beside_them(rows):
    """Xception's images have 19 pixels in a line."""
    found = {(row, tile.vectors) for tile in tiling.tiles(rows, 736, AVX512, remainders=True) for row in tile.rows}

    assert {(19, 1), (10, 2), (14, 2)} <= found
    assert all(rows % row == 0 for row, vectors in found if vectors == 1)
    assert tiling.tiles(rows, 736, AVX512) == [tiling.Tile(16, 1, (19,))]


@pytest.mark.parametrize(
    ("rows", "columns", "vectors"), [(169, 1008, {2, 3}), (28, 144, {2, 3}), (112, 16, {2}), (7, 256, {1, 2})]
)
def test_with_avx2_tiles_of_one_vector_are_left_where_others_are_as_good(rows, columns, vectors):
    """Each of their products needs a number that is loaded and spread by an instruction of its own."""
    assert {tile.vectors for tile in tiling.tiles(rows, columns, AVX2, remainders=True)} == vectors


@pytest.mark.parametrize(("rows", "machine", "better"), [(27, AVX2, (5, 2)), (93, AVX512, (14, 2))])
def test_rows_that_only_low_tiles_divide_have_higher_ones_beside_them(rows, machine, better):
    found = {(row, tile.vectors) for tile in tiling.tiles(rows, 192, machine, remainders=True) for row in tile.rows}

    assert {(3, 2), better} <= found


def test_197_tokens_are_cut_into_tiles_of_14_and_one_that_remains():
    found = {(row, tile.vectors) for tile in tiling.tiles(197, 768, AVX512, remainders=True) for row in tile.rows}

    assert (14, 2) in found
    assert (1, 2) not in found  # what divides 197: a quarter of the peak


def test_a_thousand_channels_are_whole_vectors_and_half_a_one():
    [*found] = tiling.tiles(13, 1000, AVX512, remainders=True)

    assert {tile.lanes for tile in found} == {16}
    assert {(row, tile.vectors) for tile in found for row in tile.rows} >= {(13, 1), (13, 2)}


@pytest.mark.parametrize("columns", [3, 7, 14])
def test_columns_that_are_fewer_than_lanes_and_fill_no_shorter_vector_are_one_vector(columns):
    [tile] = tiling.narrow_tiles(37, columns, AVX512)

    assert (tile.lanes, tile.vectors) == (columns, 1)
    assert max(tile.rows) == AVX512.count - 2
    assert tiling.tiles(37, columns, AVX512, remainders=True) == []


@pytest.mark.parametrize("columns", [1, 4, 8, 16, 17])
def test_other_columns_are_no_such_vector(columns):
    assert tiling.narrow_tiles(37, columns, AVX512) == []


def test_columns_that_fill_half_a_vector_take_shorter_ones():
    assert {tile.lanes for tile in tiling.tiles(14, 24, AVX512)} == {8}


def test_one_row_is_no_reason_to_give_up():
    assert tiling.tiles(1, 1000, AVX512)


@given(st.integers(1, 60), st.integers(1, 300), st.integers(1, 40), st.integers(1, 200), st.booleans())
def test_tiles_of_matrices_fit_their_registers_and_divide_columns_and_steps(lines, rows, vectors, steps, is_even):
    image = tiling.Image(lines, rows, is_even)

    found = tiling.matrix_tiles(image, 16 * vectors, steps, AMX_BF16)

    assert found
    for tile in found:
        assert vectors % tile.vectors == 0
        assert steps % tile.steps == 0
        assert tile.steps <= 16
        for row in tile.rows:
            assert tile.lines == 1 or row == rows  # several lines are whole ones
            apart = AMX_BF16.heights(row) * tile.lines
            together = AMX_BF16.heights(row * tile.lines)
            heights = together if is_even and row == rows else apart
            assert AMX_BF16.registers(heights, tile.vectors) <= AMX_BF16.REGISTERS


def test_columns_that_fill_no_vectors_have_no_tiles_of_matrices():
    assert tiling.matrix_tiles(tiling.Image(1, 64, is_even=False), 40, 16, AMX_BF16) == []


@pytest.mark.parametrize(
    ("image", "found"),
    [((1, 128, False), (1, 32, 2)), ((7, 7, True), (4, 7, 2)), ((14, 14, False), (2, 14, 2))],
    ids=["tokens", "seven lines, one after the other", "padded lines of fourteen"],
)
def test_the_best_tile_of_matrices_has_two_registers_of_rows_and_two_of_columns(image, found):
    lines, rows, vectors = found

    best = tiling.matrix_tiles(tiling.Image(*image), 512, 256, AMX_BF16)[0]

    assert (best.lines, best.vectors) == (lines, vectors)
    assert rows in best.rows


@pytest.mark.parametrize("row_bytes", [4096, 8192])
def test_few_rows_share_places_in_l1(row_bytes):
    """Of rows that lie 4,096 bytes apart, no tile has more than L1 has places for; 799 rows have one divisor alone that
    fits registers, 17, which is worth remainders then."""
    crowded = tiling.tiles(28, 512, AVX512, remainders=True, row_bytes=row_bytes)
    remaining = tiling.tiles(799, 512, AVX512, remainders=True, row_bytes=row_bytes)

    assert {row for tile in tiling.tiles(28, 512, AVX512) for row in tile.rows} >= {7, 14}
    assert {row for tile in crowded for row in tile.rows} == {4, 7}
    assert max(row for tile in remaining for row in tile.rows) <= 10
    assert tiling.tiles(799, 512, AVX512, remainders=True)[0] == tiling.Tile(16, 1, (17,))


@pytest.mark.parametrize("row_bytes", [0, 2048, 4160])
def test_other_distances_of_rows_change_nothing(row_bytes):
    assert tiling.tiles(28, 512, AVX512, row_bytes=row_bytes) == tiling.tiles(28, 512, AVX512)
