"""Running sums along an axis, against NumPy's."""

import json

import numpy as np
import pytest
from tvm.relax import op

from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.machine import targets
from tests.helpers import results
from tests.lib.graph.rules.helpers import module, operators


def summed(target, x, **attrs):
    """What a model computes whose running sum is a kernel of this project."""
    fused = fusion.fuse(module(lambda data: op.cumsum(data, **attrs), x), target.tvm())
    assert any(gvar.name_hint.startswith("running_sum") for gvar in fused.get_global_vars())
    assert not any("cumsum" in name for name in operators(fused))
    return results(fused, target, x)[0]


def values(shape, kind="float32"):
    return (np.random.default_rng(0).normal(size=shape) * 100).astype(kind)


@pytest.mark.parametrize("kind", ["float32", "int32", "int64"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((5, 7, 32), 1), ((5, 7, 24), -2), ((6, 5, 37), 0), ((2, 16, 64, 64), -2), ((65, 2), 0)],
)
def test_sums_run_along_any_axis_that_others_follow(cpu, shape, axis, kind):
    x = values(shape, kind)

    expected = np.cumsum(x, axis, dtype="float64" if kind == "float32" else kind)

    np.testing.assert_allclose(summed(cpu, x, axis=axis), expected, rtol=1e-5, atol=1e-2 * (kind == "float32"))


@pytest.mark.parametrize(("shape", "axis"), [((5, 7, 32), 1), ((24, 9), 0)])
def test_exclusive_ones_leave_out_the_element_itself(cpu, shape, axis):
    x = values(shape, "int64")

    np.testing.assert_array_equal(summed(cpu, x, axis=axis, exclusive=True), np.cumsum(x, axis) - x)


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize(("shape", "axis"), [((50, 40, 16), 1), ((120, 100), 0)])
def test_threads_take_all_lines_between_them(threads, shape, axis):
    target = targets.cpu_target(json.dumps({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": threads}))
    x = values(shape, "int64")

    np.testing.assert_array_equal(summed(target, x, axis=axis), np.cumsum(x, axis))


def test_what_is_not_finite_reaches_what_comes_after_it_alone(cpu):
    x = np.ones((8, 6), np.float32)
    x[3, 2] = np.inf

    found = summed(cpu, x, axis=0)

    assert np.isinf(found[3:, 2]).all()
    assert np.isfinite(np.delete(found, 2, 1)).all()


@pytest.mark.parametrize("attrs", [{"axis": 0, "dtype": "int64"}, {"axis": 1}, {}, {"axis": 0, "shape": (6, 1)}])
def test_sums_in_another_type_or_along_the_last_axis_stay_tvms(cpu, attrs):
    x = values(attrs.pop("shape", (4, 6)), "int32")
    fused = fusion.fuse(module(lambda data: op.cumsum(data, **attrs), x), cpu.tvm())

    assert any("cumsum" in gvar.name_hint for gvar in fused.get_global_vars())


def test_there_is_nothing_to_schedule(cpu):
    fused = fusion.fuse(module(lambda x: op.cumsum(x, 0), values((9, 32))), cpu.tvm())

    [found] = [each for each in extract_subgraphs(fused) if "running_sum" in each.name]

    assert found.core_operator == "other"
