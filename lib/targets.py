"""What is compiled for: this CPU or another, or a GPU; as TVM knows it, and as the operating system knows better."""

import json
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.target import Target, codegen

from lib import host, intrinsics
from lib.errors import TargetError

# What CUDA guarantees of every GPU since sm_30, of shared memory without asking for more.
_GPU_LIMITS = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 49152}

# Instruction sets, as LLVM names them; the rest of its CPU features are tuning hints or not for kernels.
_INSTRUCTION_SETS = ("avx", "amx", "fma", "f16c", "gfni", "vaes", "vpclmulqdq")


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """What is compiled for: with the threads, it decides which measurements can be compared."""

    text: str  # JSON of tvm.target.Target
    threads: int  # of TVM's pool, measured and deployed alike
    vector_bits: int

    kind = "llvm"

    @property
    def name(self) -> str:
        """Folder name, e.g. `llvm-znver4-2t-512b`."""
        parts = json.loads(self.text)
        return f"{parts['kind']}-{parts.get('mcpu', 'generic')}-{self.threads}t-{self.vector_bits}b"

    def tvm(self) -> Target:
        """The TVM object; loads the intrinsics that its schedule rules name."""
        target = Target(self.text)
        intrinsics.load(kind=target.kind.name, triple=_triple(json.loads(self.text)))
        return target


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """An NVIDIA GPU."""

    text: str  # JSON of tvm.target.Target
    threads: int  # of the CPU beside it, for compilers

    kind = "cuda"

    @property
    def name(self) -> str:
        """Folder name, e.g. `cuda-sm_90a`."""
        return f"cuda-{json.loads(self.text)['arch']}"

    def tvm(self) -> Target:
        """The TVM object; loads the intrinsics that its schedule rules name."""
        intrinsics.load(kind="cuda", triple="")
        return Target(self.text)


AnyTarget = CpuTarget | GpuTarget


def target(text: str = "host", threads: int = 0) -> AnyTarget:
    """The target of a run.

    Args:
        text: As `cpu_target` has it; or `cuda` for the GPU of this machine, the tag of one that TVM knows, e.g.
            `nvidia/nvidia-h100`, or JSON of kind `cuda`.
        threads: See `cpu_target`; not for GPUs.

    Raises:
        TargetError: Unknown or incomplete, or there is no GPU to ask.
    """
    if not (text == "cuda" or text.startswith("nvidia/") or (text.startswith("{") and _parse(text)["kind"] == "cuda")):
        return cpu_target(text, threads)
    if threads:
        raise TargetError(f"--threads is for CPUs, but --target is {text}.")
    parts: Any = _this_gpu() if text == "cuda" else text if text.startswith("nvidia/") else _parse(text)
    try:
        found = Target(parts)
    except Exception as error:
        raise TargetError(f"TVM refuses --target {text}: {str(error).splitlines()[-1]}") from error
    missing = [name for name in _GPU_LIMITS if name not in found.attrs]
    if missing:
        raise TargetError(
            f"--target {text} lacks {', '.join(missing)}, which the search needs. Name a GPU that TVM knows, e.g. "
            "nvidia/nvidia-h100, or add them."
        )
    return GpuTarget(str(found), host.physical_cores())


def cpu_target(text: str = "host", threads: int = 0) -> CpuTarget:
    """The target of a run.

    Args:
        text: `host`, or a CPU target as JSON, e.g. `{"kind": "llvm", "mcpu": "skylake-avx512"}`.
        threads: Threads of one inference; 0 for all physical cores this process may use.

    Raises:
        TargetError: Not a CPU target of this LLVM, or more threads than cores.
    """
    cores = host.physical_cores()
    if not 0 <= threads <= cores:
        raise TargetError(f"--threads must be between 1 and the {cores} cores this process may use (0: all of them), "
                          f"but got {threads}.")  # fmt: skip
    parts = _host_target() if text == "host" else _check_cpu(_parse(text), text)
    parts["num-cores"] = threads or cores
    target = Target(parts)
    return CpuTarget(str(target), threads or cores, _vector_bits(target))


def _vector_bits(target: Target) -> int:
    """Width of the vectors that LLVM may use; TVM's `llvm_get_vector_width` does not look at mattr."""
    features = {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    widest = int(codegen.llvm_get_vector_width(target))
    for name, bits in (("avx512f", 512), ("avx", 256)):
        if name in features:
            return min(bits, widest)
    return min(128, widest)


def _host_target() -> dict[str, object]:
    """LLVM's idea of this CPU, put right where the operating system knows better (masked CPUs in VMs)."""
    mcpu = str(codegen.llvm_get_system_cpu())
    parts: dict[str, object] = {
        "kind": "llvm",
        "mtriple": str(codegen.llvm_get_system_triple()),
        "mcpu": mcpu,
    }
    believed = {str(feature) for feature in codegen.llvm_get_cpu_features(Target(parts))}
    mattr = []
    present = _instruction_sets()
    if present:
        known = {feature for feature in believed if feature.startswith(_INSTRUCTION_SETS)}
        mattr = [f"-{name}" for name in sorted(known - present)]
        mattr += [f"+{name}" for name in sorted(present - known) if name.startswith("avx512")]
    if "avx512f" in present and "prefer-256-bit" in believed:
        mattr.append("-prefer-256-bit")  # LLVM avoids the full width on some CPUs: dense kernels lose by it
    if mattr:
        parts["mattr"] = mattr
    return parts


def _instruction_sets() -> set[str]:
    """The instruction sets that the operating system reports, in LLVM's spelling; empty if it does not tell."""
    for line in host.cpuinfo():
        if line.startswith("flags"):
            flags = {flag.replace("avx512_", "avx512").replace("avx_", "avx") for flag in line.split()[2:]}
            return {flag.replace("_", "-") for flag in flags if flag.startswith(_INSTRUCTION_SETS)}
    return set()


def _this_gpu() -> dict[str, object]:
    """The first GPU that the driver shows."""
    found = host.gpu_facts("compute_cap")
    if not found:
        raise TargetError(
            "--target cuda asks for the GPU of this machine, but nvidia-smi tells of none. Name the GPU to compile "
            "for, e.g. --target nvidia/nvidia-h100."
        )
    return {"kind": "cuda", "arch": f"sm_{found[0][0].replace('.', '')}", **_GPU_LIMITS}


def _parse(text: str) -> dict[str, object]:
    try:
        parts = json.loads(text)
    except json.JSONDecodeError:
        raise TargetError(
            f"--target is neither `host` nor JSON: {text!r}. "
            'Write it as \'{"kind": "llvm", "mcpu": "skylake-avx512"}\'.'
        ) from None
    if not isinstance(parts, dict) or parts.get("kind") not in ("llvm", "cuda"):
        raise TargetError(f'--target must have "kind": "llvm" or "cuda", but got {text}.')
    return parts


def _check_cpu(parts: dict[str, object], text: str) -> dict[str, object]:
    """Complete a CPU target; TVM would log what it does not know, and build generic code."""
    if parts["kind"] != "llvm":
        raise TargetError(f'a CPU target must have "kind": "llvm", but got {text}.')
    parts.setdefault("mtriple", str(codegen.llvm_get_system_triple()))
    mcpu = str(parts.get("mcpu", ""))
    if mcpu and not codegen.llvm_is_valid_cpu(mcpu, str(parts["mtriple"])):
        raise TargetError(f"LLVM {codegen.llvm_version_major()} knows no CPU {mcpu!r} for {parts['mtriple']}.")
    try:
        tvm.target.Target(parts)
    except Exception as error:
        raise TargetError(f"TVM refuses --target {text}: {str(error).splitlines()[-1]}") from error
    return parts


def _triple(parts: dict[str, object]) -> str:
    return str(parts.get("mtriple") or codegen.llvm_get_system_triple())
