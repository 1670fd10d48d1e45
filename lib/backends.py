"""What differs between kinds of target when programs are lowered: TVM's passes, and what an untuned program is."""

from types import ModuleType

import tvm
from tvm.relax.backend.cpu_generic import pipeline as _cpu
from tvm.relax.backend.cuda import pipeline as _cuda
from tvm.s_tir import dlight
from tvm.target import Target


def passes(target: Target) -> ModuleType:
    """TVM's module of lowering passes: `library_dispatch_passes`, `dataflow_lower_passes`, `finalize_passes`."""
    return _cuda if target.kind.name == "cuda" else _cpu


def default_schedules(target: Target) -> list[tvm.transform.Pass]:
    """What gives functions without a schedule TVM's default one, where they need one to run: on GPUs, dlight's."""
    if target.kind.name == "llvm":
        return []
    rules = (dlight.gpu.Matmul, dlight.gpu.GEMV, dlight.gpu.Reduction, dlight.gpu.GeneralReduction, dlight.gpu.Fallback)
    return [dlight.ApplyDefaultSchedule(*(rule() for rule in rules))]


def scheduled(module: tvm.IRModule, target: Target) -> tvm.IRModule:
    """A module that can be compiled: see `default_schedules`."""
    with target:
        return tvm.transform.Sequential(default_schedules(target))(module)
