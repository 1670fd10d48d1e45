"""How compiled code becomes a shared library of the machine that it is for: this one's compiler links its own only."""

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from tvm.support import cc
from tvm.target import Target, codegen

from lib.contracts.errors import TargetError
from lib.machine.targets import architecture, platform_of

VARIABLE = "TUNER_LINKER"  # of the environment: a compiler with its options, for libraries of other machines

_PACKAGES = {"aarch64": "g++-aarch64-linux-gnu", "arm": "g++-arm-linux-gnueabihf", "riscv64": "g++-riscv64-linux-gnu"}
_TRIPLES = {"aarch64": "aarch64-linux-gnu", "arm": "arm-linux-gnueabihf", "riscv64": "riscv64-linux-gnu"}  # of Debian


def for_export(target: Target) -> dict[str, Any]:
    """What `export_library` needs for libraries of a target: nothing for those of this machine.

    Raises:
        TargetError: There is no compiler for it; the message says where one comes from.
    """
    command = linker(target)
    return {} if not command else {"fcompile": _with(command)}


def linker(target: Target) -> list[str]:
    """The compiler that links for a target, with its options; empty where this machine's own does.

    Raises:
        TargetError: See `for_export`.
    """
    here = str(codegen.llvm_get_system_triple())
    triple = str(target.attrs.get("mtriple", here))
    if target.kind.name != "llvm" or platform_of(triple) == platform_of(here):
        _require_own()
        return []
    if given := shlex.split(os.environ.get(VARIABLE, "")):
        if shutil.which(given[0]) is None:
            raise TargetError(f"[tuner] linker: there is no program {given[0]!r} on PATH.")
        return given
    names = [f"{prefix}-{compiler}" for prefix in _prefixes(triple) for compiler in ("g++", "gcc")]
    found = next((name for name in names if shutil.which(name)), None)
    if found is None:
        raise TargetError(_missing(triple, names))
    return [found]


def _require_own() -> None:
    """Raises: TargetError: This machine has no compiler that TVM would link with (`tvm.support.cc.get_cc`)."""
    name = cc.get_cc()
    if name is None or shutil.which(name) is None:
        found = "there is none on PATH" if name is None else f"there is no program {name!r}, which CXX or CC names"
        raise TargetError(
            f"A C++ compiler links libraries, and {found}. Install one (Debian and Ubuntu: apt-get install g++; macOS: "
            "xcode-select --install), or name it in CXX, without options."
        )


def _prefixes(triple: str) -> list[str]:
    """Of compilers: the triple itself, and what Debian calls it."""
    _, system = platform_of(triple)
    debian = _TRIPLES.get(architecture(triple)) if system == "linux" and "android" not in triple else None
    return list(dict.fromkeys([triple, *([debian] if debian else [])]))


def _missing(triple: str, names: Sequence[str]) -> str:
    kind, system = platform_of(triple)
    told = f"Nothing on this machine links libraries for {triple}: {', '.join(names)} are not on PATH."
    if system == "linux" and kind in _PACKAGES:
        told += f" Install one (Debian and Ubuntu: apt-get install {_PACKAGES[kind]}), or"
    elif system == "darwin":
        told += " Those of macOS are linked on a Mac, where the same command needs nothing else; or"
    else:
        told += " Install one, or"
    return f"{told} name a compiler with its options as `[tuner] linker` in luigi.cfg."


def _with(command: Sequence[str]) -> Callable[..., None]:
    compiler, *more = command

    def link(output: str, objects: Sequence[str], options: Sequence[str] | None = None, **_ignored: Any) -> None:
        cc.create_shared(output, list(objects), [*more, *(options or ())], cc=compiler)

    return link
