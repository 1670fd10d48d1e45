"""That vectors of which several lanes read one element are loaded whole, and are right wherever they lie."""

import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.s_tir import Schedule

from lib.machine.registers import registers
from lib.tir import lowering, spread
from lib.tir.workload import as_workload


def reads(place, n_in, n_out, lanes):
    """Copies elements from places; the last axis in vectors."""
    data = te.placeholder((n_in,), name="data")
    out = te.compute((n_out,), lambda i: data[place(i)] + 0.0, name="out")
    schedule = Schedule(as_workload(te.create_prim_func([data, out])))
    [loop] = schedule.get_loops(schedule.get_sblock("out"))
    _, lane = schedule.split(loop, [None, lanes])
    schedule.vectorize(lane)
    return schedule.mod


def run(module, cpu, n_in, n_out, monkeypatch):
    """What it computes, and how many vectors were spread."""
    made = []
    monkeypatch.setattr(spread, "_spread", lambda *found, old=spread._spread: made.append(old(*found)) or made[-1])
    built = lowering.build(module, cpu.tvm())
    data = np.random.default_rng(0).normal(size=n_in).astype(np.float32)
    out = tvm.runtime.tensor(np.zeros(n_out, np.float32))
    built["main"](tvm.runtime.tensor(data), out)
    return data, out.numpy(), sum(each is not None for each in made)


CASES = {  # places by the number of lanes; whether one vector has all of them
    "one element of four": (lambda i, n: i // 4 * 4 + 2, True),
    "one of two": (lambda i, n: i // 2 * 2, True),
    "the half of a vector twice": (lambda i, n: i // n * n + i % (n // 2), True),
    "from the middle of a vector into the next": (lambda i, n: i // 4 * 4 + 5, False),
    "every other": (lambda i, n: i // n * n + i % n * 2, False),
}


@pytest.mark.parametrize("name", CASES)
def test_elements_are_those_of_their_places(cpu, monkeypatch, name):
    lanes = registers(cpu.tvm()).lanes
    place, in_one = CASES[name]

    data, found, n_spread = run(
        reads(lambda i: place(i, lanes), 8 * lanes, 4 * lanes, lanes), cpu, 8 * lanes, 4 * lanes, monkeypatch
    )

    np.testing.assert_array_equal(found, data[[place(i, lanes) for i in range(4 * lanes)]])
    assert (n_spread > 0) == in_one


def test_a_tensor_that_is_not_whole_vectors_is_read_by_element(cpu, monkeypatch):
    """A vector at its end would lie beyond it."""
    lanes = registers(cpu.tvm()).lanes

    data, found, n_spread = run(
        reads(lambda i: i // 4 * 4, 3 * lanes - 3, 3 * lanes, lanes), cpu, 3 * lanes - 3, 3 * lanes, monkeypatch
    )

    np.testing.assert_array_equal(found, data[np.arange(3 * lanes) // 4 * 4])
    assert n_spread == 0


def test_gpus_have_no_vectors_to_spread():
    module = reads(lambda i: i // 4 * 4, 64, 64, 16)
    function = module["main"].with_attr("target", tvm.target.Target("nvidia/nvidia-a100"))

    assert isinstance(function, tirx.PrimFunc)
    assert spread.insert(function) is function
