"""Rows put or added where indices say, against the same element by element."""

import json

import numpy as np
import pytest
from tvm.relax import op

from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.machine import targets
from tests.helpers import results
from tests.lib.graph.rules.helpers import module, operators, random

OF = {"update": lambda _, new: new, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def expected(data, places, values, reduction):
    """`places`: (n, known axes)."""
    found = data.copy()
    for place, value in zip(places, values, strict=True):
        found[tuple(place)] = OF[reduction](found[tuple(place)], value)
    return found


def scattered(target, build, *given):
    """What a model computes whose scatter is a kernel of this project."""
    fused = fusion.fuse(fusion.lift_constants(module(build, *given)).module, target.tvm())
    assert any(gvar.name_hint.startswith("scatter") for gvar in fused.get_global_vars())
    assert not any("scatter_" in name for name in operators(fused))
    return results(fused, target, *given)[0]


@pytest.mark.parametrize("reduction", OF)
@pytest.mark.parametrize(
    ("shape", "known", "n"),
    [((7, 40), 1, 50), ((300, 64), 1, 400), ((5,), 1, 9), ((3, 4, 17), 2, 30), ((2, 3, 5), 3, 40), ((1, 33), 1, 3)],
)
def test_every_reduction_takes_its_values_in_their_order(cpu, shape, known, n, reduction):
    random_places = np.random.default_rng(0)
    places = np.stack([random_places.integers(0, extent, n) for extent in shape[:known]], 1)
    data, values = random(shape, 1), random((n, *shape[known:]), 2)

    found = scattered(cpu, lambda x, i, v: op.scatter_nd(x, i, v, reduction), data, places, values)

    np.testing.assert_allclose(found, expected(data, places, values, reduction), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 3, 64])
def test_threads_take_all_rows_between_them(threads):
    target = targets.cpu_target(json.dumps({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": threads}))
    places = np.random.default_rng(0).integers(0, 50, (500, 1))
    data, values = random((50, 33), 1), random((500, 33), 2)

    found = scattered(target, lambda x, i, v: op.scatter_nd(x, i, v, "add"), data, places, values)

    np.testing.assert_allclose(found, expected(data, places, values, "add"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("axis", "kind"), [(0, "int64"), (-2, "int32"), (1, "int64")])
def test_elements_with_one_place_along_a_row_are_rows(cpu, axis, kind):
    shape = (9, 20)
    data, values = random(shape, 1), random((15, 20) if axis != 1 else (9, 15), 2)
    places = np.random.default_rng(0).integers(-shape[axis], shape[axis], 15).astype(kind)

    def build(x, i, v):
        spread = op.broadcast_to(op.reshape(i, (1, 15) if axis == 1 else (15, 1)), values.shape)
        return op.scatter_elements(x, spread, v, axis, "add")

    found = scattered(cpu, build, data, places, values)

    of_rows = expected(np.moveaxis(data, axis, 0), places[:, None], np.moveaxis(values, axis, 0), "add")
    np.testing.assert_allclose(found, np.moveaxis(of_rows, 0, axis), rtol=1e-5, atol=1e-6)


def test_places_beyond_the_data_write_nothing(cpu):
    data, values = random((4, 32), 1), random((3, 32), 2)

    found = scattered(cpu, op.scatter_nd, data, np.array([[4], [1], [-9]]), values)

    np.testing.assert_array_equal(found, expected(data, [[1]], values[1:2], "update"))


def test_elements_with_places_of_their_own_and_means_stay_tvms(cpu):
    """And those that all go to one place."""
    data, places = random((4, 6), 1), np.random.default_rng(0).integers(0, 4, (5, 6))

    for reduction, given in (("add", places), ("mean", places[:, :1]), ("add", places[:1, :1])):

        def build(x, i, v):
            return op.scatter_elements(x, op.broadcast_to(i, (5, 6)), v, 0, reduction)  # noqa: B023

        fused = fusion.fuse(module(build, data, given, random((5, 6), 2)), cpu.tvm())
        assert any("scatter_elements" in gvar.name_hint for gvar in fused.get_global_vars())


def test_there_is_nothing_to_schedule(cpu):
    made = module(lambda x, i, v: op.scatter_nd(x, i, v, "add"), (9, 32), np.array([[1], [2]]), (2, 32))

    [found] = [each for each in extract_subgraphs(fusion.fuse(made, cpu.tvm())) if "scatter" in each.name]

    assert found.core_operator == "other"
