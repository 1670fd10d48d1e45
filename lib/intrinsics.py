"""Tensor intrinsics without the wait: TVM imports all of them, 13 s a process, for the few a target can use."""

import importlib
import sys
import types
from pathlib import Path

import tvm.s_tir

_PACKAGE = "tvm.s_tir.tensor_intrin"


def load(*, kind: str, triple: str) -> None:
    """Register the intrinsics of one target, in place of TVM's import of every target's (TVM 0.27).

    `TuneContext` imports `tvm.s_tir.tensor_intrin`, whose `cuda` module alone parses TVMScript for 10 s. A
    package of that name without its `__init__` satisfies it, and holds the modules that the target needs.
    Call it before the first `TuneContext` of a process; later calls add modules.

    Args:
        kind: Target kind, e.g. "llvm" or "cuda".
        triple: LLVM triple of the CPU that runs the code or launches the kernels.
    """
    if _PACKAGE not in sys.modules:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(Path(tvm.s_tir.__file__).parent / "tensor_intrin")]
        sys.modules[_PACKAGE] = package
        tvm.s_tir.tensor_intrin = package
    if kind in ("cuda", "rocm", "metal", "hexagon"):
        importlib.import_module(f"{_PACKAGE}.{kind}")
    elif triple.startswith(("x86_64", "i686")):
        importlib.import_module(f"{_PACKAGE}.x86")
    elif triple.startswith(("aarch64", "arm")):
        importlib.import_module(f"{_PACKAGE}.arm_cpu")
    elif triple.startswith("riscv"):
        importlib.import_module(f"{_PACKAGE}.riscv_cpu")
