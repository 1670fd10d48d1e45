"""Kernels that say what the CPU lacks. A bit of cpuid that no CPU sets stands for what this one lacks."""

import platform

import numpy as np
import pytest
import tvm
from tvm.target import Target

from lib.tir import cpu_check, lowering
from tests.helpers import matmul
from tests.lib.tir.test_dot import WITH, WITHOUT

on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 CPU")
_RESERVED = (7, 0, 3, 0)


def product(cpu, tmp_path):
    """Of a library on disk, as one is delivered: its result, and NumPy's."""
    name = lowering.pipeline(lowering.standard("llvm"), is_delivered=True)
    tvm.tirx.build(matmul(4, 8, 16), cpu.tvm(), pipeline=name).export_library(str(tmp_path / "kernel.so"))
    workload, rng = matmul(4, 8, 16)["main"], np.random.default_rng(0)
    *given, made = [tuple(int(extent) for extent in param.ty.shape) for param in workload.params]
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in given)
    found = tvm.runtime.empty(made, "float32")
    tvm.runtime.load_module(str(tmp_path / "kernel.so"))["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), found)
    return found.numpy(), x @ w


def test_a_library_runs_on_the_cpu_that_it_was_compiled_for(cpu, tmp_path):
    found, expected = product(cpu, tmp_path)

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@on_x86
def test_on_another_one_it_raises_and_names_what_it_needs(cpu, tmp_path, monkeypatch):
    monkeypatch.setitem(cpu_check.PLACES, "avx2", _RESERVED)

    with pytest.raises(RuntimeError, match=r"compiled for a CPU with .*avx2.* lacks some of them.*--target"):
        product(cpu, tmp_path)


@on_x86
@pytest.mark.parametrize("leaf", [(1, 0, 3, 10), (0x80000001, 0, 3, 10), (7, 1, 1, 31)], ids=["1", "extended", "7.1"])
def test_each_leaf_of_cpuid_is_asked(cpu, tmp_path, monkeypatch, leaf):
    monkeypatch.setitem(cpu_check.PLACES, "avx", leaf)

    with pytest.raises(RuntimeError, match="lacks some"):
        product(cpu, tmp_path)


def test_what_is_needed_is_that_of_the_target():
    assert set(cpu_check.needed(Target(WITH))) - set(cpu_check.needed(Target(WITHOUT))) == {"avx512bf16", "avx512vnni"}


def test_what_is_needed_of_arm_is_what_not_all_of_its_cpus_have():
    def needed(**parts):
        return set(cpu_check.needed(Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", **parts})))

    assert needed(mcpu="neoverse-n1") == {"dotprod", "fullfp16", "lse", "rdm"}
    assert needed(mcpu="neoverse-v1") - needed(mcpu="neoverse-n1") == {"bf16", "i8mm", "sve"}
    assert needed(mcpu="cortex-a72") == set()


def test_other_cpus_and_the_oldest_are_not_asked():
    mac = Target({"kind": "llvm", "mtriple": "arm64-apple-macosx13.0", "mcpu": "apple-m1"})
    old = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "nehalem"})

    assert cpu_check.needed(mac) == cpu_check.needed(old) == []


def test_candidates_are_measured_without_it(cpu):
    assert "cpuid" not in lowering.build(matmul(4, 8, 16), cpu.tvm()).inspect_source("s")
