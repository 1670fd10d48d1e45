"""Instructions for matrices: where they are written, and that they compute what the loops do.

On CPUs without them, the functions that call them are those of `amx_emulation`.
"""

import re

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.target import Target

from lib.machine import targets
from lib.machine.dots import AMX_BF16, AMX_INT8, BF16, INT8
from lib.machine.registers import registers
from lib.tir import analysis, lowering, matrix, traces
from lib.tir.workload import as_workload
from tests.helpers import run_on
from tests.lib.tir.test_dot import convolution, product, programs, random

WITH = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "sapphirerapids", "num-cores": 2})
needs_it = pytest.mark.skipif(not registers(targets.cpu_target().tvm()).matrices, reason="needs a CPU with AMX")
needs_x86 = pytest.mark.skipif(targets.architecture(targets.cpu_target().triple) != "x86_64", reason="needs x86-64")


def operands(rows, columns, depth, dot):
    if dot is BF16:
        return [random((rows, depth), 0), random((depth, columns), 1)]
    rng = np.random.default_rng(0)
    return [
        rng.integers(0, 256, (rows, depth)).astype(np.uint8),
        rng.integers(-128, 128, (depth, columns)).astype(np.int8),
    ]


def times(x, w, dot):
    return (x.astype(np.float64) @ w.astype(np.float64)).astype(dot.sums)


def convolved(image, weight):
    """A 3x3 convolution in NHWC with a border of zeros, in float32."""
    padded = np.pad(image.astype(np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return np.einsum("nyxcab,abco->nyxo", windows, weight.astype(np.float32))


def image_product(size, channels, columns):
    """A 1x1 convolution in NHWC: rows of neighbouring lines follow one another."""
    image = te.placeholder((1, size, size, channels), "bfloat16", name="image")
    weight = te.placeholder((1, 1, channels, columns), "bfloat16", name="weight")
    k = te.reduce_axis((0, channels), "k")
    out = te.compute(
        (1, size, size, columns),
        lambda n, y, x, o: te.sum(image[n, y, x, k].astype("float32") * weight[0, 0, k, o].astype("float32"), axis=k),
        name="out",
    )
    return as_workload(te.create_prim_func([image, weight, out]).with_attr("layout_free_buffers", [1]))


SHAPES = [(64, 64, 64, BF16), (197, 96, 96, BF16), (49, 128, 48, BF16), (7, 64, 144, BF16), (64, 64, 64, INT8),
          (50, 48, 96, INT8)]  # fmt: skip
NAMES = ["whole tiles", "a prime number of rows", "one row beyond", "few rows", "bytes", "bytes with a border"]


@needs_x86
@pytest.mark.parametrize(("rows", "columns", "depth", "dot"), SHAPES, ids=NAMES)
def test_products_are_numpys_in_software(told, emulated, rows, columns, depth, dot):
    workload, (x, w) = product(rows, columns, depth, dot), operands(rows, columns, depth, dot)
    expected = times(x, w, dot)

    for trace in programs(workload, told, 4):
        out, called = emulated(traces.program(workload, trace, told), told, [x, w], np.zeros_like(expected))
        assert any("multiply" in name for name in called)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=0 if dot is INT8 else 1e-5 * depth)


@needs_it
@pytest.mark.parametrize(("rows", "columns", "depth", "dot"), SHAPES, ids=NAMES)
def test_products_are_numpys_on_a_cpu_that_has_it(cpu, rows, columns, depth, dot):
    workload, (x, w) = product(rows, columns, depth, dot), operands(rows, columns, depth, dot)
    expected = times(x, w, dot)

    for trace in programs(workload, cpu.tvm(), 4):
        program = traces.program(workload, trace, cpu.tvm())
        assert "tdpb" in lowering.build(program, cpu.tvm()).inspect_source("s")
        out = run_on(program, cpu.tvm(), [x, w], np.zeros_like(expected))
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=0 if dot is INT8 else 1e-5 * depth)


@needs_x86
def test_convolutions_take_several_lines_at_once_and_are_numpys(told, emulated):
    workload, inputs = convolution(7, (32, 64)), [random((1, 7, 7, 32), 0), random((3, 3, 32, 64), 1)]
    expected = convolved(*inputs)

    of_several = 0
    for trace in programs(workload, told, 6):
        program = traces.program(workload, trace, told)
        out, called = emulated(program, told, inputs, np.zeros((1, 7, 7, 64), ml_dtypes.bfloat16))
        np.testing.assert_allclose(out.astype(np.float32), expected, rtol=2.0**-7, atol=1e-2)
        of_several += any(re.search("configure_7x64_7x64", name) for name in called)
    assert of_several


@needs_x86
def test_lines_that_follow_one_another_fill_registers_together(told, emulated):
    workload, inputs = image_product(7, 32, 64), [random((1, 7, 7, 32), 0), random((1, 1, 32, 64), 1)]
    expected = inputs[0].astype(np.float32) @ inputs[1].astype(np.float32)[0, 0]

    whole = 0
    for trace in programs(workload, told, 6):
        program = traces.program(workload, trace, told)
        out, called = emulated(program, told, inputs, np.zeros((1, 7, 7, 64), np.float32))
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)
        whole += any(re.search("configure_16x64", name) for name in called)  # of lines of seven
    assert whole


@needs_x86
def test_columns_that_are_cut_off_have_a_place(told, emulated):
    """Of 32 columns, 24 are read: the others must not be written over something else."""
    x, w = te.placeholder((48, 64), "bfloat16", name="x"), te.placeholder((64, 32), "bfloat16", name="w")
    k = te.reduce_axis((0, 64), "k")
    sums = te.compute(
        (48, 32), lambda i, j: te.sum(x[i, k].astype("float32") * w[k, j].astype("float32"), axis=k), name="sums"
    )
    out = te.compute((48, 24), lambda i, j: sums[i, j] + 1.0, name="out")
    workload = as_workload(te.create_prim_func([x, w, out]).with_attr("layout_free_buffers", [1]))
    left, right = operands(48, 32, 64, BF16)

    for trace in programs(workload, told, 4):
        program = traces.program(workload, trace, told)
        found, called = emulated(program, told, [left, right], np.zeros((48, 24), np.float32))
        assert any("multiply" in name for name in called)
        np.testing.assert_allclose(found, times(left, right, BF16)[:, :24] + 1, rtol=1e-5, atol=1e-3)


@needs_x86
def test_what_the_operating_system_refuses_is_told(told, emulated):
    workload, (x, w) = product(32, 32, 32), operands(32, 32, 32, BF16)
    program = traces.program(workload, programs(workload, told, 1)[0], told)

    with pytest.raises(RuntimeError, match="AMX"):
        emulated(program, told, [x, w], np.zeros((32, 32), np.float32), permitted=False)


def lowered(workload, trace, target):
    function = traces.program(workload, trace, target)["main"].with_attr("target", target)
    return matrix.insert(function)


def calls(root, kind):
    names = [
        str(c.args[0].value)
        for c in analysis.walk(root, tvm.ir.Call)
        if c.args and isinstance(c.args[0], tvm.ir.StringImm)
    ]
    return [name for name in names if name.startswith(f"family_tuner_tiles_{kind}")]


def test_registers_are_set_up_once_for_a_task_whose_tiles_agree():
    workload = product(64, 64, 64)

    for trace in programs(workload, WITH, 4):
        function = lowered(workload, trace, WITH)
        [task] = [loop for loop in analysis.walk(function.body, tirx.For) if calls(loop.body, "configure")
                  and loop.kind == tirx.ForKind.PARALLEL]  # fmt: skip
        assert len(calls(task.body, "configure")) == len(calls(task.body.seq[0], "configure")) == 1
        assert calls(task.body.seq[-1], "release")


def test_without_them_programs_multiply_vectors():
    """Compiled for a CPU without AMX."""
    workload, without = product(32, 64, 64), Target({**WITH.export(), "mcpu": "cooperlake"})

    for trace in programs(workload, WITH, 3):
        program = traces.program(workload, trace, without)
        assert not calls(lowered(workload, trace, without).body, "")
        text = lowering.build(program, without).inspect_source("s")
        assert "vdpbf16ps" in text
        assert "tile" not in text.replace("tiles_", "")


@needs_x86
def test_a_library_that_needs_it_is_told_from_others(tmp_path):
    workload = product(32, 64, 64)
    for name, target in (("with", WITH), ("without", Target({**WITH.export(), "mcpu": "cooperlake"}))):
        program = traces.program(workload, programs(workload, target, 1)[0], target)
        lowering.build(program, target).export_library(str(tmp_path / f"{name}.so"), options=["-Wl,-S"])

    assert matrix.needed([tmp_path / "with.so", tmp_path / "without.so"]) == ["amx-tile"]
    assert matrix.needed([tmp_path / "without.so"]) == []


def test_a_configuration_has_the_palette_then_the_widths_then_the_rows():
    expected = bytearray(64)
    expected[0], expected[16], expected[18], expected[48], expected[49] = 1, 64, 24, 7, 16

    text = matrix._configuration([(7, 64), (16, 24)])

    assert bytes.fromhex(text.replace("\\", "")) == bytes(expected)


@pytest.mark.parametrize(
    ("heights", "vectors", "found"),
    [([16, 16], 2, 7), ([16, 3], 2, 7), ([16], 4, 6), ([16] * 4, 1, 6), ([16, 1], 1, 5)],
)
def test_a_tile_takes_registers_for_sums_and_for_what_it_keeps(heights, vectors, found):
    assert AMX_BF16.registers(heights, vectors) == found


def test_which_cpus_have_it():
    found = [
        registers(Target({**WITH.export(), "mcpu": mcpu})).matrices
        for mcpu in ("sapphirerapids", "cooperlake", "znver5")
    ]

    assert found == [(AMX_BF16, AMX_INT8), (), ()]
