"""What TVM 0.27 does wrong when it lowers programs for GPUs, avoided by changes that compute the same.

Each was seen with programs that failed to build, or that nvcc refuses; `tests/lib/tir/test_gpu.py` has them.

- A sum across threads within a loop that is unrolled: `LowerThreadAllreduce` meets the same buffer twice ("Check
  failed: !load_remap_.count(alloc_key)"). So the loop is left to nvcc to unroll.
- Vectors of booleans: the code generator loads `ushort2` where it declares `float2`. So such loops are no vectors.
- Shared memory for halves and then for floats, as tensor cores with sums in float32 need it: `StorageRewrite` gives
  both one buffer of one type, of which the other's pointers are refused ("tvm_access_ptr element type must match the
  source buffer"). So it is left out there; a later pass of TVM puts shared memory that is not needed at the same time
  into one place anyway.
"""

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

from lib.tir import analysis

_UNROLL = "pragma_unroll_explicit"
_NO_REWRITE = {"tirx.disable_storage_rewrite": True}


def repair(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A scheduled program that TVM lowers right, as far as that can be done to the program."""
    sums_across_threads = _sums_across_threads(function)

    def repaired(loop: tirx.For) -> tirx.For:
        kind, annotations = loop.kind, dict(loop.annotations)
        if sums_across_threads and _UNROLL in annotations:
            annotations[_UNROLL] = tirx.IntImm("int32", 0)
        if kind == tirx.ForKind.VECTORIZED and _has_booleans(loop):
            kind = tirx.ForKind.UNROLLED
        if kind == loop.kind and _UNROLL not in annotations:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, kind, loop.body, loop.thread_binding, annotations)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, repaired)))


def lowered_apart(lower: Any) -> tvm.transform.Pass:
    """TVM's pass that lowers programs, with other settings for those that mix types in shared memory."""

    def run(module: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
        functions = dict(module.functions_items())
        mixed = {gvar: f for gvar, f in functions.items() if isinstance(f, tirx.PrimFunc) and _mixes_types(f)}
        if not mixed:
            return lower(module)
        others = {gvar: f for gvar, f in functions.items() if gvar not in mixed}
        found = dict(lower(tvm.IRModule(others, attrs=module.attrs)).functions_items()) if others else {}
        with tvm.transform.PassContext(context.opt_level, config={**dict(context.config), **_NO_REWRITE}):
            found |= dict(lower(tvm.IRModule(mixed, attrs=module.attrs)).functions_items())
        return tvm.IRModule(found, attrs=module.attrs)

    return tvm.transform.module_pass(run, opt_level=0, name="lowered_apart")


def _sums_across_threads(function: tirx.PrimFunc) -> bool:
    for loop in analysis.walk(function.body, tirx.For):
        if loop.thread_binding is None or not str(loop.thread_binding.thread_tag).startswith("threadIdx"):
            continue
        for realize in analysis.walk(loop.body, SBlockRealize):
            for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
                if axis.iter_type == tirx.IterVar.CommReduce and loop.loop_var in analysis.variables([value]):
                    return True
    return False


def _has_booleans(loop: tirx.For) -> bool:
    loaded = [load.ty.dtype for load in analysis.walk(loop.body, tvm.ir.TensorLoad)]
    stored = [store.value.ty.dtype for store in analysis.walk(loop.body, tirx.BufferStore)]
    return "bool" in map(str, [*loaded, *stored])


def _mixes_types(function: tirx.PrimFunc) -> bool:
    buffers = [buffer for block in analysis.walk(function.body, SBlock) for buffer in block.alloc_buffers]
    return len({str(buffer.dtype) for buffer in buffers if buffer.scope() == "shared.dyn"}) > 1
