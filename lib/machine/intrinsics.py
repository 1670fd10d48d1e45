"""Tensor intrinsics without the wait: TVM imports all of them, up to a minute a process, for the few a target can use.

They are loaded by who searches or applies a trace that names one, and by nobody else.
"""

import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm.s_tir
from tvm.target import Target
from tvm.tirx.script.parser import entry as tvmscript

_PACKAGE = "tvm.s_tir.tensor_intrin"


def load(target: Target) -> None:
    """Register the intrinsics of one target, in place of TVM's import of every target's (TVM 0.27).

    `TuneContext` imports `tvm.s_tir.tensor_intrin`, whose `cuda` module alone parses TVMScript for seconds. A
    package of that name without its `__init__` satisfies it, and holds the modules that the target needs.
    Call it before the first `TuneContext` of a process; later calls add modules.
    """
    kind, triple = target.kind.name, str(target.attrs.get("mtriple", ""))
    if _PACKAGE not in sys.modules:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(Path(tvm.s_tir.__file__).parent / "tensor_intrin")]
        sys.modules[_PACKAGE] = package
        tvm.s_tir.tensor_intrin = package
    with _stacks_without_source():
        if kind in ("cuda", "rocm", "metal", "hexagon"):
            importlib.import_module(f"{_PACKAGE}.{kind}")
        elif triple.startswith(("x86_64", "i686")):
            importlib.import_module(f"{_PACKAGE}.x86")
        elif triple.startswith(("aarch64", "arm")):
            importlib.import_module(f"{_PACKAGE}.arm_cpu")
        elif triple.startswith("riscv"):
            importlib.import_module(f"{_PACKAGE}.riscv_cpu")


@contextmanager
def _stacks_without_source() -> Iterator[None]:
    """Parse TVMScript ten times as fast.

    For each function it parses, TVM asks `inspect.stack` for the lines of source of all callers, which looks through
    all modules for each of them. It only needs these lines to see that a function stands in a class; none of the
    intrinsics does.
    """
    tvmscript.inspect = _Inspect()
    try:
        yield
    finally:
        tvmscript.inspect = inspect


class _Inspect:
    """The module `inspect`, with another `stack`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    @staticmethod
    def stack() -> list[inspect.FrameInfo]:
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
            frame = frame.f_back  # type: ignore[assignment]
        return frames
