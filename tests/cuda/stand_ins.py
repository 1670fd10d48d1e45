"""GPUs where there is none: what CUDA has of libraries and tools, so that its kernels run on this CPU.

They are found as those of a real machine are: `libcuda.so.1` and `libcudart.so.13` in LD_LIBRARY_PATH, `nvcc` and
`nvidia-smi` in PATH. So whatever is started in such an environment has GPUs, and nothing knows what they are. They tell
right kernels from wrong ones; their times say nothing.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cuda import compiler

SOURCES = Path(__file__).parent / "device"
UUIDS = ("GPU-stand-in-a", "GPU-stand-in-b")
COMPUTE_CAPABILITY = 80  # of nvidia/nvidia-a100
TARGET = "nvidia/nvidia-a100"

_SMI = """#!{python}
import os, sys
columns = next(a for a in sys.argv if a.startswith("--query-gpu=")).partition("=")[2].split(",")
uuids = [line.split()[0] for line in open(os.environ["STANDIN_DEVICES"]) if line.strip()]
capability = os.environ["STANDIN_COMPUTE_CAPABILITY"]
for index, uuid in enumerate(uuids):
    facts = {{"index": str(index), "uuid": uuid, "name": "Stand-in GPU", "compute_cap": ".".join(capability)}}
    print(", ".join(facts[column] for column in columns))
"""
_NVCC = """#!/bin/sh
exec "{python}" -S "{compiler}" "$@"
"""


def why_not() -> str:
    """Why there can be none here; empty if there can."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "stand-ins of GPUs are for Linux on x86-64"
    return "" if shutil.which(compiler.CXX) else f"needs {compiler.CXX}"


def build(cache: Path) -> Path:
    """The folder of the stand-ins, made if it was not made of these sources before."""
    sources = sorted(each for each in [*SOURCES.rglob("*"), Path(compiler.__file__)] if each.is_file())
    digest = hashlib.sha1(b"".join(each.read_bytes() for each in sources)).hexdigest()[:16]
    folder = cache / digest
    if not folder.exists():
        fresh = cache / f"{digest}.{os.getpid()}"
        for part in ("lib", "kernels"):
            (fresh / part).mkdir(parents=True)
        shutil.copytree(SOURCES / "include", fresh / "include")
        shutil.copy(SOURCES / "kernel.h", fresh)
        _build_libraries(fresh / "lib")
        _run(compiler.CXX, *compiler.FLAGS, *compiler.BOUNDS, "-x", "c++-header", fresh / "kernel.h")
        try:
            fresh.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(fresh)
    return folder


def _build_libraries(out: Path) -> None:
    driver = [SOURCES / f"{name}.cpp" for name in ("errors", "memory", "threads", "driver")]
    common = (compiler.CXX, "-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-Wall", "-Wextra", "-fPIC", "-shared")
    _run(*common, *driver, "-o", out / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    _run(*common, SOURCES / "runtime.cpp", "-o", out / "libcudart.so.13", "-Wl,-soname,libcudart.so.13",
         f"-Wl,--version-script={SOURCES / 'runtime.map'}", "-L", out, "-l:libcuda.so.1")  # fmt: skip


def _run(*command: object) -> None:
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class StandIns:
    """GPUs of one test: their environment, and the means to take one away."""

    def __init__(self, built: Path, folder: Path, uuids: Sequence[str] = UUIDS) -> None:
        """
        Args:
            built: What `build` returned.
            folder: For what belongs to these alone.
        """
        self._devices = folder / "gpus"
        self._built, self._bin = built, folder / "bin"
        self._bin.mkdir(parents=True, exist_ok=True)
        for name, text in (("nvidia-smi", _SMI), ("nvcc", _NVCC)):
            (self._bin / name).write_text(text.format(python=sys.executable, compiler=compiler.__file__))
            (self._bin / name).chmod(0o755)
        self.set(uuids)

    def set(self, uuids: Sequence[str]) -> None:
        """These are there from now on; one with ` broken` behind its UUID is seen, but does nothing."""
        fresh = self._devices.with_suffix(".new")
        fresh.write_text("".join(f"{uuid}\n" for uuid in uuids))
        fresh.replace(self._devices)

    def environment(self, seed: int = 0) -> dict[str, str]:
        """What processes that are to have them are started with, beside what this process has.

        Args:
            seed: Of the order in which threads run.
        """
        libraries = [str(self._built / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            "PATH": os.pathsep.join([str(self._bin), os.environ["PATH"]]),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "STANDIN_FOLDER": str(self._built),
            "STANDIN_DEVICES": str(self._devices),
            "STANDIN_COMPUTE_CAPABILITY": str(COMPUTE_CAPABILITY),
            "STANDIN_SEED": str(seed),
        }
