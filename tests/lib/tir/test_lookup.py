"""Looking bytes up in a table of all of them, against NumPy."""

import re

import numpy as np
import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.target import Target

from lib.machine.registers import registers
from lib.tir import lookup, lowering
from lib.tir.workload import as_workload

WITH = {"kind": "llvm", "mcpu": "icelake-server"}
WITHOUT = {"kind": "llvm", "mcpu": "skylake-avx512"}
LINES = 3


def program(lanes, kind="uint8"):
    """Of some vectors of so many bytes."""
    table = te.placeholder((lookup.VALUES,), kind, name="table")
    data = te.placeholder((LINES, lanes), "uint8", name="data")
    out = lookup.looked_up(table, data)
    schedule = Schedule(as_workload(te.create_prim_func([table, data, out])))
    schedule.vectorize(schedule.get_loops(schedule.get_sblock(lookup.FUNCTION))[-1])
    return schedule.mod


@pytest.mark.parametrize("lanes", [1, 3, 16, 17, 32, 63, 64, 80])
@pytest.mark.parametrize("kind", ["uint8", "float32"])
def test_each_byte_becomes_what_the_table_has_for_it(cpu, lanes, kind):
    rng = np.random.default_rng(0)
    table, data = rng.permutation(lookup.VALUES).astype(kind), rng.integers(0, 256, (LINES, lanes)).astype(np.uint8)
    data.flat[:3] = [0, 127, 255] if lanes > 1 else data.flat[:3]
    found = tvm.runtime.empty(data.shape, kind)

    lowering.build(program(lanes, kind), cpu.tvm())["main"](*map(tvm.runtime.tensor, (table, data)), found)

    np.testing.assert_array_equal(found.numpy(), table[data])


def assembly(lanes, target, **given):
    pipeline = lowering.pipeline(lowering.standard("llvm"), **given)
    return tvm.tirx.build(program(lanes), Target(target), pipeline=pipeline).inspect_source("s")


@pytest.mark.parametrize("lanes", [16, 64])
@pytest.mark.parametrize("is_delivered", [False, True])
def test_a_vector_takes_two_instructions_where_the_machine_has_them(lanes, is_delivered):
    assert registers(Target(WITH)).looks_up
    assert len(re.findall(r"vperm[it]2b\t", assembly(lanes, WITH, is_delivered=is_delivered))) == 2 * LINES


def test_elsewhere_elements_are_read_one_by_one():
    assert not registers(Target(WITHOUT)).looks_up
    assert "vperm" not in assembly(16, WITHOUT)
