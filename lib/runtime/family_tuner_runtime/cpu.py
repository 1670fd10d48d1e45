"""What the CPU of this machine can do, by LLVM's names of features."""

import platform
from functools import lru_cache
from pathlib import Path

# LLVM's names where Linux has another one (arch/x86/include/asm/cpufeatures.h; "HWCAPs of ARM64" in its documentation).
_LINUX = {
    "lzcnt": "abm", "bmi": "bmi1", "avx512vbmi2": "avx512_vbmi2", "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg", "avx512vpopcntdq": "avx512_vpopcntdq", "avx512fp16": "avx512_fp16",
    "avx512bf16": "avx512_bf16", "avxvnni": "avx_vnni", "amx-tile": "amx_tile", "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
    "neon": "asimd", "dotprod": "asimddp", "fullfp16": "asimdhp", "lse": "atomics", "rdm": "asimdrdm",
}  # fmt: skip


def architecture(name: str = "") -> str:
    """One name for each: `x86_64`, `aarch64`.

    Args:
        name: Of a target triple; that of this machine by default.
    """
    name = (name or platform.machine()).lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def missing(features: list[str]) -> list[str]:
    """Those of LLVM's features that this CPU lacks; empty where the system does not tell (kernels then say so)."""
    found = _flags()
    return [name for name in features if _LINUX.get(name, name) not in found] if found else []


@lru_cache(maxsize=1)
def _flags() -> frozenset[str]:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
