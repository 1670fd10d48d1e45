"""Short names of CPUs for `--target`, beside those that TVM has: what runs many models, and is mostly not at hand."""

from collections.abc import Mapping
from typing import Any

_LINUX, _MACOS = "aarch64-linux-gnu", "arm64-apple-macosx13.0"
_NEOVERSE = ("neoverse-n1", "neoverse-n2", "neoverse-v1", "neoverse-v2")
_CORTEX = ("cortex-a53", "cortex-a55", "cortex-a72", "cortex-a76", "cortex-a78", "cortex-x1")
# Boards and computers with their cores; of two kinds of cores the fast ones, since all threads get equal parts.
_COMPUTERS = {
    "raspberry-pi/3": (_LINUX, "cortex-a53", 4),
    "raspberry-pi/4": (_LINUX, "cortex-a72", 4),
    "raspberry-pi/5": (_LINUX, "cortex-a76", 4),
    "apple/m1": (_MACOS, "apple-m1", 4),
    "apple/m2": (_MACOS, "apple-m2", 4),
    "apple/m3": (_MACOS, "apple-m3", 4),
    "apple/m4": (_MACOS, "apple-m4", 4),
}

NAMES: Mapping[str, Mapping[str, Any]] = {
    **{f"arm/{cpu}": {"kind": "llvm", "mtriple": _LINUX, "mcpu": cpu} for cpu in (*_NEOVERSE, *_CORTEX)},
    **{name: {"kind": "llvm", "mtriple": triple, "mcpu": cpu, "num-cores": cores}
       for name, (triple, cpu, cores) in _COMPUTERS.items()},
}  # fmt: skip
