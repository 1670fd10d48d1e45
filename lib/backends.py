"""What differs between kinds of target when programs are lowered: TVM's passes, and what an untuned program is."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.relax.backend.cpu_generic import pipeline as _cpu
from tvm.relax.backend.cuda import pipeline as _cuda
from tvm.s_tir import Schedule, dlight
from tvm.s_tir.schedule import SBlockRV, ScheduleError
from tvm.target import Target

from lib import prefetch, remainder, structure

_CPU_PIPELINE = "cpu_with_prefetch"
_STACK = 1 << 14  # numbers: a thread has some megabytes


def passes(target: Target) -> ModuleType:
    """TVM's module of lowering passes: `library_dispatch_passes`, `dataflow_lower_passes`, `finalize_passes`."""
    return _cuda if target.kind.name == "cuda" else _cpu


def build(module: tvm.IRModule, target: Target) -> tvm.runtime.Module:
    """Compile a scheduled module."""
    return tvm.tirx.build(module, target, pipeline=pipeline(target))


def pipeline(target: Target) -> str:
    """By which name TVM knows how functions are lowered for a target: on CPUs with what no schedule can say, requests
    for weights before they are needed (`lib.prefetch`), whole tiles apart from those at a border (`lib.remainder`), and
    accumulators on the stack, where LLVM sees that nothing else writes to them; TVM would take them from a pool."""
    return _CPU_PIPELINE if target.kind.name == "llvm" else "default"


def _lower_for_cpu() -> tuple[tvm.transform.Pass, Any, Any]:
    lower, *finalize = tvm.tirx.get_tir_pipeline("default")
    before, after = [_rewrite(prefetch.insert), _rewrite(remainder.peel)], [_rewrite(_on_stack)]
    return tvm.transform.Sequential([*before, lower, *after]), *finalize


def _rewrite(change: Callable[[tirx.PrimFunc], tirx.PrimFunc]) -> tvm.transform.Pass:
    return tirx.transform.prim_func_pass(lambda function, *_: change(function), opt_level=0, name=change.__name__)


def _on_stack(function: tirx.PrimFunc) -> tirx.PrimFunc:
    def kept(allocated: tirx.AllocBuffer) -> tirx.AllocBuffer:
        tensor = allocated.buffer
        size = math.prod(int(extent) for extent in tensor.shape)
        if tensor.scope() != "local" or size > _STACK:
            return allocated
        return tirx.AllocBuffer(tensor, {**allocated.annotations, "disable_lower_builtin": tirx.IntImm("int32", 1)})

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.AllocBuffer, kept)))


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


def reference(module: tvm.IRModule, target: Target) -> tvm.IRModule:
    """A module to check results against, which no trace has touched: on CPUs, each block's outer loops in parallel and
    its sums around the innermost loop over results, which compilers then turn into vectors.

    As TVM lowers them untuned, the products of a BERT-Large take minutes; the way to these loops are a few primitives,
    whose preconditions TVM checks.
    """
    if target.kind.name != "llvm":
        return module
    functions = {
        gvar: _in_plain_loops(function) if isinstance(function, tirx.PrimFunc) else function
        for gvar, function in module.functions_items()
    }
    return tvm.IRModule(functions, attrs=module.attrs)


def _in_plain_loops(function: tirx.PrimFunc) -> tirx.PrimFunc:
    schedule = Schedule(tvm.IRModule({"main": function}), debug_mask="none")
    for block in structure.leaf_blocks(function):
        try:
            _through_results(schedule, schedule.get_sblock(block.name_hint))
        except ScheduleError:  # it stays as far as it got: any state of a schedule computes the same
            continue
    plain = schedule.mod["main"]
    return tirx.PrimFunc(plain.params, plain.body, plain.ret_type, attrs=function.attrs)


def _through_results(schedule: Schedule, block: SBlockRV) -> None:
    found, loops = schedule.get(block), schedule.get_loops(block)
    spatial, summed = structure.spatial_axes(found), structure.summed_axes(found)
    if len(loops) != len(found.iter_vars) or not spatial:
        return
    *outer, last = [loops[n] for n in spatial]
    sums = [loops[n] for n in summed]
    around = sums and structure.lie_together(found, spatial[-1])
    if around:
        schedule.reorder(*outer, *sums, last)
    if outer:
        schedule.parallel(schedule.fuse(*outer))
    if around:
        schedule.decompose_reduction(block, sums[0])


tvm.tirx.register_tir_pipeline(_CPU_PIPELINE, _lower_for_cpu)
