"""Tiles whose results are computed between the products of the next: which ones, and that they compute the same."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock

from lib.tir import analysis, lowering, matrix, overlap, remainder, traces
from tests.lib.tir.test_dot import convolution, product, programs, random
from tests.lib.tir.test_matrix import BF16, INT8, WITH, calls, convolved, needs_x86, operands, times

DEEP = 6 * 32  # as many products as six steps take, for bf16


@pytest.fixture
def apart(monkeypatch):
    """Lowers programs with the results of each tile after its products."""

    def lower_apart(lower):
        with monkeypatch.context() as patched:
            patched.setattr(overlap, "insert", lambda body, *_: body)
            return lower()

    return lower_apart


def lowered(workload, trace, target=WITH):
    """A program with AMX, before TVM's own passes."""
    peeled = remainder.peel(traces.program(workload, trace, target)["main"].with_attr("target", target))
    return matrix.insert(lowering._compact(tvm.IRModule({"main": peeled}))["main"])


def pipelined(function):
    return [loop for loop in analysis.walk(function.body, tirx.For) if loop.loop_var.name == "tile"]


SHAPES = [(96, 64, DEEP, BF16), (100, 64, DEEP, BF16), (37, 128, DEEP, BF16), (64, 64, 2 * DEEP, INT8)]
NAMES = ["whole tiles", "a border", "a short border", "bytes"]


@needs_x86
@pytest.mark.parametrize(("rows", "columns", "depth", "dot"), SHAPES, ids=NAMES)
def test_results_are_those_of_tiles_one_after_the_other_to_the_bit(told, emulated, apart, rows, columns, depth, dot):
    workload, (x, w) = product(rows, columns, depth, dot), operands(rows, columns, depth, dot)
    expected = times(x, w, dot)

    found = 0
    for trace in programs(workload, told, 6):
        program = traces.program(workload, trace, told)
        out, _ = emulated(program, told, [x, w], np.zeros_like(expected))
        alone, _ = apart(lambda program=program: emulated(program, told, [x, w], np.zeros_like(expected)))
        np.testing.assert_array_equal(out, alone)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=0 if dot is INT8 else 1e-5 * depth)
        found += len(pipelined(lowered(workload, trace, told)))
    assert found


@needs_x86
def test_convolutions_are_numpys(told, emulated):
    workload, inputs = convolution(14, (32, 64)), [random((1, 14, 14, 32), 0), random((3, 3, 32, 64), 1)]
    expected = convolved(*inputs)

    found = 0
    for trace in programs(workload, told, 6):
        program = traces.program(workload, trace, told)
        out, _ = emulated(program, told, inputs, np.zeros((1, 14, 14, 64), random((1,), 0).dtype))
        np.testing.assert_allclose(out.astype(np.float32), expected, rtol=2.0**-7, atol=1e-2)
        found += len(pipelined(lowered(workload, trace, told)))
    assert found


@needs_x86
def test_a_tile_that_is_outside_still_leaves_the_results_before_it(told, emulated, monkeypatch):
    """No space makes such; here the loops over tiles with a border take one step more."""
    workload, (x, w) = product(148, 64, DEEP), operands(148, 64, DEEP, BF16)
    peel, longer = remainder.peel, []

    def with_one_more(loop):
        if remainder.MARK not in loop.annotations:
            return loop
        longer.append(loop)
        return tirx.For(loop.loop_var, 0, int(loop.extent) + 1, loop.kind, loop.body, annotations=loop.annotations)

    def peel_longer(function):
        return peel(function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, with_one_more))))

    monkeypatch.setattr(remainder, "peel", peel_longer)
    found = 0
    for trace in programs(workload, told, 6):
        longer.clear()
        found += bool(pipelined(lowered(workload, trace, told)) and longer)
        out, _ = emulated(traces.program(workload, trace, told), told, [x, w], np.zeros((148, 64), np.float32))
        np.testing.assert_allclose(out, times(x, w, BF16), rtol=1e-5, atol=1e-5 * DEEP)
    assert found


def test_results_come_between_the_products_of_the_next_tile_and_those_of_the_last_one_after_all():
    workload, found = product(64, 64, DEEP), 0
    for trace in programs(workload, WITH, 6):
        for block in analysis.walk(lowered(workload, trace).body, SBlock):
            tiles = block.body.seq[0] if isinstance(block.body, tirx.SeqStmt) else None
            if not isinstance(tiles, tirx.For) or tiles.loop_var.name != "tile":
                continue
            step = next(loop for loop in analysis.walk(tiles, tirx.For) if calls(loop.body, "multiply"))
            kinds = [
                "multiply" if calls(each, "multiply") else "results"
                for each in step.body.seq
                if calls(each, "multiply") or analysis.walk(each, tirx.BufferStore)
            ]
            first, last = kinds.index("results"), len(kinds) - 1 - kinds[::-1].index("multiply")
            assert first > 0
            assert last > first or kinds.count("multiply") == 1
            assert analysis.walk(block.body.seq[1], tirx.BufferStore)
            assert not calls(block.body.seq[1], "multiply")
            found += 1
    assert found


def test_few_products_and_an_output_that_leaves_the_caches_stay_as_they_are():
    for rows, depth, is_pipelined in ((96, 4 * 32, True), (16384, 4 * 32, False), (16384, 5 * 32, True)):
        workload = product(rows, 64, depth)
        found = [pipelined(lowered(workload, trace)) for trace in programs(workload, WITH, 6)]
        assert any(found) == is_pipelined


def test_registers_are_set_up_again_only_for_tiles_of_another_size():
    workload, found = product(100, 64, DEEP), 0
    for trace in programs(workload, WITH, 8):
        for loop in pipelined(lowered(workload, trace)):
            settings = set(calls(loop.body, "configure"))
            if len(settings) > 1:
                conditional = [each.then_case for each in analysis.walk(loop.body, tirx.IfThenElse)]
                conditions = [each for each in conditional if isinstance(each, tirx.Evaluate) and calls(each, "config")]
                assert len(conditions) == len(settings)
                found += 1
    assert found
