"""Calls of kernels that follow each other become one call of a region: see `lib.tir.regions`.

What a caller of the model gives is checked by the kernels that read it first, which stay apart: a region looks at no
arguments, and all others are of the library's own making.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op

from lib.tir import analysis, regions

# What makes or names tensors, whatever is in them: it can be done before the kernels that a plan of memory has before.
_MAKES = tuple(map(Op.get, ("relax.memory.alloc_storage", "relax.memory.alloc_tensor", "relax.builtin.alloc_tensor")))
_VIEWS = Op.get("relax.reshape")
_PACKED = Op.get("tirx.tvm_call_packed")  # of a function of TVM's runtime, which may raise an error
_MOST = 64  # kernels of a region: TVM's passes go into a function as deep as it has parameters


@tvm.transform.module_pass(opt_level=0, name="Regions")
class Regions:
    """After TVM's StaticPlanBlockMemory."""

    def transform_module(self, module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Functions of Relax whose memory is planned."""
        builder = relax.BlockBuilder(module)
        for gvar, function in module.functions_items():
            if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr):
                n_given = int((function.attrs or {}).get("num_input", len(function.params)))
                blocks = [
                    _Block(builder, module, set(function.params[:n_given])).with_regions(block)
                    for block in function.body.blocks
                ]
                body = relax.SeqExpr(blocks, function.body.body)
                changed = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
                builder.update_func(gvar, changed)
        return _with_marks(builder.get())


@dataclass
class _Block:
    """A block of bindings while regions are made of it."""

    builder: relax.BlockBuilder
    module: tvm.IRModule
    unseen: set[relax.Var]  # given by the caller, and read by no kernel so far
    same: dict[relax.Var, relax.Var] = field(default_factory=dict)  # by other names of tensors: the first
    seen_as: dict[relax.Var, relax.Var] = field(default_factory=dict)  # by views of what is given: that
    bindings: list[relax.Binding] = field(default_factory=list)
    kernels: list[relax.Binding] = field(default_factory=list)  # that are not among them yet

    def with_regions(self, block: relax.BindingBlock) -> relax.BindingBlock:
        for binding in block.bindings:
            self._add(binding)
        self._close()
        return relax.BindingBlock(self.bindings)

    def _add(self, binding: relax.Binding) -> None:
        value, is_kernel = binding.value, self._is_kernel(binding.value)
        if is_kernel:
            given = set(map(self._given, value.args)) & self.unseen
            self.unseen -= given
            if not given:
                self.kernels.append(binding)
                if len(self.kernels) == _MOST:
                    self._close()
                return
        elif isinstance(value, relax.Var):
            self.same[binding.var] = self._first(value)
        if is_kernel or not _is_early(value):
            self._close()
        elif isinstance(value, relax.Call) and value.op == _VIEWS:
            self.seen_as[binding.var] = self._given(value.args[0])
        self.bindings.append(binding)

    def _given(self, tensor: relax.Expr) -> relax.Expr:
        first = self._first(tensor)
        return self.seen_as.get(first, first)

    def _first(self, tensor: relax.Expr) -> relax.Expr:
        return self.same.get(tensor, tensor)

    def _is_kernel(self, value: relax.Expr) -> bool:
        """Whether an expression calls a function in TIR of tensors whose shapes are known, which cannot fail."""
        if not (isinstance(value, relax.Call) and isinstance(value.op, GlobalVar)):
            return False
        function = self.module[value.op]
        if not isinstance(function, tirx.PrimFunc) or not all(map(_has_shape, function.params)):
            return False
        return not any(call.op.same_as(_PACKED) for call in analysis.walk(function.body, tvm.ir.Call))

    def _close(self) -> None:
        """Have the last kernels called together."""
        kernels, self.kernels = self.kernels, []
        if len(kernels) > 1:
            region, given = self._region([binding.value for binding in kernels])
            called = relax.Call(region, given, ret_ty=kernels[-1].value.ty)
            kernels = [relax.VarBinding(kernels[-1].var, called)]
        self.bindings += kernels

    def _region(self, calls: Sequence[relax.Call]) -> tuple[GlobalVar, list[relax.Expr]]:
        """A region and its arguments."""
        tensors: dict[relax.Expr, tirx.Var] = {}
        statements = []
        for call in calls:
            given = list(map(self._first, call.args))
            for tensor, param in zip(given, self.module[call.op].params, strict=True):
                if tensor not in tensors:
                    tensors[tensor] = tirx.decl_buffer(param.shape, param.dtype, f"t{len(tensors)}")
            statements.append(regions.call(call.op.name_hint, [tensors[tensor] for tensor in given]))
        function = tirx.PrimFunc(list(tensors.values()), tirx.SeqStmt(statements))
        function = function.with_attrs({regions.REGION: True, "s_tir": True})
        return self.builder.add_func(function, "region"), list(tensors)


def _with_marks(module: tvm.IRModule) -> tvm.IRModule:
    """A module that says of kernels whether something else than a region calls them."""
    functions = dict(module.functions_items())
    for function in module.functions.values():
        if isinstance(function, relax.Function):
            for gvar in analysis.walk(function.body, GlobalVar):
                if isinstance(functions[gvar], tirx.PrimFunc) and regions.REGION not in functions[gvar].attrs:
                    functions[gvar] = functions[gvar].with_attr(regions.APART, True)
    return tvm.IRModule(functions, attrs=module.attrs)


def _has_shape(param: tirx.Var) -> bool:
    return isinstance(param.ty, tirx.BufferType) and all(isinstance(extent, tirx.IntImm) for extent in param.shape)


def _is_early(value: relax.Expr) -> bool:
    if isinstance(value, relax.Call):
        return value.op in (*_MAKES, _VIEWS)
    return isinstance(value, relax.Var | tvm.ir.Constant | relax.ShapeExpr | relax.Tuple | relax.TupleGetItem)
