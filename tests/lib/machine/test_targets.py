import json

import pytest
from tvm.target import codegen

from lib.contracts.errors import TargetError
from lib.machine import host, targets


def test_the_host_target_has_this_cpus_cores_and_full_vectors():
    cpu = targets.cpu_target()
    parts = json.loads(cpu.text)

    assert parts["num-cores"] == cpu.threads == host.physical_cores()
    assert codegen.llvm_is_valid_cpu(parts["mcpu"], parts["mtriple"])
    flags = " ".join(line for line in host.cpuinfo() if line.startswith("flags"))
    assert cpu.vector_bits == (512 if " avx512f " in flags else cpu.vector_bits)


def test_what_the_operating_system_lacks_is_not_used(monkeypatch):
    monkeypatch.setattr(host, "cpuinfo", lambda: ["flags\t\t: fpu avx avx2 fma f16c"])

    cpu = targets.cpu_target()

    assert cpu.vector_bits == 256
    assert not [f for f in codegen.llvm_get_cpu_features(cpu.tvm()) if str(f).startswith("avx512")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("llvm -mcpu=skylake", "neither `host` nor JSON"),
        ('{"kind": "cuda", "arch": "sm_90"}', "lacks max_threads_per_block, max_shared_memory_per_block"),
        ('{"kind": "vulkan"}', 'must have "kind": "llvm" or "cuda"'),
        ("nvidia/nvidia-h1000", "TVM refuses --target"),
        ('{"kind": "llvm", "mcpu": "pentium-99"}', "knows no CPU 'pentium-99'"),
        ('{"kind": "llvm", "nonsense": 1}', "TVM refuses --target"),
        ('{"kind": "llvm", "mtriple": "../../../../x"}', r"knows no architecture '\.\./\.\./\.\./\.\./x'"),
        ('{"kind": "llvm", "mtriple": "foo-bar-linux"}', "knows no architecture 'foo'"),
    ],
)
def test_a_target_that_cannot_be_is_refused_with_the_reason(text, told):
    with pytest.raises(TargetError, match=told):
        targets.target(text)


def test_a_gpu_is_named_by_its_architecture():
    assert targets.target("nvidia/nvidia-h100").name == "cuda-sm_90a"
    assert targets.target("nvidia/nvidia-a100").kind == "cuda"


def test_threads_are_for_cpus():
    with pytest.raises(TargetError, match="--threads is for CPUs"):
        targets.target("nvidia/nvidia-h100", threads=1)


@pytest.mark.skipif(bool(host.gpus()), reason="there is a GPU")
def test_the_gpu_of_a_machine_without_one_cannot_be_asked_for():
    with pytest.raises(TargetError, match="nvidia-smi lists none"):
        targets.target("cuda")


def test_more_threads_than_cores_are_refused():
    with pytest.raises(TargetError, match="--threads must be between 1 and the"):
        targets.cpu_target(threads=host.physical_cores() + 1)


def test_the_folders_name_tells_what_can_be_compared():
    assert targets.cpu_target('{"kind": "llvm", "mcpu": "skylake-avx512", "mtriple": "x86_64-linux-gnu"}', 1).name == (
        "llvm-skylake-avx512-1t-512b"
    )


@pytest.mark.parametrize(
    ("mcpu", "found"), [("znver4", "avx512"), ("skylake-avx512", "avx512"), ("haswell", "avx2"), ("nehalem", "")]
)
def test_targets_are_told_apart_by_the_instructions_that_decide_what_is_fast(mcpu, found):
    text = json.dumps({"kind": "llvm", "mcpu": mcpu, "mtriple": "x86_64-linux-gnu"})

    assert targets.cpu_target(text, threads=2).instructions == found


def test_no_base_models_are_for_arm_or_gpus():
    arm = json.dumps({"kind": "llvm", "mcpu": "cortex-a72", "mtriple": "aarch64-linux-gnu"})

    assert targets.cpu_target(arm, threads=2).instructions == ""
    assert targets.target("nvidia/nvidia-h100").instructions == ""
