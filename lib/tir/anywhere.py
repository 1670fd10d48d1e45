"""Kernels whose tensors may begin anywhere in their memory, at a cache line: see `lib.graph.storage`.

TVM compiles a kernel for tensors without an offset, and has it refuse others.
"""

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Op

from lib.tir import analysis

LINE = 64  # bytes

_TENSOR, _MEMORY = Op.get("tirx.tvm_stack_make_array"), Op.get("tirx.buffer_data")


def insert(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Each tensor that a function takes has an offset that is known when it runs."""
    moved = {param: _moved(param) for param in function.params if isinstance(param.ty, tirx.BufferType)}

    def renamed(variable: tvm.ir.Var) -> tvm.ir.Var:
        return moved.get(variable, variable)

    body = tvm_ffi.structural_map(function.body, [(tvm.ir.Var, renamed), (tvm.ir.Call, _where_it_begins)])
    params = [moved.get(param, param) for param in function.params]
    return tirx.PrimFunc(params, body, function.ret_type, attrs=function.attrs)


def _moved(param: tvm.ir.Var) -> tvm.ir.Var:
    offset = tirx.Var(f"{param.name}_begins", "int64")
    factor = max(1, LINE // analysis.itemsize(param.dtype))
    return tirx.decl_buffer(param.shape, param.dtype, param.name, elem_offset=offset, offset_factor=factor)


def _where_it_begins(call: tvm.ir.Call) -> tvm.ir.Expr:
    """A tensor that is given to a function of TVM's runtime, which sorts, say. It gets a pointer to the memory, and an
    offset of zero; TVM's functions would pay no regard to another one."""
    if call.op != _TENSOR:
        return call
    memory, *others = call.args
    if not isinstance(memory, tvm.ir.Call) or memory.op != _MEMORY:
        return call
    [tensor] = memory.args
    first = tirx.address_of(tirx.BufferLoad(tensor, [0] * len(tensor.ty.shape)))
    return tvm.ir.Call(call.op, [first, *others], call.attrs, call.ty_args, ret_ty=call.ty)
