"""Programs for ARM on an emulated CPU: NEON's registers, its instructions for narrow elements, and what it is asked."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm

from lib.machine import targets
from lib.machine.dots import ARM_BF16, ARM_INT8, ARM_SIGNED, ARM_SMALL
from lib.machine.registers import registers
from lib.search import evolution
from lib.tir import lowering, small_weights, traces
from tests.emulated import needs_emulator, needs_linker, run_all
from tests.helpers import matmul, packed, run_on
from tests.lib.tir.test_dot import convolution, in_groups, product

NEW, OLD = (targets.cpu_target(f"arm/{cpu}", threads=2) for cpu in ("neoverse-v1", "cortex-a72"))
NARROW = [pytest.param(ARM_BF16, id="bf16"), pytest.param(ARM_INT8, id="bytes"),
          pytest.param(ARM_SIGNED, id="signed bytes")]  # fmt: skip


def whole_numbers(shape, kind, seed):
    """Small ones: bf16 has them and their sums in float32, so that results are exact whatever the order."""
    rng = np.random.default_rng(seed)
    if kind == "bfloat16":
        return rng.integers(-8, 9, shape).astype(ml_dtypes.bfloat16)
    return rng.integers(*((0, 256) if kind == "uint8" else (-128, 128)), shape).astype(kind)


def some(workload, target, n=3):
    return [p.trace for p in evolution.sample(workload, target.tvm(), n, known=set(), seed=0)]


def assembly(program, target):
    return lowering.build(program, target.tvm()).inspect_source("s")


def test_tiles_are_of_neons_registers():
    workload = product(32, 64, 64, replace(ARM_BF16, data="float32", weights="float32"))

    for trace in some(workload, NEW):
        text = assembly(packed(workload, trace, NEW), NEW)
        assert "fmla" in text
        assert ".4s" in text
        assert "prfm\tpldl2keep" in text  # the next panel of weights
        assert "\tz0" not in text  # nothing of SVE


@pytest.mark.parametrize("dot", NARROW)
def test_programs_for_arm_compute_the_same_on_this_cpu_without_its_instruction(dot, cpu):
    workload = product(16, 32, 32, dot)
    x, w = whole_numbers((16, 32), dot.data, 0), whole_numbers((32, 32), dot.weights, 1)
    expected = x.astype(np.int32) @ w.astype(np.int32)

    for trace in some(workload, NEW, 1):
        program = traces.program(workload, trace, NEW.tvm())
        assert f"\t{dot.name}\t" in assembly(program, NEW)
        found = run_on(program, cpu.tvm(), [x, w], np.zeros(expected.shape, dot.sums))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.acceptance
@needs_linker
@needs_emulator
@pytest.mark.parametrize("dot", NARROW)
def test_products_and_convolutions_by_its_instructions_are_numpys_to_the_last_bit(dot, tmp_path):
    assert dot in registers(NEW.tvm()).dots
    x, w = whole_numbers((13, 40), dot.data, 0), whole_numbers((40, 48), dot.weights, 1)
    image, kernel = whole_numbers((1, 9, 9, 24), dot.data, 2), whole_numbers((3, 3, 8, 96), dot.weights, 3)
    windows = np.lib.stride_tricks.sliding_window_view(image.astype(np.int64), (3, 3), axis=(1, 2))
    parts = [np.einsum("nyxcab,abco->nyxo", windows[:, :, :, n * 8 : n * 8 + 8],
                       kernel[..., n * 32 : n * 32 + 32].astype(np.int64)) for n in range(3)]  # fmt: skip
    expected = {"product": x.astype(np.int64) @ w.astype(np.int64), "groups": np.concatenate(parts, -1)}
    cases = {"product": (product(13, 48, 40, dot), [x, w]), "groups": (in_groups(9, 3, (8, 32), dot), [image, kernel])}
    kernels = {}
    for name, (workload, inputs) in cases.items():
        for n, trace in enumerate(some(workload, NEW)):
            program = traces.program(workload, trace, NEW.tvm())
            assert f"\t{dot.name}\t" in assembly(program, NEW)
            kernels[f"{name}-{n}"] = program, inputs, np.zeros(expected[name].shape, dot.sums)

    found = run_all(kernels, NEW, tmp_path)

    for name, result in found.items():
        np.testing.assert_array_equal(result, expected[name.partition("-")[0]].astype(dot.sums))


def of_small(plain):
    return tvm.IRModule({"main": small_weights.marked(plain["main"], 1)})


def test_sixteen_products_are_four_instructions_on_an_arm_without_dot_products():
    """Eight products, twice; their neighbours added; and these added to sums. What they read is loaded whole."""
    workload = of_small(product(12, 48, 64, ARM_SMALL))

    for trace in some(workload, OLD):
        text = assembly(packed(workload, trace, OLD), OLD)

        assert text.count("\tsmull\t") > 0
        assert {text.count(f"\t{name}\t") for name in ("smull2", "addp", "sadalp")} == {text.count("\tsmull\t")}
        assert not re.search(r"\text\tv", text)


@pytest.mark.acceptance
@needs_linker
@needs_emulator
def test_sums_of_16_bits_are_numpys_on_an_arm_without_dot_products(tmp_path):
    rng, ends = np.random.default_rng(0), np.array([-128, -127, 126, 127], np.int8)
    x, w = rng.choice(ends, (13, 40)), rng.choice(ends[1:], (40, 48))
    x[0], w[:, 0], w[:, 1], w[::2, 2] = -128, -127, 127, -128  # the largest sums that there are, and other neighbours
    x[1], w[1::2, 2] = 127, -127
    assert small_weights.words_together(w, ARM_SMALL) == 1
    workload, kernels = of_small(product(13, 48, 40, ARM_SMALL)), {}
    for n, trace in enumerate(some(workload, OLD)):
        program = traces.program(workload, trace, OLD.tvm())
        assert "\tsmull\t" in assembly(program, OLD)
        kernels[str(n)] = program, [x, w], np.zeros((13, 48), np.int32)

    found = run_all(kernels, OLD, tmp_path, "cortex-a72")

    for result in found.values():
        np.testing.assert_array_equal(result, x.astype(np.int32) @ w.astype(np.int32))


def test_products_whose_weights_nobody_knows_have_no_sums_of_16_bits():
    workload = product(13, 48, 40, ARM_SMALL)

    for trace in some(workload, OLD):
        assert "\taddp\t" not in assembly(traces.program(workload, trace, OLD.tvm()), OLD)


@pytest.mark.acceptance
@needs_linker
@needs_emulator
def test_results_are_rounded_to_bf16_as_numpy_does(tmp_path):
    image, kernel = (np.random.default_rng(n).standard_normal(shape).astype(ml_dtypes.bfloat16)
                     for n, shape in enumerate(((1, 7, 7, 16), (3, 3, 16, 32))))  # fmt: skip
    workload = convolution(7, (16, 32))
    around = np.pad(image.astype(np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(around, (3, 3), axis=(1, 2))
    sums = np.einsum("nyxcab,abco->nyxo", windows, kernel.astype(np.float32))
    expected = sums.astype(ml_dtypes.bfloat16).astype(np.float64)
    [trace, *_] = some(workload, NEW)
    program = traces.program(workload, trace, NEW.tvm())
    assert "bfcvt" in assembly(program, NEW)

    found = run_all({"it": (program, [image, kernel], np.zeros(sums.shape, ml_dtypes.bfloat16))}, NEW, tmp_path)["it"]

    assert np.all(np.abs(found.astype(np.float64) - expected) <= 2.0**-7 * np.abs(expected) + 1e-4)
    assert np.mean(found.astype(np.float64) == expected) > 0.95


@pytest.mark.acceptance
@needs_linker
@needs_emulator
def test_kernels_run_on_the_cpu_that_they_are_for_and_tell_an_older_one_what_it_lacks(tmp_path):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 16), (16, 8)))
    kernels = {"it": (matmul(4, 8, 16), [x, w], np.zeros((4, 8), np.float32))}
    folders = {name: tmp_path / name for name in ("new", "old", "lacks")}
    for folder in folders.values():
        folder.mkdir()

    new = run_all(kernels, NEW, folders["new"], delivered=True)["it"]
    old = run_all(kernels, OLD, folders["old"], "cortex-a72", delivered=True)["it"]
    lacks = run_all(kernels, targets.cpu_target("arm/neoverse-n1", 2), folders["lacks"], "cortex-a72", delivered=True)

    np.testing.assert_allclose(new, x @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(old, x @ w, rtol=1e-5, atol=1e-5)
    assert "compiled for a CPU with dotprod, fullfp16, lse, rdm" in str(lacks["it"])
