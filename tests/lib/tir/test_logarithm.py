"""Logarithms in vectors, against NumPy's of float64."""

import re

import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.s_tir import Schedule
from tvm.target import Target

from lib.tir import logarithm, lowering
from lib.tir.workload import as_workload

EDGES = np.array([0, -0.0, -1, -1e-45, np.inf, -np.inf, np.nan, 1e-40, 1.4e-45, 2.0**-126, 1, 3.4e38], np.float32)


def program(n, lanes, kind="float32"):
    """log(x) + log(log(x)) of n numbers, as many of them a vector."""
    x = te.placeholder((n,), kind, name="x")
    once = te.compute((n,), lambda i: tirx.log(x[i]), name="once")
    out = te.compute((n,), lambda i: once[i] + tirx.log(once[i]), name="twice")
    schedule = Schedule(as_workload(te.create_prim_func([x, once, out])))
    for name in ("once", "twice"):
        if lanes > 1:
            schedule.vectorize(schedule.split(schedule.get_loops(schedule.get_sblock(name))[-1], [None, lanes])[1])
    return schedule.mod


def computed(target, x, lanes):
    found = [tvm.runtime.empty(x.shape, str(x.dtype)) for _ in range(2)]
    lowering.build(program(len(x), lanes, str(x.dtype)), target)["main"](tvm.runtime.tensor(x), *found)
    return [each.numpy() for each in found]


@pytest.mark.parametrize("lanes", [1, 4, 16, 32])
def test_logarithms_are_off_by_little_of_their_value(cpu, lanes):
    x = np.concatenate([np.exp(np.linspace(-87, 88.7, 4096)), np.linspace(0.5, 2, 4096)]).astype(np.float32)
    exact = np.log(x.astype(np.float64))

    once, twice = computed(cpu.tvm(), x, lanes)

    assert (np.abs(once - exact) <= 1.8e-7 * np.abs(exact)).all()
    positive = once > 0
    wanted = (once + np.log(once.astype(np.float64), where=positive, out=np.zeros(len(x))))[positive]
    np.testing.assert_allclose(twice[positive], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lanes", [1, 4])
def test_what_has_none_and_the_smallest_numbers_are_as_numpy_has_them(cpu, lanes):
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(computed(cpu.tvm(), EDGES, lanes)[0], np.log(EDGES), rtol=3e-7)


def test_nothing_is_called(cpu):
    calls = re.findall(r"(?:call|jmp)\w*\s+\S*log\S*", assembly(cpu.tvm(), "float32"))

    assert calls == []
    assert re.findall(r"(?:call|jmp)\w*\s+\S*log\S*", assembly(cpu.tvm(), "float64"))  # which stays libm's


def assembly(target, kind):
    return lowering.build(program(64, 16, kind), target).inspect_source("asm")


def test_gpus_have_their_own():
    function = program(64, 1)["main"].with_attr("target", Target("nvidia/nvidia-h100"))

    assert logarithm.insert(function) is function
