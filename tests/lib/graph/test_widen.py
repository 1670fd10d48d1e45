import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from lib.graph import fusion, reweight, widen
from lib.graph.subgraphs import extract_subgraphs
from lib.machine.registers import Registers
from lib.search import evolution
from lib.search.spaces import contraction
from lib.tir import parallel, traces
from lib.tir.workload import load_module
from tests.helpers import results, run_on

AVX512, AVX2 = Registers(32, 16), Registers(16, 8, spreads=False)


def model(make, weight, *data):
    """relu(make(x, w)) with seeded weights."""
    x, w = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x", data), ("w", weight)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(op.nn.relu(builder.emit(make(x, w)))))
        builder.emit_func_output(out)
    return builder.get(), {"w": np.random.default_rng(0).normal(size=weight).astype(np.float32)}


def product(n, m=16, k=8):
    return model(op.matmul, (k, n), m, k)


def convolution(channels, **attrs):
    def make(x, w):
        return op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO", padding=1, **attrs)

    return model(make, (3, 3, 16 // attrs.get("groups", 1), channels), 1, 8, 8, 16)


def in_tvm(cpu, module, x, weight):
    return results(fusion.fuse(module, cpu.tvm()), cpu, x, weight)[0]


def widened(made, machine=AVX512):
    return reweight.rewrite(*made, [widen.replacement(machine)])


@pytest.mark.parametrize(
    ("made", "wider"),
    [(product(24), 32), (convolution(24), 32), (convolution(24, strides=2), 32), (convolution(1), 16),
     (product(17 * 16), 18 * 16), (product(19 * 16 - 1), 20 * 16), (convolution(17 * 16), 18 * 16)],
)  # fmt: skip
def test_what_is_computed_stays_the_same(cpu, made, wider):
    module, changed = widened(made)
    shape = [int(n) for n in made[0]["main"].params[0].ty.shape.values]
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)

    assert changed["w"].shape[-1] == wider
    np.testing.assert_allclose(
        in_tvm(cpu, module, x, changed["w"]), in_tvm(cpu, made[0], x, made[1]["w"]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("columns", "wider"), [(40, 48), (88, 96), (1000, 1008), (36, 48), (24, 24), (48, 48), (8, 8), (72, 72)]
)
def test_of_sixteen_registers_two_or_three_vectors_are_in_a_tile(cpu, columns, wider):
    made = product(columns)
    module, changed = widened(made, AVX2)
    x = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)

    assert changed.get("w", made[1]["w"]).shape[-1] == wider
    np.testing.assert_allclose(
        in_tvm(cpu, module, x, changed.get("w", made[1]["w"])), np.maximum(x @ made[1]["w"], 0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("columns", "wider"), [(222, 224), (30, 32), (10, 16), (6, 16)])
def test_a_single_row_of_columns_that_fill_no_vectors_gets_whole_ones(cpu, columns, wider):
    made = product(columns, m=1)
    module, changed = widened(made)
    x = np.random.default_rng(1).normal(size=(1, 8)).astype(np.float32)
    [subgraph] = extract_subgraphs(fusion.fuse(module, cpu.tvm()))

    assert changed["w"].shape[-1] == wider
    assert contraction.fits(load_module(subgraph.workload), cpu.tvm())
    np.testing.assert_allclose(
        in_tvm(cpu, module, x, changed["w"]), np.maximum(x @ made[1]["w"], 0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("columns", [1000, 888, 120, 4, 1])
def test_a_single_row_of_columns_that_fill_some_vectors_or_of_one_column_stays(columns):
    assert widened(product(columns, m=1))[1] == {}


def test_each_group_gets_channels_of_its_own(cpu):
    module, changed = widened(convolution(40, groups=2))
    x = np.random.default_rng(1).normal(size=(1, 8, 8, 16)).astype(np.float32)
    old, weight = convolution(40, groups=2)

    assert changed["w"].shape == (3, 3, 8, 64)
    np.testing.assert_allclose(
        in_tvm(cpu, module, x, changed["w"]), in_tvm(cpu, old, x, weight["w"]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("channels", "attrs"),
    [(40, {"groups": 2}), (136, {"groups": 4}), (56, {"groups": 2, "strides": 2}), (80, {"groups": 4, "dilation": 2})],
)
def test_groups_are_cut_in_the_tasks_that_compute_them(cpu, channels, attrs):
    made, changed = widened(convolution(channels, **attrs))
    [subgraph] = extract_subgraphs(fusion.fuse(made, cpu.tvm()))
    workload = load_module(subgraph.workload)
    x = np.random.default_rng(1).normal(size=(1, 8, 8, 16)).astype(np.float32)
    expected = in_tvm(cpu, made, x, changed["w"])

    found = [traces.apply(workload, p.trace) for p in evolution.sample(workload, cpu.tvm(), 12, known=set(), seed=0)]

    assert contraction.fits(workload, cpu.tvm())
    assert len(found) == 12
    for schedule in found:
        text = schedule.mod.script()
        assert 'scope="local"' in text
        assert text.count(f'"{parallel.MARK}": 1') == 1
        out = run_on(schedule.mod, cpu.tvm(), [x, changed["w"]], np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_the_cut_is_fused_and_the_rest_is_tiled_in_whole_vectors(cpu):
    [subgraph] = extract_subgraphs(fusion.fuse(widened(convolution(24))[0], cpu.tvm()))
    workload = load_module(subgraph.workload)

    found = evolution.sample(workload, cpu.tvm(), 4, known=set(), seed=0)

    assert subgraph.operators == ["pad", "conv2d", "slice", "max"]
    assert contraction.fits(workload, cpu.tvm())
    assert len(found) == 4
    assert all("T.vectorized(" in traces.apply(workload, p.trace).mod.script() for p in found)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (product(32), "its columns fill vectors"),
        (product(13 * 16), "a tile of two rows holds thirteen vectors"),
        (product(34 * 16), "two vectors divide its columns"),
        (product(17 * 16, m=4), "it reads weights more than it computes, in tiles of one vector too"),
        (product(8), "half of each vector would be computed for nothing, as much as shorter ones lose"),
        (product(24, m=4), "it reads weights more than it computes"),
        (convolution(16, groups=16), "of a group's vector, one channel would be of use"),
    ],
)
def test_what_gains_nothing_stays(made, why):
    assert widened(made) == (made[0], {}), why


def test_two_readers_of_a_weight_share_the_wider_one():
    x, y = (relax.Var(name, relax.TensorType((16, 8), "float32")) for name in "xy")
    w = relax.Var("w", relax.TensorType((8, 24), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y, w], attrs={"num_input": 2}):
        with builder.dataflow():
            first, second = (builder.emit(op.matmul(data, w)) for data in (x, y))
            out = builder.emit_output(builder.emit(op.add(first, second)))
        builder.emit_func_output(out)

    module, changed = widened((builder.get(), {"w": np.zeros((8, 24), np.float32)}))

    assert changed["w"].shape == (8, 32)
    assert module.script().count("matmul(") == 2
