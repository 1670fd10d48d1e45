"""The machine: its cores and GPUs, and the names that measurements give it."""

import ctypes
import multiprocessing
import os
import platform
import socket
import subprocess
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import psutil

_LEAST_MEMORY = 2 << 30  # bytes
_ARCH_PRCTL, _REQUEST_PERMISSION, _AMX_REGISTERS = 158, 0x1023, 18  # of x86-64 Linux


def gpus() -> list[str] | None:
    """The UUID of each GPU that this process may use; None where nvidia-smi fails, or is not there."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = _nvidia_smi("index,uuid")
    if found is None:
        return None
    if allowed is None:
        return [uuid for _, uuid in found]
    wanted = [name.strip() for name in allowed.split(",")]
    return [uuid for index, uuid in found if index in wanted or uuid in wanted]


def gpu_facts(columns: str) -> list[list[str]]:
    """What nvidia-smi reports of each GPU, by columns of its `--query-gpu`; empty if there is none."""
    return _nvidia_smi(columns) or []


def _nvidia_smi(columns: str) -> list[list[str]] | None:
    query = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [[field.strip() for field in line.split(",")] for line in output.splitlines() if line]


def processes(width: int) -> ProcessPoolExecutor:
    """Up to so many processes, which begin anew: a fork would take TVM's threads for its own."""
    return ProcessPoolExecutor(width, multiprocessing.get_context("spawn"))


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


def memory_bytes() -> int:
    """Memory of this machine, or what its container may have of it."""
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # of cgroups v2, v1
        text = Path(path).read_text().strip() if Path(path).exists() else ""
        if text.isdigit():  # v2 says `max` for none
            limits.append(int(text))
    return min(limits)


def memory_of_each(share: float, processes: int) -> int:
    """What each of so many processes may have of it, in bytes; never so little that TVM itself does not fit."""
    return max(_LEAST_MEMORY, int(share * memory_bytes() / processes))


def versions() -> str:
    """Of the libraries that decide what is found and how it is measured."""
    return _versions("apache-tvm", "apache-tvm-ffi", "xgboost", "numpy")


def compilers() -> str:
    """Versions of the libraries that make machine code."""
    return _versions("apache-tvm", "apache-tvm-ffi")


@lru_cache
def _versions(*names: str) -> str:
    return ", ".join(f"{name} {version(name)}" for name in names)


def hostname() -> str:
    """Name of this machine on its network."""
    return socket.gethostname()


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """What the operating system calls the CPU."""
    for line in cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def may_use_amx() -> bool:
    """Whether Linux lets this process use AMX's registers, which it must ask for (`arch_prctl`, since 5.16)."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _AMX_REGISTERS) == 0


def cpuinfo() -> list[str]:
    """Lines in which Linux describes the CPU; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
