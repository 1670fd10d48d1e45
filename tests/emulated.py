"""An emulated aarch64 CPU for tests, where one is set up: by `.ci/run`, or by hand with

python -m lib.measure.emulator .venv/emulated
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil
import pytest
import tvm

from lib.machine import linking, targets
from lib.measure.emulator import Emulator
from lib.tir import lowering
from tests.farm import Farm, _free_port, until
from tests.helpers import ROOT

FOLDER = Path(os.environ.get("TUNER_EMULATOR", ROOT / ".venv" / "emulated"))
needs_emulator = pytest.mark.skipif(
    not (FOLDER / "site").is_dir() or shutil.which("qemu-aarch64") is None, reason="no aarch64 CPU is emulated here"
)
needs_linker = pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None, reason="nothing here links for aarch64"
)

Kernel = tuple[tvm.IRModule, Sequence[np.ndarray], np.ndarray]  # a program, its inputs, and a place for its result


def run_all(
    kernels: Mapping[str, Kernel], target: targets.CpuTarget, folder: Path, cpu: str = "max", *, delivered: bool = False
) -> dict[str, np.ndarray | str]:
    """What kernels compute on an emulated CPU, by name; or what they raise.

    Args:
        cpu: As qemu names it.
        delivered: As they are in libraries: they say what the CPU lacks.
    """
    how = lowering.pipeline(lowering.standard("llvm"), is_delivered=delivered)
    for name, (program, inputs, out) in kernels.items():
        built = tvm.tirx.build(program, target.tvm(), pipeline=how)
        built.export_library(str(folder / f"{name}.so"), **linking.for_export(target.tvm()))
        np.savez(folder / f"{name}.npz", *inputs, out)
    command = Emulator(FOLDER, cpu).command("-m", "tests.run_kernels", str(folder))
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    return {name: _found(folder / name) for name in kernels}


def _found(path: Path) -> np.ndarray | str:
    if path.with_suffix(".error").exists():
        return path.with_suffix(".error").read_text()
    [array] = np.load(path.with_suffix(".out.npz")).values()
    return array.view(ml_dtypes.bfloat16) if array.dtype == "V2" else array


class EmulatedFarm(Farm):
    """A tracker, and a server on an emulated CPU, as a board would run it."""

    def start_emulated(self, threads: int) -> None:
        options = ["--tracker", str(self.tracker), "--key", "test", "--threads", str(threads)]
        command = Emulator(FOLDER).command("-m", "lib.rpc_server", *options, "--port", str(_free_port()))
        self.servers.append(
            psutil.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )
        until(lambda: self.registered() == 1)


@contextlib.contextmanager
def emulated_farm(threads: int) -> Iterator[EmulatedFarm]:
    farm = EmulatedFarm()
    try:
        farm.start_emulated(threads)
        yield farm
    finally:
        farm.close()
