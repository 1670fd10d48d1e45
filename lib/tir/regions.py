"""Kernels that follow each other in one parallel region: threads meet between them, and are not called anew.

TVM hands each parallel loop to its other threads by itself, which takes 1.3 us on two cores of a Zen 5, and a kernel
checks its arguments before that; a small network has sixty kernels of 5 to 50 us. So `lib.graph.regions` has kernels
called by a function of calls, a region. Here, when they are lowered already, threads are launched once for all of them:

    launch on all threads:                                  # TVM's pragma_parallel_launch_point
        for thread in parallel(n): a(share of thread); arrive
        wait for all shares of a
        for thread in parallel(n): b(share of thread); arrive
        wait ...

A kernel is compiled once, however many regions call it (`lib.tir.tasks`). What kernels keep between their loops lies in
the same memory in turn: each tensor in an allocation of its own, since a ResNet-50 was 0.93 as fast with one for all of
a kernel's (benchmarks/notes/time.md, "Between the kernels"). What is in no parallel loop one thread does, while the
others wait. They wait for shares, not for threads, so that any number of threads may do them. TVM's own barrier (0.3
us) gives the processor to others at once (`sched_yield`); here a thread looks some hundred times before: 0.05 us.
Source: TVM's CodeGenCPU, `CreateParallelLaunch`; OpenMP's parallel regions.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import tvm
from tvm import tirx

from lib.machine.targets import architecture
from lib.tir import analysis
from lib.tir.anywhere import LINE
from lib.tir.tasks import Kernel, Lowered, calls, sequence

REGION = "family_tuner.region"  # attribute of functions of calls
APART = "family_tuner.apart"  # of kernels that are called by others, too
_LAUNCH = "pragma_parallel_launch_point"
_ZERO = tirx.const(0, "int32")
_THREADS = tirx.Var("threads", "int64")

_LOOKS = 256  # before others may have the processor: some microseconds
_ARRIVE, _WAIT = "family_tuner_arrive", "family_tuner_wait"
_PAUSES = {"x86_64": "pause", "i386": "pause", "aarch64": "yield"}  # by architecture: tells the core that it waits
_MEETING = """
define linkonce_odr i32 @{arrive}(ptr %done) alwaysinline nounwind {{
  %before = atomicrmw add ptr %done, i64 1 release
  ret i32 0
}}
declare i32 @sched_yield()
define linkonce_odr i32 @{wait}(ptr %done, i64 %all) noinline nounwind {{
  br label %look
look:
  %n = phi i32 [ 0, %0 ], [ %next, %again ]
  %seen = load atomic i64, ptr %done acquire, align 8
  %are = icmp sge i64 %seen, %all
  br i1 %are, label %there, label %missing
missing:
  %next = add i32 %n, 1
  %long = icmp sgt i32 %n, {looks}
  br i1 %long, label %others, label %own
own:
  call void asm sideeffect "{pause}", ""()
  br label %again
others:
  %yielded = call i32 @sched_yield()
  br label %again
again:
  br label %look
there:
  ret i32 0
}}
"""


def call(name: str, tensors: Sequence[Any]) -> tirx.Stmt:
    """A call of a kernel in a region, before it is lowered."""
    return calls(name, [tirx.address_of(tirx.BufferLoad(each, [0] * len(each.shape))) for each in tensors])


def insert(module: tvm.IRModule) -> tvm.IRModule:
    """Make regions of functions of calls, between TVM's lowering and its code generation."""
    functions = {str(gvar.name_hint): (gvar, function) for gvar, function in module.functions_items()}
    changed = dict(module.functions_items())
    kernels: dict[str, Kernel] = {}
    for gvar, function in functions.values():
        if REGION in (function.attrs or {}):
            region = Lowered.of(function)
            for name, _ in _calls(region):
                if name not in kernels:
                    own, kernel = functions[name]
                    kernels[name] = Kernel.of(name, kernel)
                    if APART not in kernel.attrs:
                        del changed[own]
            changed[gvar] = region.with_work(_in_region(region, kernels))
    for kernel in kernels.values():
        changed |= {tvm.ir.GlobalVar(name): function for name, function in kernel.functions()}
    return tvm.IRModule(changed, attrs=module.attrs) if kernels else module


def _calls(region: Lowered) -> list[tuple[str, list[Any]]]:
    """The kernels that a region calls, and the memory that it gives them."""
    found = [each.value.args for each in region.statements if isinstance(each, tirx.Evaluate)]
    return [(str(args[0].value), list(args[1:])) for args in found]


def _in_region(region: Lowered, kernels: Mapping[str, Kernel]) -> tirx.Stmt:
    """What a region does."""
    called = [(kernels[name], memory) for name, memory in _calls(region)]
    statements = [each for each in region.statements if not isinstance(each, tirx.Evaluate)]
    for kernel in {kernel.name: kernel for kernel, _ in called}.values():
        statements += kernel.requirements()
    statements.append(tirx.Bind(_THREADS, tirx.Cast("int64", tirx.call_packed("runtime.NumThreads"))))
    sizes = [max(each) for each in zip_longest(*(kernel.needed for kernel, _ in called), fillvalue=0)]
    kept = [tirx.decl_buffer((size,), "uint8", f"kept{n}", data_alignment=LINE) for n, size in enumerate(sizes)]
    statements += map(tirx.AllocBuffer, kept)
    steps = list[tirx.For]()
    for kernel, memory in called:
        memory = [*memory, *map(_begin, kept[: len(kernel.needed)])]
        steps += [_step(kernel, n, memory) for n in range(len(kernel.steps))]
        if not kernel.steps:
            statements += [*_launched(steps), kernel.call(memory)]
            steps = []
    pause = _PAUSES.get(architecture(str(region.function.attrs["target"].attrs.get("mtriple", ""))), "")
    text = _MEETING.format(arrive=_ARRIVE, wait=_WAIT, pause=pause, looks=_LOOKS)
    body = sequence([*statements, *_launched(steps)])
    return tirx.AttrStmt(_ZERO, "pragma_import_llvm", tvm.ir.StringImm(text), body)


def _step(kernel: Kernel, n: int, memory: Sequence[Any]) -> tirx.For:
    """A loop in which each thread does its share of a step: equal ones, as TVM's."""
    loop, thread = kernel.steps[n].loop, tirx.Var("thread", "int64")
    if loop is None:
        return tirx.For(thread, 0, 1, tirx.ForKind.PARALLEL, kernel.call_step(n, memory))
    share = tirx.floordiv(loop.extent + _THREADS - 1, _THREADS)
    begin, end = (
        tirx.Cast(loop.loop_var.ty.dtype, loop.min + tirx.min(loop.extent, at * share)) for at in (thread, thread + 1)
    )
    work = kernel.call_step(n, memory, begin, end)
    return tirx.For(thread, tirx.const(0, "int64"), _THREADS, tirx.ForKind.PARALLEL, work)


def _launched(steps: Sequence[tirx.For]) -> list[tirx.Stmt]:
    """Steps one after the other, with all threads unless one does all of them."""
    if all(map(_is_alone, steps)):
        return [step.body for step in steps]
    if len(steps) == 1:
        return list(steps)
    done = tirx.decl_buffer((LINE // 8,), "int64", "done", data_alignment=LINE)
    statements = list[tirx.Stmt]()
    for n, step in enumerate(steps[:-1], 1):
        alone = sum(map(_is_alone, steps[:n]))
        shares = _THREADS * (n - alone) + alone
        work = sequence([step.body, calls(_ARRIVE, [_begin(done)])])
        statements += [analysis.with_body(step, work), calls(_WAIT, [_begin(done), shares])]
    launched = tirx.AttrStmt(_ZERO, _LAUNCH, _ZERO, sequence([*statements, steps[-1]]))
    return [tirx.AllocBuffer(done), tirx.BufferStore(done, tirx.const(0, "int64"), [0]), launched]


def _is_alone(step: tirx.For) -> bool:
    return isinstance(step.extent, tirx.IntImm)


def _begin(tensor: Any) -> Any:
    return tirx.address_of(tirx.BufferLoad(tensor, [0]))
