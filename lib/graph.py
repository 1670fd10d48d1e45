"""A model as a graph: from what a frontend gives to fused TIR functions with weights as parameters."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import transform
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.s_tir import Schedule
from tvm.target import Target

from lib import backends, concatenation, structure
from lib.legalize import legalize_ops
from lib.rewrite import value_of

ENTRY = "main"


@dataclass(frozen=True, slots=True)
class Model:
    """A graph whose weights are parameters of `main`, after its inputs.

    `module["main"].attrs["num_input"]` says how many of the parameters are inputs.
    """

    module: tvm.IRModule
    weights: Mapping[str, np.ndarray]  # by parameter name, in parameter order


def lift_constants(module: tvm.IRModule) -> Model:
    """Make parameters of the constants of `main`, so that programs and weights part; scalars stay."""
    lifter = _Lifter()
    function = lifter.visit_expr(module[ENTRY])
    params = [*function.params, *lifter.params]
    lifted = relax.Function(params, function.body, function.ret_ty, function.is_pure, function.attrs)
    lifted = lifted.with_attrs({"num_input": len(function.params), "global_symbol": ENTRY})
    functions = dict(module.functions_items())
    functions = {gvar: lifted if gvar.name_hint == ENTRY else f for gvar, f in functions.items()}
    weights = {str(param.name): value for param, value in zip(lifter.params, lifter.values, strict=True)}
    return Model(tvm.IRModule(functions, attrs=module.attrs), weights)


@mutator
class _Lifter(PyExprMutator):
    def __init__(self) -> None:
        super().__init__()
        self.params: list[relax.Var] = []
        self.values: list[np.ndarray] = []
        self._known: dict[tuple[int, tuple[int, ...]], relax.Var] = {}

    def visit_generic_const_(self, const: tvm.ir.Constant) -> relax.Expr:
        value = value_of(const)
        if value.ndim == 0:
            return const
        address = value.__array_interface__["data"][0]
        if (address, value.shape) in self._known:  # a constant that is read in several places
            return self._known[address, value.shape]
        param = relax.Var(f"weight_{len(self.params)}", const.ty)
        self._known[address, value.shape] = param
        self.params.append(param)
        self.values.append(value)
        return param


def fuse(module: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Operators to TIR functions, fused; parameters after the inputs are marked as free to be packed.

    The marks (`layout_free_buffers`) are part of a workload: what is tuned here fits only modules made here.
    """
    passes = [
        transform.DecomposeOpsForInference(ENTRY),
        transform.EliminateCommonSubexpr(),
        transform.CanonicalizeBindings(),
        *backends.passes(target).library_dispatch_passes(target),
    ]
    with target:
        module = concatenation.place_parts(tvm.transform.Sequential(passes)(module))
        module = tvm.transform.Sequential([legalize_ops(), transform.AnnotateTIROpPattern()])(module)
        module = _without_unknown_rules(module, target)
        module = tvm.transform.Sequential([transform.FuseOps(), transform.FuseTIR(), transform.DeadCodeElimination()])(
            concatenation.mark_patterns(module)
        )
        return transform.AttachAttrLayoutFreeBuffers()(concatenation.write_in_place(module))


def _without_unknown_rules(module: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Take back what TOPI says of how a block is to be scheduled where TVM has no such rule.

    MetaSchedule keeps all other rules from such a block (poolings have names of rules that TVM 0.27 lacks).
    """
    functions = dict(module.functions_items())
    for gvar, function in module.functions_items():
        named = structure.named_rules(function) if isinstance(function, tvm.tirx.PrimFunc) else {}
        unknown = [
            block
            for block, rule in named.items()
            if not any(tvm.get_global_func(f"s_tir.meta_schedule.{key}.{rule}", True) for key in target.keys)
        ]
        if unknown:
            schedule = Schedule(tvm.IRModule({"main": function}), debug_mask="none")
            for block in unknown:
                schedule.unannotate(schedule.get_sblock(block), structure.RULE)
            functions[gvar] = schedule.mod["main"].with_attrs(function.attrs)
    return tvm.IRModule(functions, attrs=module.attrs)


def inputs(module: tvm.IRModule) -> list[relax.Var]:
    """The parameters of `main` that a caller gives at each inference."""
    function = module[ENTRY]
    return list(function.params[: int(function.attrs["num_input"])])


def index_bounds(module: tvm.IRModule) -> dict[str, int]:
    """For each input of `main` that indexes a table (token ids): the smallest extent it indexes.

    Follows an input into the functions that read it, through reshapes and through element-wise functions that
    give integers again (ONNX counts negative ids from the end); `module` must be fused.
    """
    names = {param: str(param.name) for param in inputs(module)}
    bounds: dict[str, int] = {}
    for block in module[ENTRY].body.blocks:
        for binding in block.bindings:
            found = concatenation.called(binding.value)
            if found is None:
                continue
            function = module[found[0]]
            used = structure.index_bounds(function)
            for position, argument in enumerate(found[1]):
                if argument not in names:
                    continue
                if position in used:
                    bounds[names[argument]] = min(used[position], bounds.get(names[argument], used[position]))
                elif relax.analysis.has_reshape_pattern(function) or _same_integers(argument, binding.var):
                    names[binding.var] = names[argument]
    return bounds


def _same_integers(a: relax.Var, b: relax.Var) -> bool:
    """Whether both are integer tensors of one shape."""
    types = [(str(var.ty.dtype), [str(extent) for extent in var.ty.shape.values]) for var in (a, b)]
    return types[0] == types[1] and types[0][0].startswith("int")
