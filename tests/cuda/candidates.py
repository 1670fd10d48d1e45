"""Programs that the search makes for GPUs, run on stand-ins and compared with what LLVM makes of their workload."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tvm
import tvm_ffi
from tvm.target import Target

from lib.machine import targets
from lib.search import evolution
from lib.tir import lowering, traces
from lib.tir.numerics import random_values, relative_error
from tests.cuda import emulated
from tests.cuda.stand_ins import TARGET

BARRIER, MULTIPLICATION = "__syncthreads();", "wmma::mma_sync("
TOLERANCE = {"float32": 1e-5, "float16": 2e-2}  # by the type of a workload's result; halves are summed as halves


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a candidate: `right`, `wrong`, or where it failed: `build`, `run`."""

    status: str
    error: float = float("nan")  # relative to the largest result
    told: str = ""
    barriers: int = 0  # in its source
    tensor_cores: bool = False  # whether it multiplies on them


def sampled(workload: tvm.IRModule, n: int, seed: int = 0) -> list[str]:
    """Traces of random programs, and of the untuned one."""
    target = targets.target(TARGET).tvm()
    return [traces.EMPTY_TRACE, *(p.trace for p in evolution.sample(workload, target, n, known=set(), seed=seed))]


def outcomes(workload: tvm.IRModule, some: Sequence[str], *, without: str = "") -> list[Outcome]:
    """What comes of each trace, in processes that have stand-ins.

    Args:
        without: Text that is taken out of the source of all kernels before they are compiled.
    """
    text, found = tvm.ir.save_json(workload), list[Outcome]()
    while len(found) < len(some):  # a fault ends a process
        found += emulated.in_own_process(_outcomes, text, some[len(found) :], (without, ""))
    return found


def _outcomes(text: str, some: Sequence[str], change: tuple[str, str]) -> list[Outcome]:
    """Those up to the first one that breaks this process's CUDA."""
    compiler = _Compiler(*change)
    workload, found = tvm.ir.load_json(text), list[Outcome]()
    inputs = [
        random_values(tuple(map(int, param.ty.shape)), str(param.ty.dtype), 3, seed=n)
        for n, param in enumerate(workload["main"].params)
    ]
    expected = _on_cpu(workload, inputs)
    target = targets.target(TARGET).tvm()
    for trace in some:
        try:
            with target:
                kernel = lowering.build(traces.program(workload, trace, target), target)
        except Exception as error:
            found.append(Outcome("build", told=_last_lines(error)))
            continue
        try:
            arguments = [tvm.runtime.tensor(array, tvm.cuda(0)) for array in inputs]
            kernel["main"](*arguments)
            error = relative_error(arguments[-1].numpy(), expected)
        except Exception as failure:
            return [
                *found,
                Outcome("run", float("nan"), _last_lines(failure), compiler.barriers, compiler.tensor_cores),
            ]
        status = "right" if error <= TOLERANCE[inputs[-1].dtype.name] else "wrong"
        found.append(Outcome(status, error, "", compiler.barriers, compiler.tensor_cores))
    return found


class _Compiler:
    """Takes the place of TVM's, and hands over to it."""

    def __init__(self, old: str, new: str) -> None:
        self.barriers, self.tensor_cores = 0, False  # of the source that was compiled last
        tvms = tvm_ffi.get_global_func("tvm_callback_cuda_compile")

        def compiled(source: str) -> bytes:
            self.barriers, self.tensor_cores = source.count(BARRIER), MULTIPLICATION in source
            return bytes(tvms(source.replace(old, new) if old else source))

        tvm_ffi.register_global_func("tvm_callback_cuda_compile", compiled, override=True)


def _on_cpu(workload: tvm.IRModule, inputs: Sequence[np.ndarray]) -> np.ndarray:
    target = Target(targets.cpu_target().text)
    arguments = [tvm.runtime.tensor(array) for array in inputs]
    lowering.build(lowering.reference(workload, target), target)["main"](*arguments)
    return np.asarray(arguments[-1].numpy())


def _last_lines(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).strip().splitlines()[-3:])[-500:]
