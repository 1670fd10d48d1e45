"""How scheduled programs become machine code, by kind of target; and what a program without a schedule is.

What happens here decides latencies, so it is a value, `Lowering`, whose text each measurement carries.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.relax.backend.cpu_generic import pipeline as _cpu
from tvm.relax.backend.cuda import pipeline as _cuda
from tvm.s_tir import Schedule, dlight
from tvm.s_tir.schedule import SBlockRV, ScheduleError
from tvm.target import Target

from lib.tir import (
    analysis,
    anywhere,
    cpu_check,
    dot,
    extrema,
    gaps,
    gpu,
    logarithm,
    lookup,
    matrix,
    outside,
    parallel,
    prefetch,
    regions,
    remainder,
    rounding,
    spread,
    straight,
)

# Raise it with every change to what this module, or a pass that it lists, makes of a program: latencies of before are
# then told apart from those of after.
REVISION = 9

# Those of TVM's passes up to the one that makes tensors compact; run again, they change nothing.
_COMPACT = (
    "LowerInitBlock",
    "PlanAndUpdateBufferAllocationLocation",
    "ConvertBlocksToOpaque",
    "CompactBufferAllocation",
)
_STACK_LIMIT = 1 << 14  # elements of a local buffer: a thread's stack has some megabytes


@dataclass(frozen=True, slots=True)
class Lowering:
    """What is done to scheduled programs beside TVM's own passes. Part of the identity of a latency."""

    prefetch: bool  # of packed weights: see `lib.tir.prefetch`
    peel: bool  # whole register tiles apart from those at a border: see `lib.tir.remainder`
    stack: bool  # accumulators on the stack, where LLVM sees that nothing aliases them; TVM takes them from a pool
    repair: bool = False  # of what TVM would do wrong on GPUs: see `lib.tir.gpu`
    revision: int = field(default_factory=lambda: REVISION)

    @property
    def text(self) -> str:
        """For people and for MEASUREMENTS, e.g. `prefetch+peel+stack r1`."""
        chosen = [name for name in ("prefetch", "peel", "stack", "repair") if getattr(self, name)]
        return f"{'+'.join(chosen) or 'plain'} r{self.revision}"


def standard(kind: str) -> Lowering:
    """The lowering of candidates and of libraries for a kind of target (`llvm`, `cuda`)."""
    on_cpu = kind == "llvm"
    return Lowering(prefetch=on_cpu, peel=on_cpu, stack=on_cpu, repair=kind == "cuda")


def passes(target: Target) -> ModuleType:
    """TVM's module of lowering passes: `library_dispatch_passes`, `dataflow_lower_passes`, `finalize_passes`."""
    return _cuda if target.kind.name == "cuda" else _cpu


def build(module: tvm.IRModule, target: Target, lowering: Lowering | None = None) -> tvm.runtime.Module:
    """Compile a scheduled module; `standard` lowering unless told otherwise."""
    return tvm.tirx.build(module, target, pipeline=pipeline(lowering or standard(target.kind.name)))


@cache
def pipeline(lowering: Lowering, *, is_delivered: bool = False) -> str:
    """The name under which TVM knows the passes of a lowering; registers them.

    Args:
        is_delivered: Kernels are to say what a CPU lacks (`lib.tir.cpu_check`), and to take tensors that begin anywhere
            in their memory (`lib.tir.anywhere`).
    """
    name = f"family_tuner {lowering.text}{' delivered' * is_delivered}"
    tvm.tirx.register_tir_pipeline(name, lambda: _passes(lowering, is_delivered))
    return name


def _passes(lowering: Lowering, is_delivered: bool) -> tuple[tvm.transform.Pass, Any, Any]:
    lower, *finalize = tvm.tirx.get_tir_pipeline("default")
    # Peeling copies the K loop into a full tile and one at the border with one loop variable, by which prefetches are
    # inserted: after it, both would get those of one of them.
    before = (
        [extrema.insert]
        + [anywhere.insert] * (is_delivered and not lowering.repair)
        + [prefetch.insert] * lowering.prefetch
        + [straight.insert, remainder.peel, gaps.split, outside.skip] * lowering.peel
        + [gpu.repair] * lowering.repair
        + [parallel.mark_to_kind]
    )
    if lowering.repair:
        lower = gpu.lowered_apart(lower)
    after = (
        [lookup.insert, logarithm.insert, spread.insert]
        + [_on_stack] * lowering.stack
        + [cpu_check.insert] * is_delivered
    )
    compact = tvm.transform.module_pass(lambda module, _: _compact(module), opt_level=0, name="compact")
    together = tvm.transform.module_pass(lambda module, _: regions.insert(module), opt_level=0, name="regions")
    instructions = [matrix.insert, dot.insert, rounding.insert]
    return tvm.transform.Sequential(
        [*map(_rewrite, before), compact, *map(_rewrite, instructions), lower, *map(_rewrite, after), together]
    ), *finalize


def _compact(module: tvm.IRModule) -> tvm.IRModule:
    """The same with tensors as small as a task needs them, if it has places for instructions. These ask where tensors
    lie: what is not small by then, TVM leaves as large as all tasks together need."""
    functions = [function for _, function in module.functions_items() if isinstance(function, tirx.PrimFunc)]
    loops = (loop for function in functions for loop in analysis.walk(function.body, tirx.For))
    if not any(mark in loop.annotations for loop in loops for mark in (matrix.MARK, dot.MARK)):
        return module
    return tvm.transform.Sequential([getattr(s_tir.transform, name)() for name in _COMPACT])(module)


def _rewrite(change: Callable[[tirx.PrimFunc], tirx.PrimFunc]) -> tvm.transform.Pass:
    return tirx.transform.prim_func_pass(lambda function, *_: change(function), opt_level=0, name=change.__name__)


def _on_stack(function: tirx.PrimFunc) -> tirx.PrimFunc:
    def kept(allocated: tirx.AllocBuffer) -> tirx.AllocBuffer:
        tensor = allocated.buffer
        size = math.prod(int(extent) for extent in tensor.shape)
        if tensor.scope() != "local" or size > _STACK_LIMIT:
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
        # TVM's passes change a module in place that nothing else refers to.
        return tvm.transform.Sequential(default_schedules(target))(module.clone())


def for_untuned(target: Target) -> Target:
    """A target for programs without a schedule: LLVM's third level unrolls the loops of a depthwise convolution of
    bytes, sigmoid and all, and takes eighteen seconds for what the second makes in a third of one."""
    if target.kind.name != "llvm" or "opt-level" in target.attrs:
        return target
    return Target({**target.export(), "opt-level": 2})


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
    for block in analysis.leaf_blocks(function):
        try:
            _through_results(schedule, schedule.get_sblock(block.name_hint))
        except ScheduleError:  # it stays as far as it got: any state of a schedule computes the same
            continue
    plain = schedule.mod["main"]
    return tirx.PrimFunc(plain.params, plain.body, plain.ret_type, attrs=function.attrs)


def _through_results(schedule: Schedule, block: SBlockRV) -> None:
    found, loops = schedule.get(block), schedule.get_loops(block)
    spatial, summed = analysis.spatial_axes(found), analysis.reduction_axes(found)
    if len(loops) != len(found.iter_vars) or not spatial:
        return
    *outer, last = [loops[n] for n in spatial]
    sums = [loops[n] for n in summed]
    around = sums and analysis.is_contiguous(found, spatial[-1])
    if around:
        schedule.reorder(*outer, *sums, last)
    if outer:
        schedule.parallel(schedule.fuse(*outer))
    if around:
        schedule.decompose_reduction(block, sums[0])
