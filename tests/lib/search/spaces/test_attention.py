import re

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.target import Target

from lib.machine.dots import BF16
from lib.machine.registers import Registers, registers
from lib.search import evolution
from lib.search.spaces import attention as space
from lib.search.spaces.table import fitting
from lib.tir import attention, lowering, traces
from lib.tir.workload import as_workload
from tests.helpers import matmul, run_on
from tests.lib.graph.test_attention import in_numpy
from tests.lib.search.spaces.test_contraction import sampled
from tests.lib.tir.test_dot import needs_it

SCALE = 0.25


def scaled(score, _at, _masks):
    return score * tirx.const(SCALE, "float32")


def workload(lanes, rows=24, columns=40, heads=3, size=32, dot=None, by_rows=True, logits=scaled):
    """Attention with a scale; keys and values have what `columns` leave of whole vectors."""
    wide, deep = columns + -columns % lanes, columns + -columns % 4
    kind, shape = dot.data if dot else "float32", attention.Shape(columns, size, lanes, dot, by_rows)
    query = te.placeholder((1, heads, rows, 16), kind, name="query")
    keys, values = (1, heads, 16, wide), (1, heads, deep, size)
    if dot:
        keys, values = (
            (1, heads, each[2] // dot.depth, each[3], dot.depth) for each in (keys, values)
        )  # fmt: skip
    others = [te.placeholder(each, kind, name=name) for name, each in (("keys", keys), ("values", values))]
    out = attention.attention(shape, logits, query, *others)
    return as_workload(te.create_prim_func([query, *others, out]))


def tensors(lanes, rows=24, columns=40, heads=3, size=32, dot=None, by_rows=True):
    """Query, keys and values as NumPy has them, then as the workload reads them."""
    rng = np.random.default_rng(columns)
    shapes = (1, heads, rows, 16), (1, heads, 16, columns), (1, heads, columns, size)
    query, keys, values = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    wide = np.pad(keys, [(0, 0)] * 3 + [(0, -columns % lanes)])
    deep = np.pad(values, [(0, 0)] * 2 + [(0, -columns % 4), (0, 0)])
    if not dot:
        return (query, keys, values), (query, wide, deep)
    narrow = [each.astype(ml_dtypes.bfloat16) for each in (query, keys, values)]
    read = [query, *(interleaved(each, dot.depth) for each in (wide, deep))]
    return [each.astype(np.float32) for each in narrow], [each.astype(ml_dtypes.bfloat16) for each in read]


def interleaved(array, depth):
    apart = array.reshape(*array.shape[:2], -1, depth, array.shape[-1])
    return np.ascontiguousarray(apart.transpose(0, 1, 2, 4, 3))


def check(schedules, cpu, given, read, by_rows=True, tolerance=1e-5):
    wanted = in_numpy(lambda scores: SCALE * scores, *given)
    wanted = wanted if by_rows else wanted.transpose(0, 2, 1, 3)
    for schedule in schedules:
        found = run_on(schedule.mod, cpu.tvm(), list(read), np.zeros(wanted.shape, np.float32))
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "sizes",
    [{}, {"columns": 37}, {"rows": 37}, {"rows": 7, "columns": 7}, {"heads": 1}, {"by_rows": False}, {"size": 48}],
    ids=[
        "whole",
        "part of a vector of columns",
        "a prime number of rows",
        "few",
        "one head",
        "by heads",
        "three vectors",
    ],
)
def test_every_program_computes_numpys_attention(cpu, sizes):
    lanes = registers(cpu.tvm()).lanes
    found = workload(lanes, **sizes)
    given, read = tensors(lanes, **sizes)

    schedules = sampled(found, cpu, 16)

    assert fitting(found, cpu.tvm()).name == "attention"
    check(schedules, cpu, given, read, sizes.get("by_rows", True))


@needs_it
@pytest.mark.parametrize("columns", [40, 37])
def test_every_program_in_bf16_multiplies_by_its_instruction(cpu, columns):
    machine = registers(cpu.tvm())
    dot = next(dot for dot in machine.dots if dot.data == "bfloat16")
    given, read = tensors(machine.lanes, columns=columns, dot=dot)

    schedules = sampled(workload(machine.lanes, columns=columns, dot=dot), cpu, 16)

    assert all(
        schedule.mod.script().count(f'T.serial({machine.lanes}, annotations={{"dot": "{dot.name}"') == 2
        for schedule in schedules
    )
    check(schedules, cpu, given, read, tolerance=2**-7)


@pytest.mark.parametrize("hidden", [np.finfo(np.float32).min, -1e9])
def test_where_a_mask_hides_all_columns_they_count_alike(cpu, hidden):
    """As PyTorch has it: the smallest float is added to scores."""
    lanes = registers(cpu.tvm()).lanes
    _, read = tensors(lanes)
    found = workload(lanes, logits=lambda score, at, masks: score * 0.0 + tirx.const(float(hidden), "float32"))

    for schedule in sampled(found, cpu, 4):
        context = run_on(schedule.mod, cpu.tvm(), list(read), np.zeros((1, 24, 3, 32), np.float32))
        wanted = read[2][:, :, :40].mean(axis=2)[:, None]
        np.testing.assert_allclose(context, np.broadcast_to(wanted, context.shape), rtol=1e-5, atol=1e-5)


def test_some_programs_have_all_blocks_in_one_loop_over_tasks_and_others_none(cpu):
    found = sampled(workload(registers(cpu.tvm()).lanes), cpu, 48)

    loops = {schedule.mod.script().count("T.parallel(") for schedule in found}
    assert loops == {1, 3}  # scores, context and results; the loop over rows of weights has a mark of its own


def test_what_a_task_has_of_scores_is_its_own(cpu):
    [whole, *_] = [
        schedule.mod["main"]
        for schedule in sampled(workload(registers(cpu.tvm()).lanes, rows=64), cpu, 32)
        if schedule.mod.script().count("T.parallel(") == 1
    ]

    passes = ("LowerInitBlock", "PlanAndUpdateBufferAllocationLocation", "ConvertBlocksToOpaque",
              "CompactBufferAllocation")  # fmt: skip
    module = tvm.IRModule({"main": whole})
    for name in passes:
        module = getattr(tvm.s_tir.transform, name)()(module)
    found = re.search(rf"{attention.LOGITS} = T.sblock_alloc_buffer\(\((\d+), (\d+), (\d+), ", module["main"].script())
    batch, heads, rows = map(int, found.groups())
    assert (batch, heads) == (1, 1)
    assert 8 <= rows <= 64


@pytest.mark.parametrize("mcpu", ["sapphirerapids", "znver4"])  # with and without instructions of matrices
def test_what_a_task_has_of_weights_in_bf16_is_its_own(mcpu):
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu, "num-cores": 2})
    found = workload(16, rows=64, columns=256, heads=8, dot=BF16)
    proposals = evolution.sample(found, target, 16, known=set(), seed=0)
    programs = [traces.program(found, each.trace, target) for each in proposals]

    in_tasks = [lowering.build(program, target).inspect_source("ll") for program in programs
                if program.script().count("T.parallel(") == 1]  # fmt: skip

    assert in_tasks
    for text in in_tasks:
        taken = [int(n) for n in re.findall(r"call ptr %\w+\(i32 \S+ i32 \S+ i64 (\d+), i32 \d+, i32 \d+\)", text)]
        assert taken
        assert max(taken) <= 64 * 256 * 4  # scores of one head


@pytest.mark.parametrize("name", ["a product", "heads that fill no vector"])
def test_it_takes_nothing_else(cpu, name):
    found = matmul() if name == "a product" else workload(registers(cpu.tvm()).lanes, size=3)

    assert not space.fits(found, cpu.tvm())


def test_rows_of_a_task_divide_all_rows_where_they_can():
    machine = Registers(32, 16)

    def efficiency(rows):
        return space.tiling.best_efficiency(rows, 64, machine)

    assert set(space._rows_of_a_task(1500, efficiency)) <= {n for n in space.tiling.divisors(1500) if 8 <= n <= 128}
    assert space._rows_of_a_task(197, efficiency) == [197]
