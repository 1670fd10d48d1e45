"""Lines of windows that lie in padding."""

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.relax import op

from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.search import evolution
from lib.tir import analysis, lowering, outside, traces
from lib.tir.workload import load_module
from tests.helpers import run_on
from tests.lib.graph.rules.helpers import const, module, random


def convolution(pixels, kernel, channels=16, groups=1, **attrs):
    """A convolution of an image of so many lines and columns that keeps its size, but for its stride."""
    padding = attrs.get("dilation", 1) * (kernel // 2)
    weight = const(random((kernel, kernel, channels // groups, channels), 1))

    def build(x):
        return op.nn.relu(
            op.nn.conv2d(x, weight, padding=padding, groups=groups, data_layout="NHWC", kernel_layout="HWIO", **attrs)
        )

    return fusion.lift_constants(module(build, (1, pixels, pixels, channels)))


def programs(model, cpu, n=6):
    """A workload, its inputs, and random programs of it."""
    [subgraph] = extract_subgraphs(fusion.fuse(model.module, cpu.tvm()))
    workload = load_module(subgraph.workload)
    found = evolution.sample(workload, cpu.tvm(), n, known=set(), seed=0)
    return workload, [traces.apply(workload, each.trace).mod for each in found]


def marks(program):
    return [loop for loop in analysis.walk(program["main"].body, tirx.For) if outside.MARK in loop.annotations]


LARGE = [
    (16, 3, {"dilation": 12}),
    (10, 3, {"dilation": 6, "strides": 2}),
    (14, 27, {"groups": 16}),
    (9, 7, {"groups": 16, "strides": 2}),
]


@pytest.mark.parametrize(("pixels", "kernel", "attrs"), LARGE)
def test_programs_that_leave_them_out_compute_the_same(pixels, kernel, attrs, cpu):
    model = convolution(pixels, kernel, **attrs)
    workload, found = programs(model, cpu)
    x, out = random((1, pixels, pixels, 16)), analysis.stored(analysis.leaf_blocks(workload["main"])[-1]).buffer
    inputs, empty = [x, *model.weights.values()], np.zeros([int(n) for n in out.shape], np.float32)
    expected = run_on(workload, cpu.tvm(), inputs, empty)

    assert any(map(marks, found))
    for program in found:
        np.testing.assert_allclose(run_on(program, cpu.tvm(), inputs, empty), expected, rtol=1e-4, atol=1e-4)


def test_what_is_left_out_is_not_read(cpu):
    """Infinite weights times zeros would be no numbers. Of one pixel, a 3x3 window has one line in the image."""
    model = convolution(1, 3, dilation=2)
    weight = next(iter(model.weights.values())).copy()
    weight[0], weight[2] = np.inf, np.inf
    _, found = programs(model, cpu)
    marked = [program for program in found if marks(program)]
    x = random((1, 1, 1, 16))

    assert marked
    for program in marked:
        y = run_on(program, cpu.tvm(), [x, weight], np.zeros((1, 1, 1, 16), np.float32))
        np.testing.assert_allclose(y, np.maximum(x @ weight[1, 1], 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("pixels", "kernel", "attrs", "why"),
    [
        (28, 3, {}, "few lines are outside"),
        (14, 5, {"groups": 16}, "a window that is unrolled"),
    ],
)
def test_other_windows_are_computed_as_they_are(pixels, kernel, attrs, why, cpu):
    _, found = programs(convolution(pixels, kernel, **attrs), cpu)

    assert not any(map(marks, found)), why
    for program in found:
        tvm.ir.assert_structural_equal(outside.skip(program["main"]), program["main"])


def test_the_lowering_leaves_no_marks(cpu):
    _, found = programs(convolution(16, 3, dilation=12), cpu)
    program = next(program for program in found if marks(program))

    skipped = outside.skip(program["main"])
    assert not any(outside.MARK in loop.annotations for loop in analysis.walk(skipped.body, tirx.For))
    assert analysis.walk(skipped.body, tirx.IfThenElse)
    assert lowering.build(program, cpu.tvm())
