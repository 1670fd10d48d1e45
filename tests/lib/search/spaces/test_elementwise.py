import numpy as np
import pytest
from tvm import relax, te, tirx
from tvm.relax import op

from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.machine.registers import registers
from lib.search.spaces import elementwise
from lib.search.spaces.table import fitting
from lib.tir import lookup
from lib.tir.workload import as_workload, load_module
from tests.helpers import gather, matmul, run_on, subgraph
from tests.lib.search.spaces.test_contraction import sampled
from tests.lib.search.spaces.test_rows import softmax


def added(builder, x, y):
    return op.nn.relu(builder.emit(op.add(x, y)))


def gated(builder, gate, x):
    """Squeeze and excitation: a channel's gate is computed once, not for each pixel."""
    return op.multiply(builder.emit(op.sigmoid(gate)), x)


def windows(builder, x):
    """An image in windows of 7 by 7."""
    return op.permute_dims(builder.emit(op.reshape(x, (2, 7, 2, 7, 32))), [0, 2, 1, 3, 4])


def quantized(builder, x):
    rounded = builder.emit(op.round(builder.emit(op.multiply(x, relax.const(3.0)))))
    return op.astype(builder.emit(op.clip(rounded, -128, 127)), "int8")


def in_numpy(make, *inputs):
    if make is added:
        return np.maximum(inputs[0] + inputs[1], 0)
    if make is gated:
        return (inputs[1] / (1 + np.exp(-inputs[0].astype(np.float64)))).astype(np.float32)
    if make is windows:
        return inputs[0].reshape(2, 7, 2, 7, 32).transpose(0, 2, 1, 3, 4)
    return np.clip(np.round(inputs[0] * np.float32(3)), -128, 127).astype(np.int8)


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (added, [(8, 197, 64), (64,)]),
        (added, [(5, 197), (5, 1)]),  # rows that vectors do not fill
        (added, [(3, 100), (3, 100)]),
        (gated, [(1, 1, 1, 64), (1, 7, 7, 64)]),
        (windows, [(14, 14, 32)]),
        (quantized, [(64, 1024)]),
        (quantized, [(3, 49)]),
        (added, [(3, 3), (3, 3)]),  # elements that vectors do not fill
        (added, [(7,), (7,)]),
        (added, [(3234, 4), (4,)]),  # boxes: vectors as short as it takes
    ],
)
def test_every_program_computes_what_it_should_in_one_parallel_loop_of_vectors(cpu, make, shapes):
    workload = subgraph(cpu, make, *shapes)
    inputs = [np.random.default_rng(n).normal(size=shape).astype(np.float32) for n, shape in enumerate(shapes)]
    expected = in_numpy(make, *inputs)

    schedules = sampled(workload, cpu)

    assert fitting(workload, cpu.tvm()).name == "elementwise"
    assert len(schedules) >= 2
    for schedule in schedules:
        text = schedule.mod.script()
        assert text.count("T.parallel(") + text.count('"parallel": 1') == 1
        assert text.count("T.vectorized(") == 1 + (make is gated)
        found = run_on(schedule.mod, cpu.tvm(), inputs, np.zeros(expected.shape, expected.dtype))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_vectors_of_bytes_may_fill_a_register(cpu):
    schedules = sampled(subgraph(cpu, quantized, (64, 1024)), cpu, 40)

    lanes = lanes_of(schedules)
    assert lanes == {16, 32, 64} if registers(cpu.tvm()).lanes == 16 else len(lanes) == 3


def lanes_of(schedules):
    return {int(s.mod.script().rsplit("T.vectorized(T.int64(", 1)[1].split(")")[0]) for s in schedules}


@pytest.mark.parametrize("columns", [336, 144])
def test_no_vector_crosses_rows_where_one_of_their_operands_would_be_gathered(cpu, columns):
    gates = lanes_of(sampled(subgraph(cpu, gated, (1, 1, 1, columns), (1, 14, 14, columns)), cpu, 40))
    sums = lanes_of(sampled(subgraph(cpu, added, (1, 14, 14, columns), (1, 14, 14, columns)), cpu, 40))

    assert all(columns % lanes == 0 for lanes in gates)
    assert any(columns % lanes for lanes in sums)  # rows do not matter there


def test_no_vector_crosses_rows_of_a_part_that_is_placed_among_others(cpu):
    """Its rows are shorter than those that it is written to."""
    shapes, builder = [(1, 14, 14, 24), (1, 14, 14, 40)], relax.BlockBuilder()
    inputs = [relax.Var(f"x{n}", relax.TensorType(shape, "float32")) for n, shape in enumerate(shapes)]
    with builder.function("main", inputs, attrs={"num_input": 2}):
        with builder.dataflow():
            parts = [builder.emit(op.nn.relu(x)) for x in inputs]
            out = builder.emit_output(op.concat(parts, 3))
        builder.emit_func_output(out)
    placed = [load_module(found.workload) for found in extract_subgraphs(fusion.fuse(builder.get(), cpu.tvm()))]

    assert len(placed) == 2
    for workload, (*_, columns) in zip(placed, shapes, strict=True):
        schedules = sampled(workload, cpu, 40)
        assert schedules
        by_row = [s for s in schedules if "peel_remainder" in s.mod.script()]
        assert all(s in by_row or columns % next(iter(lanes_of([s]))) == 0 for s in schedules)


def test_what_is_rounded_moved_and_looked_up_has_programs(cpu):
    """The index into the table depends on what a tensor of floats holds."""
    x, table = te.placeholder((6, 5, 32), "float32", name="x"), te.placeholder((256,), "uint8", name="table")
    near = te.compute(x.shape, lambda *at: tirx.nearbyint(x(*at)), name="near")
    small = te.compute(x.shape, lambda *at: tirx.min(tirx.max(near(*at), 0.0), 255.0).astype("uint8"), name="small")
    turned = te.compute((5, 6, 32), lambda i, j, k: small(j, i, k), name="turned")
    out = lookup.looked_up(table, turned)
    workload, rng = as_workload(te.create_prim_func([x, table, out])), np.random.default_rng(0)
    given, values = rng.uniform(-50, 300, (6, 5, 32)).astype(np.float32), rng.permutation(256).astype(np.uint8)

    schedules = sampled(workload, cpu)

    assert schedules
    expected = values[np.clip(np.rint(given), 0, 255).astype(np.uint8).transpose(1, 0, 2)]
    for schedule in schedules[:4]:
        found = run_on(schedule.mod, cpu.tvm(), [given, values], np.zeros(expected.shape, np.uint8))
        np.testing.assert_array_equal(found, expected)


def test_lookups_are_moved_in_vectors(cpu):
    workload, rng = gather(width=64), np.random.default_rng(0)
    table, ids = rng.normal(size=(50, 64)).astype(np.float32), rng.integers(0, 50, 6).astype(np.int32)

    schedules = sampled(workload, cpu)

    for schedule in schedules:
        assert "T.vectorized(" in schedule.mod.script()
        found = run_on(schedule.mod, cpu.tvm(), [table, ids], np.zeros((6, 64), np.float32))
        np.testing.assert_array_equal(found, table[ids])


@pytest.mark.parametrize("make", [lambda _: matmul(), lambda cpu: softmax(cpu, 8, 64)], ids=["product", "softmax"])
def test_what_reduces_is_left_alone(cpu, make):
    assert not elementwise.fits(make(cpu), cpu.tvm())
