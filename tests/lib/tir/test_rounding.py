"""Rounding by the CPU's instructions: to bf16 against ml_dtypes, to bytes against NumPy."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.s_tir import Schedule
from tvm.target import Target

from lib.tir import lowering, rounding
from lib.tir.workload import as_workload
from tests.lib.tir.test_dot import WITH, WITHOUT, needs_it


def cast(lanes, to="bfloat16", before=lambda x: x):
    """In twelve vectors of so many."""
    x = te.placeholder((12 * lanes,), "float32", name="x")
    out = te.compute((12 * lanes,), lambda i: before(x[i]).astype(to), name="out")
    schedule = Schedule(as_workload(te.create_prim_func([x, out])))
    if lanes > 1:
        _, lane = schedule.split(schedule.get_loops(schedule.get_sblock("out"))[0], [None, lanes])
        schedule.vectorize(lane)
    return schedule.mod


def assembly(module, target):
    return lowering.build(module, Target(target)).inspect_source("s")


@needs_it
@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 5, 8, 12, 16, 17, 32, 64, 96])
def test_it_is_to_the_nearest_ties_to_even(cpu, lanes):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(12 * lanes) * 10.0 ** rng.integers(-30, 30, 12 * lanes)).astype(np.float32)
    x[:8] = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0, np.inf, -np.inf, 3.4e38]  # ties; what becomes infinite
    found = tvm.runtime.empty((12 * lanes,), "bfloat16")

    lowering.build(cast(lanes), cpu.tvm())["main"](tvm.runtime.tensor(x), found)

    np.testing.assert_array_equal(found.numpy(), x.astype(ml_dtypes.bfloat16))


@needs_it
def test_no_number_stays_no_number(cpu):
    found = tvm.runtime.empty((192,), "bfloat16")

    lowering.build(cast(16), cpu.tvm())["main"](tvm.runtime.tensor(np.full(192, np.nan, np.float32)), found)

    assert np.isnan(found.numpy().astype(np.float32)).all()


@pytest.mark.parametrize("lanes", [1, 16])
def test_it_is_one_instruction_where_the_machine_has_it(lanes):
    assert "vcvtneps2bf16" in assembly(cast(lanes), WITH)


def test_without_the_instruction_it_stays_arithmetic_and_calls_nothing():
    found = assembly(cast(16), WITHOUT)

    assert "vcvtneps2bf16" not in found
    assert "truncsfbf2" not in found  # compiler-rt's, a call for each element


def test_casts_to_other_types_stay_as_they_are():
    assert "vcvtps2ph" in assembly(cast(16, "float16"), WITH)


def bounded(x, least=0.0, most=255.0):
    return tirx.min(tirx.max(tirx.nearbyint(x), tirx.const(least, "float32")), tirx.const(most, "float32"))


@pytest.mark.parametrize("lanes", [1, 3, 4, 8, 16, 17, 64, 96])
def test_bytes_are_to_the_nearest_ties_to_even_and_bounded(cpu, lanes):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(12 * lanes) * 10.0 ** rng.integers(-3, 12, 12 * lanes)).astype(np.float32)
    x[:12] = [0.5, 1.5, 2.5, 254.5, 255.5, -0.5, -3, 256, 2.0**31, 3e38, np.inf, -np.inf]
    found = tvm.runtime.empty((12 * lanes,), "uint8")

    lowering.build(cast(lanes, "uint8", bounded), cpu.tvm())["main"](tvm.runtime.tensor(x), found)

    np.testing.assert_array_equal(found.numpy(), np.clip(np.rint(x), 0, 255).astype(np.uint8))


@pytest.mark.parametrize("zero", [1.0, 128.0, 255.0, 90.5, -3.0])
@pytest.mark.parametrize("lanes", [1, 16, 17])
def test_bytes_are_counted_from_a_zero_point(cpu, lanes, zero):
    """Also from one that is no integer, which no file has, but a program may."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(12 * lanes) * 10.0 ** rng.integers(-3, 12, 12 * lanes)).astype(np.float32)
    x[:12] = [0.5, 1.5, 2.5, 126.5, 127.5, -128.5, -129.5, 256, 2.0**31, 3e38, np.inf, -np.inf]
    found = tvm.runtime.empty((12 * lanes,), "uint8")
    program = cast(lanes, "uint8", lambda each: moved(each, zero))

    lowering.build(program, cpu.tvm())["main"](tvm.runtime.tensor(x), found)

    expected = np.clip(np.rint(x) + np.float32(zero), 0, 255).astype(np.uint8)
    np.testing.assert_array_equal(found.numpy(), expected)


def moved(x, zero):
    near = tirx.nearbyint(x) + tirx.const(zero, "float32")
    return tirx.min(tirx.max(near, tirx.const(0.0, "float32")), tirx.const(255.0, "float32"))


def test_a_zero_point_takes_one_instruction_more_where_the_machine_has_them():
    found = assembly(cast(16, "uint8", lambda each: moved(each, 90.0)), WITH)

    assert "vpmovusdb" in found
    assert "vpaddd" in found
    assert "vrndscaleps" not in found
    assert "vminps" not in found


def test_bytes_take_three_instructions_where_the_machine_has_them():
    found = assembly(cast(16, "uint8", bounded), WITH)

    assert "vpmovusdb" in found
    assert "vcvtps2dq" in found
    assert "vrndscaleps" not in found
    assert "vminps" not in found


@pytest.mark.parametrize("bounds", [(1.0, 255.0), (0.0, 6.0)])
def test_other_bounds_are_kept(cpu, bounds):
    x = np.linspace(-10, 300, 192, dtype=np.float32)
    found = tvm.runtime.empty((192,), "uint8")
    program = cast(16, "uint8", lambda each: bounded(each, *bounds))

    lowering.build(program, cpu.tvm())["main"](tvm.runtime.tensor(x), found)

    np.testing.assert_array_equal(found.numpy(), np.clip(np.rint(x), *bounds).astype(np.uint8))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("build", [lowering.build, tvm.tirx.build], ids=["this project", "TVM"])
def test_a_float_in_parts_is_nearly_their_sum_also_where_tvm_takes_casts_for_nothing(cpu, build, count):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(256) * 10.0 ** rng.integers(-20, 20, 256)).astype(np.float32)
    source = te.placeholder((256,), "float32", name="x")
    made = [te.compute((256,), lambda i: rounding.in_parts(source[i], count)[n]) for n in range(count)]  # noqa: B023
    parts = [tvm.runtime.empty((256,), "bfloat16") for _ in range(count)]

    build(as_workload(te.create_prim_func([source, *made])), cpu.tvm())["main"](tvm.runtime.tensor(x), *parts)

    found = np.cumsum([part.numpy().astype(np.float64) for part in parts], axis=0)
    for n, so_far in enumerate(found, start=1):
        np.testing.assert_allclose(so_far, x, rtol=2.0 ** (-8 * n))
