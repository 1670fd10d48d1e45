"""What integer parameters are taken for, and that programs can be run with values below their bounds."""

import pytest
import tvm
from tvm import te, tirx, topi
from tvm.script import tirx as T

from lib.tir.numerics import random_values
from lib.tir.parameters import index_bounds, is_held, masks, value_bounds
from tests.helpers import gather, matmul, run_on

ROWS = 50


def function(*tensors):
    return te.create_prim_func(tensors)


def given(n=6, dtype="int64"):
    return te.placeholder((n,), dtype, name="given")


def table(rows=ROWS):
    return te.placeholder((rows, 8), name="table")


def read(rows, ids):
    return te.compute((ids.shape[0], 8), lambda i, j: rows[ids[i], j], name="read")


def from_the_end():
    """Ids as ONNX has them: negative ones count from the end."""
    rows, ids = table(), given()
    offset = topi.add(ids, tirx.const(ROWS, "int64"))
    negative = te.compute(ids.shape, lambda i: ids[i] < 0, name="negative")
    counted = te.compute(ids.shape, lambda i: tirx.Select(negative[i], offset[i], ids[i]), name="counted")
    return function(rows, ids, read(rows, counted))


def products_as_ids():
    rows, ids = table(), given()
    return function(rows, ids, read(rows, topi.multiply(ids, tirx.const(7, "int64"))))


@T.prim_func(s_tir=True)
def _scatters(ids: T.Buffer((6,), "int64"), out: T.Buffer((9,), "float32")) -> None:
    for i in range(6):
        with T.sblock("scatter"):
            n = T.axis.spatial(6, i)
            out[ids[n]] = T.float32(1)


def test_the_bound_of_token_ids_is_the_height_of_the_table():
    assert index_bounds(gather(rows=50)["main"]) == {1: 50}


def test_floats_have_no_bound():
    assert value_bounds(matmul()["main"]) == {}


@pytest.mark.parametrize(("program", "bounds"), [(from_the_end(), {1: ROWS}), (_scatters, {0: 9})])
def test_ids_are_followed_into_other_blocks_and_into_what_is_written(program, bounds):
    assert index_bounds(program) == bounds
    assert masks(program) == set()


def test_of_what_an_index_is_computed_from_only_zeros_are_safe():
    assert index_bounds(products_as_ids()) == {}
    assert value_bounds(products_as_ids()) == {1: 1}


def additive(one):
    """(1 - mask) * -10000, as exporters write it: cast, subtract, multiply."""
    mask = given()
    return function(mask, topi.multiply(topi.subtract(one, topi.cast(mask, "float32")), tirx.const(-1e4, "float32")))


def compared(compare):
    mask, scores = given(), te.placeholder((6,), name="scores")
    hidden = te.compute((6,), lambda i: compare(mask[i]), name="hidden")
    return function(mask, scores, te.compute((6,), lambda i: tirx.Select(hidden[i], scores[i], -9.0), name="masked"))


MASKS = {
    "one minus it": additive(tirx.const(1.0, "float32")),
    "cast to bool": compared(lambda value: value.astype("bool")),
    "equal to zero": compared(lambda value: tirx.EQ(value, tirx.const(0, "int64"))),
    "unlike one": compared(lambda value: tirx.NE(value, tirx.const(1, "int64"))),
    "positive": compared(lambda value: value > tirx.const(0, "int64")),
}


@pytest.mark.parametrize("use", MASKS)
def test_a_mask_is_told_by_how_it_is_used(use):
    assert masks(MASKS[use]) == {0}
    assert value_bounds(MASKS[use]) == {0: 2}


def test_one_may_be_a_tensor_of_one_element():
    one, mask = te.placeholder((1,), name="one"), given()
    other = te.compute((6,), lambda i: one[0] - mask[i].astype("float32"), name="other")

    assert masks(function(one, mask, other)) == {1}


def test_a_picture_of_bytes_is_no_mask():
    picture = given(dtype="uint8")

    centred = topi.subtract(topi.cast(picture, "float32"), tirx.const(127.5, "float32"))

    assert value_bounds(function(picture, centred)) == {}


def test_ids_that_are_compared_with_the_padding_are_ids():
    rows, ids = table(), given()
    kept = te.compute((6,), lambda i: tirx.NE(ids[i], tirx.const(1, "int64")), name="kept")
    found = te.compute((6, 8), lambda i, j: tirx.Select(kept[i], rows[ids[i], j], 0.0), name="found")

    assert value_bounds(function(rows, ids, found)) == {1: ROWS}


def test_a_result_holds_what_was_moved_or_cast_but_not_what_was_computed():
    moved, summed = (
        function(ids, topi.cast(topi.reshape(make(ids), (2, 3)), "int32"))
        for ids, make in ((given(), lambda ids: ids), (given(), lambda ids: topi.multiply(ids, ids)))
    )

    assert is_held(moved, 0)
    assert not is_held(summed, 0)


def test_a_division_by_integers_is_finite(cpu):
    lengths, total = given(), te.placeholder((6,), name="total")
    mean = te.compute((6,), lambda i: total[i] / lengths[i].astype("float32"), name="mean")
    workload = tvm.IRModule({"main": function(lengths, total, mean).with_attr("global_symbol", "main")})
    arrays = [
        random_values(shape, dtype, value_bounds(workload["main"]).get(n, 0), seed=n)
        for n, (shape, dtype) in enumerate([((6,), "int64"), ((6,), "float32")])
    ]

    found = run_on(workload, cpu.tvm(), arrays, random_values((6,), "float32", 0, seed=2))

    assert abs(found - arrays[1] / arrays[0]).max() < 1e-6
