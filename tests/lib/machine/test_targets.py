import json

import pytest
from tvm.target import codegen

from lib.contracts.errors import TargetError
from lib.machine import host, targets
from lib.machine.dots import AMX_BF16, AMX_INT8
from lib.machine.names import NAMES
from lib.machine.registers import registers
from lib.measure import absent


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


@pytest.mark.parametrize("may", [True, False])
def test_amx_is_used_where_the_operating_system_lets_processes_use_it(monkeypatch, may):
    flags = "flags\t\t: fpu avx avx2 fma f16c avx512f avx512vl avx512_bf16 amx_tile amx_bf16 amx_int8"
    monkeypatch.setattr(host, "cpuinfo", lambda: [flags])
    monkeypatch.setattr(host, "may_use_amx", lambda: may)

    machine = registers(targets.cpu_target().tvm())

    assert machine.matrices == ((AMX_BF16, AMX_INT8) if may else ())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("llvm -mcpu=skylake", "neither `host`, nor a name, nor JSON"),
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
    ("mcpu", "found"),
    [
        ("sapphirerapids", "amx"),
        ("znver4", "avx512"),
        ("tigerlake", "avx512"),
        ("znver5", "avx512x2"),
        ("skylake-avx512", "avx512x2"),
        ("haswell", "avx2"),
        ("nehalem", ""),
    ],
)
def test_targets_are_told_apart_by_the_instructions_that_decide_what_is_fast(mcpu, found):
    text = json.dumps({"kind": "llvm", "mcpu": mcpu, "mtriple": "x86_64-linux-gnu"})

    assert targets.cpu_target(text, threads=2).instructions == found


def test_gpus_have_no_such_class_and_arms_have_their_own():
    arm = json.dumps({"kind": "llvm", "mcpu": "cortex-a72", "mtriple": "aarch64-linux-gnu"})

    assert targets.cpu_target(arm, threads=2).instructions == "neon"
    assert targets.target("nvidia/nvidia-h100").instructions == ""


@pytest.mark.parametrize("name", NAMES)
def test_what_has_a_short_name_is_a_cpu_that_llvm_knows(name):
    cpu = targets.cpu_target(name, threads=3)
    parts = json.loads(cpu.text)

    assert parts["mcpu"] == NAMES[name]["mcpu"]
    assert parts["num-cores"] == cpu.threads == 3
    assert (cpu.vector_bits, cpu.instructions) == (128, "neon")
    assert targets.CpuTarget(str(cpu.tvm()), 3, 128).triple == NAMES[name]["mtriple"]


def test_tags_of_tvm_are_names_too_without_what_only_its_schedules_read():
    cpu = targets.cpu_target("arm/rk3399", threads=6)

    assert cpu.name == "llvm-aarch64-6t-128b"
    assert "rk3399" not in cpu.text
    assert targets.cpu_target("arm/rasp3b", threads=4).triple == "armv7l-linux-gnueabihf"


def test_a_board_has_its_cores_and_a_server_those_that_are_asked_for():
    assert targets.cpu_target("raspberry-pi/5").threads == 4
    assert targets.cpu_target("raspberry-pi/5", threads=2).threads == 2
    assert targets.cpu_target("arm/neoverse-v1", threads=64).threads == 64  # however few this machine has
    with pytest.raises(TargetError, match="between 1 and the 4 cores of raspberry-pi/5"):
        targets.cpu_target("raspberry-pi/5", threads=8)
    with pytest.raises(TargetError, match="nobody knows how many cores it has: give --threads"):
        targets.cpu_target("arm/neoverse-v1")


@pytest.mark.parametrize("cores", [0, -1, "many", 1e9])
def test_what_cannot_be_a_number_of_cores_is_refused(cores):
    with pytest.raises(TargetError, match=r"num-cores must be a whole number|refuses --target"):
        targets.cpu_target(json.dumps({"kind": "llvm", "mtriple": "riscv64-linux-gnu", "num-cores": cores}))


@pytest.mark.parametrize(
    ("triple", "expected"),
    [
        ("arm64-apple-macosx13.0", ("aarch64", "darwin")),
        ("arm64-apple-darwin23.1.0", ("aarch64", "darwin")),
        ("aarch64-unknown-linux-gnu", ("aarch64", "linux")),
        ("armv7l-linux-gnueabihf", ("arm", "linux")),
        ("amd64-conda-linux-gnu", ("x86_64", "linux")),
    ],
)
def test_a_library_fits_an_architecture_and_a_system(triple, expected):
    assert targets.platform_of(triple) == expected


def test_this_machine_stands_in_for_another_one_with_no_more_threads_than_it_has():
    cpu = targets.cpu_target("arm/neoverse-v1", threads=64)

    assert not cpu.runs_here
    assert targets.stand_in(cpu).runs_here
    assert targets.stand_in(cpu).threads == host.physical_cores()


def test_a_cpu_with_instructions_that_this_one_lacks_is_another_machine(monkeypatch):
    triple = str(codegen.llvm_get_system_triple())
    newer, older = (targets.cpu_target(json.dumps({"kind": "llvm", "mcpu": mcpu, "mtriple": triple}))
                    for mcpu in ("cascadelake", "haswell"))  # fmt: skip
    flags = ["flags : fpu avx avx2 fma f16c avx512f avx512dq avx512cd avx512bw avx512vl avx512_bf16"]
    monkeypatch.setattr(host, "cpuinfo", lambda: flags)

    assert newer.lacking == ["avx512vnni"]
    assert not newer.runs_here
    assert older.runs_here
    assert "one with avx512vnni" in absent.missing(newer)

    monkeypatch.setattr(host, "cpuinfo", list)  # nobody tells

    assert newer.runs_here
