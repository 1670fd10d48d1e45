"""How programs are lowered; those for GPUs are compiled here without one, and run in `tests/cuda`."""

import shutil

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.support import nvcc

from lib import deploy
from lib.contracts.errors import DeviceError
from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.machine import host, targets
from lib.measure import devices, factory
from lib.measure.process import Worker, start_all
from lib.measure.protocol import Compile, Param
from lib.models.zoo import catalogue
from lib.search import evolution, nest
from lib.tir import lowering, traces
from lib.tir.numerics import random_values
from lib.tir.traces import EMPTY_TRACE
from lib.tir.workload import load_module
from tests.conftest import QUICK
from tests.helpers import gather, job, matmul, run_on
from tests.lib.search.spaces.test_contraction import attention, convolution, grouped

H100 = "nvidia/nvidia-h100"


@pytest.fixture(scope="module")
def h100():
    return targets.target(H100).tvm()


def source(module: tvm.IRModule, target: tvm.target.Target) -> str:
    """CUDA C++ of a scheduled module."""
    with target:
        return str(tvm.tirx.build(module, target).imports[0].inspect_source())


@pytest.mark.parametrize("make", [matmul, lambda: convolution(stride=2), lambda: grouped(), attention, gather])
def test_plain_loops_compute_what_tvm_computes_untuned(cpu, make):
    workload, target = make(), cpu.tvm()
    plain = lowering.reference(workload, target)
    shapes = [(tuple(map(int, p.ty.shape)), str(p.ty.dtype)) for p in workload["main"].params]
    *inputs, out = [random_values(shape, dtype, 3, seed=n) for n, (shape, dtype) in enumerate(shapes)]

    assert "T.parallel(" in plain["main"].script()
    np.testing.assert_allclose(
        run_on(plain, target, inputs, out), run_on(workload, target, inputs, out), rtol=1e-5, atol=1e-5
    )


def test_in_plain_loops_sums_run_around_their_results(cpu):
    text = lowering.reference(matmul(), cpu.tvm()).script()

    assert "for axis, j in T.grid(64, 32)" in text


def test_accumulators_of_a_cpu_are_on_the_stack(cpu):
    workload = convolution(kernel=1)
    found = evolution.sample(workload, cpu.tvm(), 4, known=set(), seed=0)

    assert found
    for proposal in found:
        program = traces.program(workload, proposal.trace, cpu.tvm())

        assert 'scope="local"' in program.script()
        assert "TVMBackendAllocWorkspace" in tvm.tirx.build(program, cpu.tvm()).inspect_source("ll")
        assert "@TVMBackendAllocWorkspace(" not in lowering.build(program, cpu.tvm()).inspect_source("ll")


def test_a_cpu_needs_no_default_schedule(cpu):
    workload = matmul()

    assert tvm_ffi.structural_equal(lowering.scheduled(workload, cpu.tvm()), workload)


def test_an_untuned_program_of_a_gpu_has_threads(h100):
    assert "__global__" in source(traces.program(matmul(128, 128, 128), EMPTY_TRACE, h100), h100)


def test_candidates_for_a_gpu_are_sampled_with_features_and_lower_to_cuda(h100):
    workload = matmul(128, 128, 128)

    sampled = evolution.sample(workload, h100, 3, known=set(), seed=0)
    found = [evolution.untuned(workload, h100), *sampled]

    assert len({proposal.program_hash for proposal in found}) == 4
    assert all(np.isfinite(proposal.features[len(nest.NAMES) :]).all() for proposal in sampled)
    assert all("__global__" in source(traces.program(workload, p.trace, h100), h100) for p in found)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_candidates_for_a_gpu_compile_to_machine_code(h100):
    [proposal] = evolution.sample(matmul(128, 128, 128), h100, 1, known=set(), seed=0)
    text = source(traces.program(matmul(128, 128, 128), proposal.trace, h100), h100)

    with h100:
        assert nvcc.compile_cuda(text, target_format="cubin", compiler="nvcc")[:4] == b"\x7fELF"


def test_a_compiler_process_writes_a_library_for_a_gpu(tmp_path):
    target = targets.target(H100)
    [proposal] = evolution.sample(matmul(128, 128, 128), target.tvm(), 1, known=set(), seed=0)
    [worker] = start_all([lambda: Worker(target, environment={"TVM_CUDA_COMPILE_MODE": "nvcc"})])
    try:
        worker.define(tvm.ir.save_json(matmul(128, 128, 128)), 20)
        library = tmp_path / "library.so"
        reply = worker.ask(Compile(proposal.trace, library), 60)
    finally:
        worker.kill()

    assert reply.params == (Param((128, 128), "float32", 0),) * 3
    assert library.stat().st_size > 0


@pytest.mark.skipif(bool(host.gpus()), reason="there is a GPU")
def test_without_a_gpu_measuring_says_what_is_missing():
    target = targets.target(H100)
    pool = factory.open_runner(devices.parse("local"), target, QUICK)

    with pytest.raises(DeviceError, match="No GPU is there"):
        list(pool.run([job("candidate", matmul())]))
    pool.close()


def test_a_whole_model_compiles_for_a_gpu_with_a_trace_and_without(h100, tmp_path):
    module = fusion.fuse(catalogue.load("tiny_cnn").module, h100)
    subgraphs = [subgraph for subgraph in extract_subgraphs(module) if subgraph.tunable]
    [proposal] = evolution.sample(load_module(subgraphs[0].workload), h100, 1, known=set(), seed=0)

    deploy.build(module, {subgraphs[0].name: proposal.trace}, h100, tmp_path / "tuned.so", tmp_path / "packing.json")
    deploy.build(module, {}, h100, tmp_path / "untuned.so")

    assert (tmp_path / "tuned.so").stat().st_size > 0
    assert (tmp_path / "untuned.so").stat().st_size > 0


def test_what_is_not_tuned_is_compiled_for_the_same_cpu_at_the_second_level(cpu):
    target = cpu.tvm()

    plain = lowering.for_untuned(target)

    assert dict(plain.export()) == {**target.export(), "opt-level": 2}
    assert lowering.for_untuned(plain) is plain
