from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from lib.machine.registers import registers
from lib.search.spaces import recurrence as space
from lib.search.spaces.table import fitting
from lib.tir import lowering
from lib.tir.numerics import random_values, relative_error
from lib.tir.operators import core_operator, operators
from lib.tir.parameters import value_bounds
from lib.tir.recurrence import CELLS, DEPTHS, LANES, Layer, recurrence
from lib.tir.workload import as_workload
from tests.helpers import matmul, run_on
from tests.lib.search.spaces.test_contraction import sampled
from tests.lib.tir.test_dot import needs_it

STEPS, UNITS = 5, 32
LAYERS = {
    "lstm": Layer("lstm", ("sigmoid", "tanh", "tanh"), (False, True), keeps_cell=True),
    "lstm backwards": Layer("lstm", ("sigmoid", "tanh", "relu"), (True,)),
    "gru": Layer("gru", ("sigmoid", "tanh"), (False,)),
    "gru both ways": Layer("gru", ("sigmoid", "tanh"), (False, True)),
    "rnn": Layer("rnn", ("relu",), (False,)),
}


def workload(layer, batch, kind="float32"):
    return as_workload(recurrence(layer, STEPS, batch, UNITS // DEPTHS[kind], UNITS // LANES, kind))


def tensors(layer, batch):
    """Weights (d, k, g, k summed over), inputs (n, b, d, g, k), states (s, d, b, k) and bias (d, k)."""
    rng, cell, d = np.random.default_rng(0), CELLS[layer.kind], len(layer.is_reverse)
    shapes = (d, UNITS, cell.gates, UNITS), (STEPS, batch, d, cell.gates, UNITS), (cell.states, d, batch, UNITS)
    weights, x, states = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return weights / 8, x, states, rng.normal(size=(d, UNITS)).astype(np.float32)


def as_read(given, kind="float32"):
    """The same as a program reads them."""
    weights, x, states, bias = given
    d, k, g, _ = weights.shape
    j, depth = k // LANES, DEPTHS[kind]
    packed = weights.reshape(d, j, LANES, g, k // depth, depth).transpose(0, 1, 4, 3, 2, 5)
    vectors = x.reshape(*x.shape[:-1], j, LANES).swapaxes(-3, -2)
    element = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32
    return [np.ascontiguousarray(packed).astype(element), np.ascontiguousarray(vectors), states, bias.reshape(d, j, -1)]


def in_numpy(layer, given):
    """As ONNX defines its operators: gates i o f c, or z r h."""
    weights, x, before, bias = (each.astype(np.float64) for each in given)
    act = [{"sigmoid": lambda v: 1 / (1 + np.exp(-v)), "tanh": np.tanh, "relu": lambda v: np.maximum(v, 0)}[name]
           for name in layer.activations]  # fmt: skip
    shown = np.zeros((STEPS + layer.keeps_cell, *before.shape[1:]))
    for d, is_reverse in enumerate(layer.is_reverse):
        h, c = before[0, d], before[-1, d]
        for t in reversed(range(STEPS)) if is_reverse else range(STEPS):
            seen, of_input = np.einsum("bk,ugk->gbu", h, weights[d]), x[t, :, d].swapaxes(0, 1)
            both = seen + of_input
            if layer.kind == "lstm":
                c = act[0](both[2]) * c + act[0](both[0]) * act[1](both[3])
                h = act[0](both[1]) * act[2](c)
            elif layer.kind == "gru":
                z, r = act[0](both[0]), act[0](both[1])
                h = (1 - z) * act[1](of_input[2] + r * (seen[2] + bias[d])) + z * h
            else:
                h = act[0](both[0])
            shown[t, d] = h
        if layer.keeps_cell:
            shown[STEPS, d] = c
    return shown


def check(layer, given, read, schedules, cpu, tolerance):
    wanted = in_numpy(layer, given)
    for schedule in schedules:
        found = run_on(schedule.mod, cpu.tvm(), read, np.zeros(wanted.shape, np.float32))
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", LAYERS)
def test_every_program_computes_the_layer_as_onnx_defines_it(cpu, name, batch):
    layer = LAYERS[name]
    found, given = workload(layer, batch), tensors(layer, batch)

    assert fitting(found, cpu.tvm()).name == "recurrence"
    check(layer, given, as_read(given), sampled(found, cpu, 8), cpu, 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_parts_of_a_batch_go_through_all_steps_by_themselves(cpu, name):
    """Three parts of two sequences, which tasks may share as they share directions."""
    layer = replace(LAYERS[name], parts=3)
    found, given = workload(layer, 6), tensors(layer, 6)

    schedules = sampled(found, cpu, 12)

    check(layer, given, as_read(given), schedules, cpu, 1e-5)
    lines = 3 * len(layer.is_reverse)
    assert any(f'T.serial({lines}, annotations={{"parallel"' in schedule.mod.script() for schedule in schedules)


@needs_it
@pytest.mark.parametrize("batch", [1, 3])
def test_every_program_in_bf16_multiplies_pairs_by_its_instruction(cpu, batch):
    layer = LAYERS["lstm"]
    found, given = workload(layer, batch, "bfloat16"), tensors(layer, batch)

    schedules = sampled(found, cpu, 8)

    dot = next(dot for dot in registers(cpu.tvm()).dots if dot.data == "bfloat16")
    assert all(f'annotations={{"dot": "{dot.name}"' in schedule.mod.script() for schedule in schedules)
    check(layer, given, as_read(given, "bfloat16"), schedules, cpu, 2**-6)


@needs_it
def test_roundings_of_many_steps_do_not_grow(cpu):
    """With weights like those of other programs the results had nothing in common after some steps."""
    layer = LAYERS["gru both ways"]
    found = as_workload(recurrence(layer, 200, 1, 64, 128 // LANES, "bfloat16"))
    bounds = value_bounds(found["main"])
    inputs = [
        random_values(tuple(map(int, param.ty.shape)), str(param.ty.dtype), bounds.get(n, 0), seed=n)
        for n, param in enumerate(found["main"].params)
    ]

    plain = run_on(lowering.reference(found, cpu.tvm()), cpu.tvm(), inputs[:-1], inputs[-1])

    assert bounds == {0: 128}
    for schedule in sampled(found, cpu, 4):
        assert relative_error(run_on(schedule.mod, cpu.tvm(), inputs[:-1], inputs[-1]), plain) < 1e-3


@pytest.mark.parametrize("name", ["lstm", "lstm backwards"])
def test_directions_are_shared_out_or_units_or_nothing(cpu, name):
    schedules = sampled(workload(LAYERS[name], 1), cpu, 24)

    places = set()
    for schedule in schedules:
        lines = schedule.mod.script().splitlines()
        marked = [line for line in lines if 'annotations={"parallel"' in line]
        places.add(marked[0].count(" " * 4) if marked else 0)
    assert len(places) == (3 if name == "lstm" else 2)


def test_accumulators_fit_into_registers(cpu):
    machine = registers(cpu.tvm())
    for batch in (1, 7, 16):
        for schedule in sampled(workload(LAYERS["gru"], batch), cpu, 8):
            loops = schedule.get_loops(schedule.get_sblock("recurrence_sums_update"))
            row, unit, gate, part = (int(schedule.get(loop).extent) for loop in loops[-5:-1])
            assert row * unit * gate * part < machine.count


@pytest.mark.parametrize(("kind", "named"), [("float32", "recurrence"), ("bfloat16", "recurrence_bf16")])
def test_it_is_an_operator_of_its_own(kind, named):
    found = operators(workload(LAYERS["gru"], 1, kind))

    assert found == [named]
    assert core_operator(found) == named


def test_it_takes_nothing_else(cpu):
    assert not space.fits(matmul(), cpu.tvm())
