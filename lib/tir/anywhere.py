"""Kernels whose tensors may begin anywhere in their memory, at a cache line: see `lib.graph.storage`.

TVM compiles a kernel for tensors without an offset, and has it refuse others.
"""

import tvm
import tvm_ffi
from tvm import tirx

from lib.tir import analysis

LINE = 64  # bytes


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Each tensor that a function takes has an offset that is known when it runs."""
    moved = {param: _moved(param) for param in function.params if isinstance(param.ty, tirx.BufferType)}

    def renamed(variable: tvm.ir.Var) -> tvm.ir.Var:
        return moved.get(variable, variable)

    body = tvm_ffi.structural_map(function.body, (tvm.ir.Var, renamed))
    params = [moved.get(param, param) for param in function.params]
    return tirx.PrimFunc(params, body, function.ret_type, attrs=function.attrs)


def _moved(param: tvm.ir.Var) -> tvm.ir.Var:
    offset = tirx.Var(f"{param.name}_begins", "int64")
    factor = max(1, LINE // analysis.itemsize(param.dtype))
    return tirx.decl_buffer(param.shape, param.dtype, param.name, elem_offset=offset, offset_factor=factor)
