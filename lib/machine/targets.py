"""What is compiled for: this CPU or another, or a GPU; as TVM knows it, corrected by what the operating system says."""

import json
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.target import Target, codegen

from lib.contracts.errors import TargetError
from lib.machine import host
from lib.machine.registers import FLOAT_BITS, registers

# What CUDA guarantees of every GPU since sm_30; of shared memory, without opting in to more.
_GPU_LIMITS = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 49152}

# Instruction sets, as LLVM names them; its other CPU features are tuning hints, or of no use to kernels.
_INSTRUCTION_SETS = ("avx", "amx", "fma", "f16c", "gfni", "vaes", "vpclmulqdq")


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """A CPU: with the threads, it decides which measurements can be compared."""

    text: str  # JSON of tvm.target.Target
    threads: int  # of TVM's pool, measured and deployed alike
    vector_bits: int  # that LLVM may use; see `registers`

    kind = "llvm"

    @property
    def name(self) -> str:
        """Folder name, e.g. `llvm-znver4-2t-512b`."""
        parts = json.loads(self.text)
        return f"{parts['kind']}-{parts.get('mcpu', 'generic')}-{self.threads}t-{self.vector_bits}b"

    @property
    def instructions(self) -> str:
        """Class of targets for which the same programs are fast: `avx512`, `avx2`, or empty for any other."""
        is_x86 = json.loads(self.text).get("mtriple", "x86_64").startswith(("x86_64", "i386"))
        return {512: "avx512", 256: "avx2"}.get(self.vector_bits, "") if is_x86 else ""

    def tvm(self) -> Target:
        """The TVM object."""
        return Target(self.text)


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """An NVIDIA GPU."""

    text: str  # JSON of tvm.target.Target
    threads: int  # of the CPU beside it, for compilers

    kind = "cuda"
    instructions = ""  # see `CpuTarget.instructions`

    @property
    def name(self) -> str:
        """Folder name, e.g. `cuda-sm_90a`."""
        return f"cuda-{json.loads(self.text)['arch']}"

    def tvm(self) -> Target:
        """The TVM object."""
        return Target(self.text)


# First parts of triples that LLVM takes beside its own names.
_ALIASES = {"amd64": "x86_64", "arm64": "aarch64", "i486": "i386", "i586": "i386", "i686": "i386"}

AnyTarget = CpuTarget | GpuTarget


def target(text: str = "host", threads: int = 0) -> AnyTarget:
    """The target of a run.

    Args:
        text: As `cpu_target` has it; or `cuda` for the GPU of this machine, the tag of one that TVM knows, e.g.
            `nvidia/nvidia-h100`, or JSON of kind `cuda`.
        threads: See `cpu_target`; not for GPUs.

    Raises:
        TargetError: Unknown or incomplete, or there is no GPU.
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
    return CpuTarget(str(target), threads or cores, registers(target).lanes * FLOAT_BITS)


def _host_target() -> dict[str, object]:
    """LLVM's idea of this CPU, corrected where the operating system reports other features (masked CPUs in VMs)."""
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
        mattr.append("-prefer-256-bit")  # of some CPUs; dense kernels are slower with half the width
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
            "--target cuda is the GPU of this machine, but nvidia-smi lists none. Name the GPU to compile "
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
    architecture = _ALIASES.get(name := str(parts["mtriple"]).partition("-")[0], name)
    known = [str(each) for each in codegen.llvm_get_targets()]
    if architecture not in known:  # LLVM would crash on it
        raise TargetError(
            f"--target: LLVM {codegen.llvm_version_major()} knows no architecture {name!r} (of the mtriple "
            f"{parts['mtriple']!r}); it knows {', '.join(known)}."
        )
    mcpu = str(parts.get("mcpu", ""))
    if mcpu and not codegen.llvm_is_valid_cpu(mcpu, str(parts["mtriple"])):
        raise TargetError(f"LLVM {codegen.llvm_version_major()} knows no CPU {mcpu!r} for {parts['mtriple']}.")
    try:
        tvm.target.Target(parts)
    except Exception as error:
        raise TargetError(f"TVM refuses --target {text}: {str(error).splitlines()[-1]}") from error
    return parts
