"""The machine: what it can compile for, how many cores may be used, and how measurements name it."""

import json
import os
import platform
import socket
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import psutil
import tvm
from tvm.target import Target, codegen

from lib import intrinsics
from lib.errors import TargetError

# Instruction sets, as LLVM names them; the rest of its CPU features are tuning hints or not for kernels.
_INSTRUCTION_SETS = ("avx", "amx", "fma", "f16c", "gfni", "vaes", "vpclmulqdq")


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """What is compiled for: with the threads, it decides which measurements can be compared."""

    text: str  # JSON of tvm.target.Target
    threads: int  # of TVM's pool, measured and deployed alike
    vector_bits: int

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


def cpu_target(text: str = "host", threads: int = 0) -> CpuTarget:
    """The target of a run.

    Args:
        text: `host`, or a CPU target as JSON, e.g. `{"kind": "llvm", "mcpu": "skylake-avx512"}`.
        threads: Threads of one inference; 0 for all physical cores this process may use.

    Raises:
        TargetError: Not a CPU target of this LLVM, or more threads than cores.
    """
    cores = physical_cores()
    if not 0 <= threads <= cores:
        raise TargetError(f"--threads must be between 1 and the {cores} cores this process may use (0: all of them), "
                          f"but got {threads}.")  # fmt: skip
    parts = _host_target() if text == "host" else _parse(text)
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


def physical_cores() -> int:
    """Physical cores this process may use: affinity and container limits count, hyper-threads do not."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(psutil.cpu_count(logical=False) or allowed, allowed)
    quota = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000": 200 ms in each 100 ms, two cores
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores


@lru_cache(maxsize=1)
def versions() -> str:
    """Of the libraries that decide what is built and how it is measured."""
    names = ("apache-tvm", "apache-tvm-ffi", "xgboost", "numpy")
    return ", ".join(f"{name} {version(name)}" for name in names)


def hostname() -> str:
    """Name of this machine on its network."""
    return socket.gethostname()


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """What the operating system calls the CPU."""
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
    for line in _cpuinfo():
        if line.startswith("flags"):
            flags = {flag.replace("avx512_", "avx512").replace("avx_", "avx") for flag in line.split()[2:]}
            return {flag.replace("_", "-") for flag in flags if flag.startswith(_INSTRUCTION_SETS)}
    return set()


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _parse(text: str) -> dict[str, object]:
    try:
        parts = json.loads(text)
    except json.JSONDecodeError:
        raise TargetError(
            f"--target is neither `host` nor JSON: {text!r}. "
            'Write it as \'{"kind": "llvm", "mcpu": "skylake-avx512"}\'.'
        ) from None
    if not isinstance(parts, dict) or parts.get("kind") != "llvm":
        raise TargetError(f'--target must have "kind": "llvm": only CPUs can be tuned so far, but got {text}.')
    parts.setdefault("mtriple", str(codegen.llvm_get_system_triple()))
    mcpu = str(parts.get("mcpu", ""))
    if mcpu and not codegen.llvm_is_valid_cpu(mcpu, str(parts["mtriple"])):  # TVM would log and build generic code
        raise TargetError(f"LLVM {codegen.llvm_version_major()} knows no CPU {mcpu!r} for {parts['mtriple']}.")
    try:
        tvm.target.Target(parts)
    except Exception as error:
        raise TargetError(f"TVM refuses --target {text}: {str(error).splitlines()[-1]}") from error
    return parts


def _triple(parts: dict[str, object]) -> str:
    return str(parts.get("mtriple") or codegen.llvm_get_system_triple())
