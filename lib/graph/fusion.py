"""Models: from what a frontend gives to fused TIR functions, with weights as parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import transform
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.s_tir import Schedule
from tvm.target import Target

from lib.graph import (
    byte_units,
    casts,
    concatenation,
    enlarging,
    few_bits,
    fused_layers,
    gates,
    halts,
    padding,
    parts,
    patterns,
    recurrence,
    running,
    scatter,
    selection,
    small_weights,
)
from lib.graph.legalize import legalize_ops
from lib.graph.rewrite import Rule, rewrite, value_of
from lib.machine.registers import registers
from lib.tir import analysis, lowering
from lib.tir.parameters import LAYOUT_FREE, weight_positions

ENTRY = "main"
SCHEDULE_RULE = "schedule_rule"  # annotation in which TOPI names the rule to schedule a block with


@dataclass(frozen=True, slots=True)
class Model:
    """A Relax module whose weights are parameters of `main`, after its inputs.

    `module["main"].attrs["num_input"]` says how many of the parameters are inputs.
    """

    module: tvm.IRModule
    weights: Mapping[str, np.ndarray]  # by parameter name, in parameter order


def lift_constants(module: tvm.IRModule) -> Model:
    """Make parameters of the constants of `main`, so that kernels do not depend on weights; scalars stay."""
    lifter = _Lifter()
    function = lifter.visit_expr(module[ENTRY])
    params = [*function.params, *lifter.params]
    lifted = relax.Function(params, function.body, function.ret_ty, function.is_pure, function.attrs)
    lifted = lifted.with_attrs({"num_input": len(function.params), "global_symbol": ENTRY})
    functions = dict(module.functions_items())
    functions = {gvar: lifted if gvar.name_hint == ENTRY else f for gvar, f in functions.items()}
    weights = {str(param.name): value for param, value in zip(lifter.params, lifter.values, strict=True)}
    return Model(tvm.IRModule(functions, attrs=module.attrs), weights)


def rewritten(model: Model, rules: Sequence[Rule]) -> Model:
    """The model after rules; the same model if none applies."""
    module = rewrite(model.module, rules)
    return model if tvm_ffi.structural_equal(module, model.module) else Model(module, model.weights)


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
    """Lower operators to TIR functions, and fuse them; weights are marked as free to be packed.

    The marks (`layout_free_buffers`) are part of a workload: traces that were tuned here fit only modules made here.
    """
    passes = [
        transform.DecomposeOpsForInference(ENTRY),
        transform.EliminateCommonSubexpr(),
        transform.CanonicalizeBindings(),
        *lowering.passes(target).library_dispatch_passes(target),
    ]
    with target:
        if target.kind.name == "llvm":  # before TVM's passes sort
            module = running.in_lines(scatter.in_rows(selection.in_vectors(module), target), target)
        module = byte_units.chosen(few_bits.in_programs(recurrence.in_programs(module)), target)
        module = padding.into_convolutions(casts.by_readers(tvm.transform.Sequential(passes)(module)))
        module = parts.read_in_place(concatenation.place_parts(module))
        module = halts.placed(gates.apart(enlarging.summed(enlarging.by_lines(module))))
        module = tvm.transform.Sequential([legalize_ops(), transform.AnnotateTIROpPattern()])(module)
        module = small_weights.marked(_without_unknown_rules(module, target))
        module = transform.FuseOps()(patterns.apply_marks(module))
        if target.kind.name == "llvm":
            module = fused_layers.joined(module, registers(target).lanes)
        module = tvm.transform.Sequential([transform.FuseTIR(), transform.DeadCodeElimination()])(module)
        module = halts.taken_away(module)
        module = transform.AttachAttrLayoutFreeBuffers()(module)  # it does not know calls in place
        return _with_indices_as_they_are(concatenation.write_in_place(module))


def _with_indices_as_they_are(module: tvm.IRModule) -> tvm.IRModule:
    """Take the mark from weights that are indices, or tables of bytes: nothing is gained by packing them.

    And for those of a vectorised `gather_nd`, TVM 0.27 makes layouts in which several elements have one place.
    """
    functions = dict(module.functions_items())
    for gvar, function in module.functions_items():
        marked = weight_positions(function) if isinstance(function, tvm.tirx.PrimFunc) else []
        kept = [n for n in marked if str(function.params[n].ty.dtype) not in ("int32", "int64", "uint8")]
        if kept != marked:
            bare = function.without_attr(LAYOUT_FREE)
            functions[gvar] = bare.with_attr(LAYOUT_FREE, kept) if kept else bare
    return tvm.IRModule(functions, attrs=module.attrs)


def _without_unknown_rules(module: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Drop the names of schedule rules that TVM does not have.

    MetaSchedule applies no other rule to a block that names one (poolings name rules that TVM 0.27 lacks).
    """
    functions = dict(module.functions_items())
    for gvar, function in module.functions_items():
        named = schedule_rules(function) if isinstance(function, tvm.tirx.PrimFunc) else {}
        unknown = [
            block
            for block, rule in named.items()
            if not any(tvm.get_global_func(f"s_tir.meta_schedule.{key}.{rule}", True) for key in target.keys)
        ]
        if unknown:
            schedule = Schedule(tvm.IRModule({"main": function}), debug_mask="none")
            for block in unknown:
                schedule.unannotate(schedule.get_sblock(block), SCHEDULE_RULE)
            functions[gvar] = schedule.mod["main"].with_attrs(function.attrs)
    return tvm.IRModule(functions, attrs=module.attrs)


def schedule_rules(function: tvm.tirx.PrimFunc) -> dict[str, str]:
    """The rule that TOPI names for each block; its name `None`, which stands for no schedule, is left out."""
    found = {str(block.name_hint): block.annotations.get(SCHEDULE_RULE) for block in analysis.leaf_blocks(function)}
    return {block: str(rule) for block, rule in found.items() if rule is not None and str(rule) != "None"}


def inputs(module: tvm.IRModule) -> list[relax.Var]:
    """The parameters of `main` that a caller gives at each inference."""
    function = module[ENTRY]
    return list(function.params[: int(function.attrs["num_input"])])
