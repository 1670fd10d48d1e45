"""What decisions make of workloads without a register tile. Of contractions and windows: test_nest.py."""

import math

import numpy as np
import pytest
import tvm
from tvm import tirx

from lib.search import evolution, nest
from lib.tir import analysis, traces
from tests.helpers import subgraph
from tests.lib.search.spaces.test_columns import pooled
from tests.lib.search.spaces.test_elementwise import added, quantized, windows
from tests.lib.search.spaces.test_rows import softmax
from tests.lib.search.spaces.test_transposition import HEADS, SIZE, TOKENS, keys, pairs
from tests.lib.search.test_described import biased

N = 14  # programs of a workload


def programs(workload, cpu):
    """Some, with their features by name and their loops as TVM has them."""
    described = nest.describe(workload, cpu.tvm())
    for proposal in evolution.sample(workload, cpu.tvm(), N, known=set(), seed=3):
        module = traces.apply(workload, proposal.trace).mod
        yield dict(zip(nest.NAMES, nest.features(described, proposal.trace), strict=True)), module


def size(found, name):
    return round(2 ** float(found[name]) - 1)


def loops(module, kind):
    return [loop for loop in analysis.walk(module["main"].body, tirx.For) if loop.kind == kind]


def is_in_vectors(module, cpu):
    """Whether each vector of the lowered program is read and written as one."""
    target = cpu.tvm()
    lower, *_ = tvm.tirx.get_tir_pipeline("default")
    with target:
        module = lower(tvm.tirx.transform.BindTarget(tvm.target.Target(target, host=target))(module))
    [body] = [function.body for function in module.functions.values()]
    touched = analysis.walk(body, tirx.BufferStore) + analysis.walk(body, tvm.ir.TensorLoad)
    vectors = [index for access in touched for index in access.indices if "x" in str(index.ty.dtype)]
    assert vectors
    return all(isinstance(index, tirx.Ramp) and int(index.stride) == 1 for index in vectors)


@pytest.mark.parametrize(
    ("make", "shapes"),
    [(windows, [(14, 14, 32)]), (biased, [(6, 10, 48), (48,)]), (added, [(8, 49, 96), (8, 49, 96)])],
)
def test_vectors_that_fall_apart_are_told(cpu, make, shapes):
    for found, module in programs(subgraph(cpu, make, *shapes), cpu):
        slowness = found["slowness"] + math.log2(1 - found["idle share"])

        assert (slowness == pytest.approx(0, abs=1e-5)) == is_in_vectors(module, cpu)


def test_what_becomes_a_loop_of_few_bytes_is_told_to_fall_apart(cpu):
    """Rounding has no vectors in TVM; what LLVM makes of its loops was measured."""
    told = [(found["lanes"], found["slowness"] < 1) for found, _ in programs(subgraph(cpu, quantized, (64, 1024)), cpu)]
    narrowest = min(lanes for lanes, _ in told)

    assert not any(is_whole for lanes, is_whole in told if lanes == narrowest)
    assert any(is_whole for lanes, is_whole in told if lanes > narrowest)


@pytest.mark.parametrize("make", [added, windows])
def test_tasks_and_their_elements_make_up_the_tensor(cpu, make):
    shapes = [(14, 14, 32)] * (2 if make is added else 1)
    for found, module in programs(subgraph(cpu, make, *shapes), cpu):
        [tasks] = loops(module, tirx.ForKind.PARALLEL)
        [vector] = loops(module, tirx.ForKind.VECTORIZED)

        assert size(found, "tasks") == int(tasks.extent)
        assert size(found, "task elements") * int(tasks.extent) == pytest.approx(14 * 14 * 32, abs=14)
        assert found["lanes"] == int(vector.extent)
        assert size(found, "task data bytes") == pytest.approx(4 * size(found, "task elements"), abs=8)


def test_one_side_of_a_transposition_is_contiguous_along_its_vectors(cpu):
    steps = {
        (size(found, "vector step in source"), size(found, "vector step in result"))
        for found, _ in programs(subgraph(cpu, keys, (TOKENS, 3 * HEADS * SIZE)), cpu)
    }

    assert steps == {(3 * HEADS * SIZE, 1), (1, TOKENS)}


def test_what_moves_together_is_told_by_the_loop_around_it(cpu):
    """Pairs are the vectors; the next loop goes along the tokens or along the heads' elements."""
    found = [found for found, _ in programs(subgraph(cpu, pairs, (TOKENS, 3 * HEADS * SIZE)), cpu)]

    assert {(each["lanes"], size(each, "vector step in result")) for each in found} == {(2, 1)}
    assert {size(each, "next step in result") for each in found} == {2, 2 * TOKENS}


def test_accumulators_of_lines_are_those_that_are_unrolled(cpu):
    """Where parts of an image are summed first, those of its largest loop nest."""
    for found, module in programs(subgraph(cpu, pooled, (1, 14, 14, 96)), cpu):
        unrolled = [int(loop.extent) for loop in loops(module, tirx.ForKind.UNROLLED)] or [1]

        assert int(found["accumulators"]) in unrolled
        assert found["number of RFactor"] or set(unrolled) == {int(found["accumulators"])}
        assert found["lanes"] in {int(loop.extent) for loop in loops(module, tirx.ForKind.VECTORIZED)}


def test_rows_of_a_task_are_told(cpu):
    for found, module in programs(softmax(cpu, 24, 64), cpu):
        [tasks] = loops(module, tirx.ForKind.PARALLEL)

        assert size(found, "tasks") == int(tasks.extent)
        assert size(found, "task elements") == 24 // int(tasks.extent) * 64
        assert np.isnan(found["tile rows"])
