import re

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm.target import Target

from lib.machine import targets
from lib.machine.dots import AMX_BF16, ARM_SMALL, BF16, INT7, INT8, INT16
from lib.measure import peak
from lib.tir import lowering
from tests.lib.tir import test_matrix
from tests.lib.tir.test_dot import needs_avx2, needs_it, needs_vnni


def test_a_cpu_has_one(cpu, pool):
    """Whether programs stay below it is for benchmarks: in tests, another process on the same cores decides."""
    assert peak.flops(cpu, pool) > 1e8


def test_a_gpu_has_none(pool):
    assert peak.flops(targets.target("nvidia/nvidia-h100"), pool) is None


def test_it_computes_what_it_counts(cpu, tmp_path):
    """Against NumPy: compilers leave nothing of it out."""
    workload = tvm.IRModule({"main": tvm.script.from_source(peak.source(threads=2, lanes=8, sums=3, steps=5))})
    lowering.build(workload, cpu.tvm()).export_library(str(tmp_path / "peak.so"))
    x = np.random.default_rng(0).random((2, 8), np.float32)
    y = tvm.runtime.tensor(np.zeros((2, 3, 8), np.float32))

    tvm.runtime.load_module(str(tmp_path / "peak.so"))["main"](tvm.runtime.tensor(x), y)

    expected = x
    for _ in range(5):
        expected = expected * x + x
    np.testing.assert_allclose(y.numpy(), np.repeat(expected[:, None], 3, axis=1), rtol=1e-6)


@needs_it
def test_bf16_computes_what_it_counts_by_the_instruction(cpu, tmp_path):
    source = peak.source(threads=2, lanes=8, sums=3, steps=5, dot=BF16)
    library = lowering.build(tvm.IRModule({"main": tvm.script.from_source(source)}), cpu.tvm())
    rng = np.random.default_rng(0)
    x, w = (rng.random(shape).astype(ml_dtypes.bfloat16) for shape in ((2, 1, 2), (2, 1, 8, 2)))
    y = tvm.runtime.tensor(np.zeros((2, 3, 8), np.float32))

    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), y)

    expected = 5 * np.einsum("tk,tlk->tl", x[:, 0].astype(np.float32), w[:, 0].astype(np.float32))
    np.testing.assert_allclose(y.numpy(), np.repeat(expected[:, None], 3, axis=1), rtol=1e-5)
    assert "vdpbf16ps" in library.inspect_source("s")


@needs_vnni
def test_bytes_compute_what_they_count_by_the_instruction(cpu):
    source = peak.source(threads=2, lanes=8, sums=3, steps=5, dot=INT8)
    library = lowering.build(tvm.IRModule({"main": tvm.script.from_source(source)}), cpu.tvm())
    rng = np.random.default_rng(0)
    x, w = rng.integers(0, 256, (2, 1, 4)).astype(np.uint8), rng.integers(-128, 128, (2, 1, 8, 4)).astype(np.int8)
    y = tvm.runtime.tensor(np.zeros((2, 3, 8), np.int32))

    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), y)

    expected = 5 * np.einsum("tk,tlk->tl", x[:, 0].astype(np.int32), w[:, 0].astype(np.int32))
    np.testing.assert_array_equal(y.numpy(), np.repeat(expected[:, None], 3, axis=1))
    assert "vpdpbusd" in library.inspect_source("s")


@needs_avx2
def test_pairs_are_multiplied_as_often_as_they_are_counted():
    """Each sum with data of its own: the compiler would multiply once for several, or once before the loop."""
    old, sums, steps = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell"}), 6, 70
    source = peak.source(threads=2, lanes=8, sums=sums, steps=steps, dot=INT16)
    library = lowering.build(tvm.IRModule({"main": tvm.script.from_source(source)}), old)
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-128, 256, shape).astype(np.int16) for shape in ((2, 68, 2), (2, 2, 8, 2)))
    y = tvm.runtime.tensor(np.zeros((2, sums, 8), np.int32))

    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), y)

    of_word = np.einsum("tnk,tvlk->tvnl", x.astype(np.int32), w.astype(np.int32))
    expected = [of_word[:, n // 4, [step % 64 + n % 4 for step in range(steps)]].sum(1) for n in range(sums)]
    np.testing.assert_array_equal(y.numpy(), np.stack(expected, 1))
    text = library.inspect_source("s")
    loop = max(text.split("\n\tj"), key=lambda part: part.count("vpmaddwd"))  # between two jumps
    assert loop.count("vpmaddwd") >= sums


@test_matrix.needs_it
def test_matrices_compute_what_they_count_by_their_instruction(cpu):
    module, flop = peak.loop(cpu.tvm(), 2, AMX_BF16)
    library = lowering.build(module, cpu.tvm())
    rng = np.random.default_rng(0)
    x, w = (rng.random(shape).astype(ml_dtypes.bfloat16) for shape in ((2, 32, 16, 2), (2, 16, 32, 2)))
    y = tvm.runtime.tensor(np.zeros((2, 32, 32), np.float32))

    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), y)

    once = np.einsum("tmkp,tknp->tmn", x.astype(np.float64), w.astype(np.float64))
    turns = flop // (2 * 2 * 32 * 32 * 32)
    np.testing.assert_allclose(y.numpy(), turns * once, rtol=1e-3)  # of sums of thousands of terms
    assert "tdpbf16ps" in library.inspect_source("s")


@needs_avx2
def test_bytes_with_small_weights_compute_what_they_count_two_words_at_a_time():
    haswell = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2})
    source = peak.source(threads=2, lanes=8, sums=6, steps=70, dot=INT7)
    library = lowering.build(tvm.IRModule({"main": tvm.script.from_source(source)}), haswell)
    rng = np.random.default_rng(0)
    x, w = rng.integers(0, 256, (2, 72, 4)).astype(np.uint8), rng.integers(-32, 33, (2, 4, 8, 4)).astype(np.int8)
    y = tvm.runtime.tensor(np.zeros((2, 6, 8), np.int32))

    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), y)

    wide, weights = x.astype(np.int32), w.astype(np.int32)
    expected = np.zeros((2, 6, 8), np.int32)
    for step in range(70):
        for n in range(6):
            for word in range(2):
                data = wide[:, step % 64 + n % 4 + 4 * word]
                expected[:, n] += np.einsum("tk,tlk->tl", data, weights[:, n // 4 * 2 + word])
    np.testing.assert_array_equal(y.numpy(), expected)
    assert "vpaddw" in library.inspect_source("s")


@pytest.mark.parametrize(
    ("dot", "cpu"),
    [(INT16, "haswell"), (INT7, "haswell"), (INT7, "skylake-avx512"), (ARM_SMALL, "cortex-a72")],
)
def test_what_another_instruction_adds_stays_in_the_registers_that_are_left(dot, cpu):
    triple = "aarch64-linux-gnu" if dot == ARM_SMALL else "x86_64-linux-gnu"
    target = Target({"kind": "llvm", "mtriple": triple, "mcpu": cpu, "num-cores": 2})
    module, _ = peak.loop(target, 2, dot)

    text = lowering.build(module, target).inspect_source("s")

    loop = max(re.split(r"\n\t(?:j|b\.)", text), key=lambda part: part.count(dot.name))  # between two jumps
    assert loop.count(dot.name) > 1
    assert not re.search(r"vmov\w+\s+%[yz]mm\d+, -?\d*\(%rsp\)|\tst[rp]\tq\d+.*\[sp", loop)
