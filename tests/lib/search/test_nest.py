import json
import math
import re

import numpy as np
import pytest

from lib.contracts.schemas import N_FEATURES
from lib.graph.winograd_1d import Filter
from lib.machine.registers import registers
from lib.search import evolution, nest
from lib.search.features import of_stores
from lib.tir import traces
from lib.tir.outline import outline
from tests.helpers import matmul
from tests.lib.graph.test_strassen import workload as in_strassens_way
from tests.lib.graph.test_winograd import workload as image
from tests.lib.graph.test_winograd_1d import workload as signal
from tests.lib.search.spaces.test_attention import workload as attention
from tests.lib.search.spaces.test_contraction import convolution
from tests.lib.search.spaces.test_window import depthwise
from tests.lib.tir.test_dot import product as products_in_bf16
from tests.lib.tir.test_matrix import WITH as WITH_AMX

PRODUCT = matmul(64, 256, 128)  # rows, columns, channels


def told(workload, trace, cpu):
    """A program's features by their names."""
    return dict(zip(nest.NAMES, nest.features(nest.describe(workload, cpu.tvm()), trace), strict=True))


def size(found, name):
    """A feature that is a logarithm."""
    return round(2 ** float(found[name]) - 1)


@pytest.fixture(scope="module")
def sampled(cpu):
    return evolution.sample(PRODUCT, cpu.tvm(), 12, known=set(), seed=1)


def test_there_are_as_many_features_as_the_tables_say():
    assert len(nest.NAMES) + len(of_stores(np.zeros((3, 164)))) == N_FEATURES


def test_the_shape_of_a_product_is_told(cpu, sampled):
    found = told(PRODUCT, sampled[0].trace, cpu)

    assert [size(found, name) for name in ("rows", "columns", "channels", "window", "batch")] == [64, 256, 128, 1, 1]
    assert size(found, "weight bytes") == 4 * 256 * 128
    assert size(found, "operations") == pytest.approx(2 * 64 * 256 * 128, rel=1e-5)


def test_the_tile_is_the_one_that_the_program_has(cpu, sampled):
    """Beside what `outline` reads from the scheduled program."""
    for proposal in sampled:
        found = told(PRODUCT, proposal.trace, cpu)
        tile = outline(traces.apply(PRODUCT, proposal.trace).mod).tile
        rows, vectors = int(found["tile rows"]), int(found["tile vectors"])

        sizes = [int(each) for each in tile.split()[:-1:2]]
        assert sizes == [each for each in (rows, vectors, registers(cpu.tvm()).lanes) if each > 1]  # one is not told
        assert found["accumulators"] == rows * vectors


def test_a_tile_of_matrices_is_told_with_its_steps():
    """Compiled for a CPU with AMX; beside what `outline` reads from the scheduled program."""
    workload = products_in_bf16(64, 256, 128)
    described = nest.describe(workload, WITH_AMX)

    for proposal in evolution.sample(workload, WITH_AMX, 6, known=set(), seed=1):
        found = dict(zip(nest.NAMES, nest.features(described, proposal.trace), strict=True))
        sizes = [int(size) for size in outline(traces.apply(workload, proposal.trace).mod).tile.split()[:-1:2]]
        assert math.prod(sizes) == found["accumulators"] * 16
        assert size(found, "unrolled") == 16 * 2
        assert 0 < found["tile efficiency"] < 1


def test_what_a_task_works_on_covers_the_output_with_all_others(cpu, sampled):
    for proposal in sampled:
        found = told(PRODUCT, proposal.trace, cpu)
        done = size(found, "tasks") * size(found, "rows of a task") * size(found, "columns of a task")

        assert done == pytest.approx(64 * 256 * found["row waste"] * found["column waste"], rel=1e-3)
        assert size(found, "tiles of a task") * found["accumulators"] * found["lanes"] == pytest.approx(
            size(found, "rows of a task") * size(found, "columns of a task")
        )


def test_products_that_are_computed_where_their_sums_are_have_a_tile_and_a_task_as_well(cpu):
    machine = registers(cpu.tvm())
    lanes, pairs = machine.lanes, {32: 98, 16: 100}[machine.count]  # of rows, that tiles divide
    workload = in_strassens_way((1, 196), 128, 12 * lanes, machine)

    for proposal in evolution.sample(workload, cpu.tvm(), 12, known=set(), seed=1):
        found, program = told(workload, proposal.trace, cpu), traces.apply(workload, proposal.trace).mod
        sizes = [int(each) for each in outline(program).tile.split()[:-1:2]]

        assert math.prod(sizes) == found["accumulators"] * lanes
        assert size(found, "tasks") == int(re.findall(r"T\.parallel\((\d+)\)", program.script())[-1])
        in_task = size(found, "rows of a task") * size(found, "columns of a task")
        assert size(found, "tasks") * in_task == pairs * 6 * lanes  # columns of half of the weights
        assert size(found, "tiles of a task") * found["accumulators"] * lanes == in_task


@pytest.mark.parametrize(
    ("made", "rows"),
    [
        (lambda _: image(4, 40, (16, 48)), 10 * 10),  # of tiles
        (lambda _: image(2, 26, (16, 48), batch=2), 2 * 13 * 13),
        (lambda _: signal((1, 400, 16), 1, Filter(4, 3, 1), 400, 1), 100),
        (attention, 3 * 24),  # of heads
        (lambda lanes: attention(lanes, rows=100, heads=2), 2 * 100),
    ],
)
def test_tasks_that_have_all_blocks_of_some_rows_have_a_tile_and_their_part_of_them(cpu, made, rows):
    workload, n_blocked = made(registers(cpu.tvm()).lanes), 0

    for proposal in evolution.sample(workload, cpu.tvm(), 24, known=set(), seed=1):
        found, program = told(workload, proposal.trace, cpu), traces.apply(workload, proposal.trace).mod
        in_tile = [int(each) for each in outline(program).tile.split()[:-1:2]]
        tasks = [int(n) for n in re.findall(r"T\.parallel\((?:T\.int64\()?(\d+)", program.script())]

        assert math.prod(in_tile) == found["accumulators"] * found["lanes"]
        if len(tasks) == 1:
            assert size(found, "tasks") == size(found, "most tasks") == tasks[0]
            assert size(found, "rows of a task") * tasks[0] == rows
            assert found["row waste"] == found["column waste"] == 1
            n_blocked += 1
    assert n_blocked > 2


def test_a_reduction_in_slabs_has_the_tile_of_its_parts_and_reads_the_weights_of_one(cpu):
    lanes, depth = registers(cpu.tvm()).lanes, 9216
    workload = matmul(64, 64, depth)
    n_slabs = 0

    for proposal in evolution.sample(workload, cpu.tvm(), 12, known=set(), seed=1):
        found, program = told(workload, proposal.trace, cpu), traces.apply(workload, proposal.trace).mod
        slabs = int((re.findall(r"rf_local = T\.\w+\(\((?:T\.int64\()?(\d+)", program.script()) or [1])[0])

        assert size(found, "panel bytes") == 4 * depth // slabs * found["tile vectors"] * lanes
        if slabs > 1:
            assert str(int(found["tile rows"])) in outline(program).tile
            done = size(found, "tasks") * size(found, "rows of a task") * size(found, "columns of a task")
            assert done == pytest.approx(64 * 64 * found["row waste"] * found["column waste"], rel=1e-3)
            n_slabs += 1
    assert n_slabs


def test_idle_cores_are_told(cpu, sampled):
    for proposal in sampled:
        found = told(PRODUCT, proposal.trace, cpu)
        tasks = size(found, "tasks")

        assert found["idle share"] == pytest.approx(1 - tasks / (-(-tasks // cpu.threads) * cpu.threads))


def test_a_window_and_a_convolution_are_told_by_their_axes(cpu):
    for workload, window in ((convolution(), 9), (depthwise(1), 9)):
        [proposal] = evolution.sample(workload, cpu.tvm(), 1, known=set(), seed=0)
        found = told(workload, proposal.trace, cpu)

        assert size(found, "window") * size(found, "channels") % window == 0
        assert np.isfinite([found[name] for name in ("tasks", "tile rows", "lanes", "task bytes")]).all()


def test_features_are_those_that_the_search_saw(cpu, sampled):
    described = nest.describe(PRODUCT, cpu.tvm())

    for proposal in sampled:
        assert np.array_equal(nest.features(described, proposal.trace), proposal.features, equal_nan=True)


def test_without_a_contraction_only_what_is_there_is_told(cpu):
    found = told(PRODUCT, json.dumps([[], []]), cpu)

    assert np.isfinite(found["rows"])
    assert np.isnan(found["tile rows"])
    assert np.isnan(found["tasks"])
