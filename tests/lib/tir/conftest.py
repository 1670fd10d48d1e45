"""CPUs with AMX for tests of programs that use it, on machines that lack it too."""

import numpy as np
import pytest
import tvm
from tvm.target import Target

from lib.machine.registers import registers
from lib.tir import lowering, matrix
from tests.lib.tir import amx_emulation


@pytest.fixture(scope="module")
def told(cpu):
    """This CPU with AMX, whether it has it or not: compilers do not write it unasked."""
    parts = {**cpu.tvm().export()}
    more = [
        f"+{name}" for name in ("amx-tile", "amx-bf16", "amx-int8", "avx512f", "avx512vl", "avx512bf16", "avx512vnni")
    ]
    parts["mattr"] = [*(each for each in parts.get("mattr", []) if each[1:] not in {name[1:] for name in more}), *more]
    target = Target(parts)
    if not registers(target).matrices or "avx512bf16" not in {
        str(f) for f in tvm.target.codegen.llvm_get_cpu_features(cpu.tvm())
    }:
        pytest.skip("needs AVX-512, which programs with AMX have beside it")
    return target


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    """Runs a program with AMX in software."""
    names: set[str] = set()
    monkeypatch.setattr(matrix._Writer, "imports", lambda writer: names.update(writer.texts) or [])

    def run(program, target, arguments, out, *, permitted=True):
        library = lowering.build(program, target)
        emulation = amx_emulation.compiled(names, tmp_path / "amx.o", permitted=permitted)
        path = tmp_path / f"{len(list(tmp_path.glob('*.so')))}.so"
        library.export_library(str(path), options=[str(emulation)])
        tensors = [tvm.runtime.tensor(array) for array in (*arguments, out)]
        tvm.runtime.load_module(str(path))["main"](*tensors)
        return np.asarray(tensors[-1].numpy()), set(names)

    return run
