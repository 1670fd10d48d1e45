"""The machine: its cores and GPUs, and how measurements name it."""

import os
import platform
import socket
import subprocess
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import psutil


def gpus() -> list[str]:
    """The UUID of each GPU that this process may use."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = gpu_facts("index,uuid")
    if allowed is None:
        return [uuid for _, uuid in found]
    wanted = [name.strip() for name in allowed.split(",")]
    return [uuid for index, uuid in found if index in wanted or uuid in wanted]


def gpu_facts(columns: str) -> list[list[str]]:
    """What nvidia-smi tells of each GPU; empty if there is none."""
    query = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[field.strip() for field in line.split(",")] for line in told.splitlines() if line]


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
    for line in cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpuinfo() -> list[str]:
    """Lines in which Linux describes the CPU; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
