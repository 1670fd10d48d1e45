"""Where tensors lie in memory that several of them use: one after the other, or at once, as views."""

import math

import tvm
from tvm import relax, te, tirx
from tvm.ir import Op
from tvm.relax import transform

from lib.graph.concatenation import called
from lib.graph.rewrite import is_call
from lib.tir import analysis, anywhere

_ALLOC_STORAGE, _ALLOC_TENSOR = Op.get("relax.memory.alloc_storage"), Op.get("relax.memory.alloc_tensor")


@tvm.transform.module_pass(opt_level=0, name="Views")
class Views:
    """TVM's RewriteDataflowReshape, by which what a reshape returns is a view of what it reads, but never a tensor that
    others write into.

    TVM 0.27 knows a reshape by a function that writes each element where it read it, if it says so of all that it
    writes, not of all that there is. So has the first part of a concatenation that is a slice of a tensor with as many
    channels as the whole, at the same ones: as a view it had the other parts written into the tensor that it is of.
    """

    def transform_module(self, module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Functions of Relax in dataflow form, and those in TIR that they call."""
        makers = {gvar: module[gvar] for gvar in _of_own_memory(module)}
        own = {gvar: function for gvar, function in makers.items() if len(function.params) > 1}  # others read nothing
        module = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
        for gvar, function in own.items():
            module[gvar] = _no_reshape(len(function.params))
        module = transform.RewriteDataflowReshape()(module)
        for gvar, function in own.items():
            module[gvar] = function
        return module


def _no_reshape(n_parameters: int) -> tirx.PrimFunc:
    """Stands for a function that TVM may not see; the pass looks at all of its parameters."""
    given = [te.placeholder((1,), name=f"x{n}") for n in range(n_parameters - 1)]
    return te.create_prim_func([*given, te.compute((1,), lambda i: -given[0][i])])


def _of_own_memory(module: tvm.IRModule) -> set[tvm.ir.GlobalVar]:
    """Functions in TIR whose results calls in place write into."""
    found = set()
    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            values = {binding.var: binding.value for block in function.body.blocks for binding in block.bindings}
            for call in values.values():
                if is_call(call, "relax.call_tir_inplace"):
                    targets = (call.args[1].fields[int(n)] for n in call.attrs.inplace_indices if int(n) >= 0)
                    makers = (called(values[target]) for target in targets if target in values)
                    found |= {maker[0] for maker in makers if maker}
    return found


@tvm.transform.module_pass(opt_level=0, name="Centre")
class Centre:
    """After TVM's StaticPlanBlockMemory, which lets all tensors begin where their storage does:
    they lie in its middle.

    Of two threads, the first writes the first half of a tensor, as a rule, whatever the kernel. So each half of a
    storage stays one thread's. Where all tensors begin at the same place, the second half of a small one lies where the
    first thread wrote a larger one before, and each of its lines is taken from the other core's cache, in which it was
    changed: that is slow where cores share no last-level cache (dies, sockets). See benchmarks/notes/time.md, "Cores
    without a common cache".
    """

    def transform_module(self, module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Functions of Relax with a plan of their memory in their blocks."""
        for gvar, function in module.functions_items():
            if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr):
                blocks = [_centred(block) for block in function.body.blocks]
                body = relax.SeqExpr(blocks, function.body.body)
                module[gvar] = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
        return module


def _centred(block: relax.BindingBlock) -> relax.BindingBlock:
    sizes = {each.var: int(each.value.args[0].values[0]) for each in block.bindings if _calls(each, _ALLOC_STORAGE)}

    def centred(binding: relax.Binding) -> relax.Binding:
        if not _calls(binding, _ALLOC_TENSOR) or binding.value.args[0] not in sizes:
            return binding
        call = binding.value
        storage, _, *what = call.args
        offset = (sizes[storage] - _bytes(binding.var.ty)) // 2 // anywhere.LINE * anywhere.LINE
        args = [storage, tvm.tirx.IntImm("int64", offset), *what]
        return relax.VarBinding(binding.var, tvm.ir.Call(call.op, args, call.attrs, call.ty_args, ret_ty=call.ty))

    return relax.BindingBlock([centred(each) for each in block.bindings])


def _calls(binding: relax.Binding, op: Op) -> bool:
    return isinstance(binding.value, tvm.ir.Call) and binding.value.op == op


def _bytes(tensor: relax.TensorType) -> int:
    return math.prod(int(extent) for extent in tensor.shape.values) * analysis.itemsize(tensor.dtype)
