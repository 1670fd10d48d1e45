"""From a fused module and the chosen traces to a library that needs nothing of the tuner."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.relax import transform
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.s_tir import SBlock, SBlockRealize
from tvm.target import Target

from lib.graph import concatenation, fusion, inputs, regions, storage
from lib.graph.rewrite import mutated
from lib.machine import linking
from lib.tir import analysis, lowering
from lib.tir.traces import apply
from lib.tir.workload import as_workload

PACKER = "main_transform_params"  # what TVM calls the function that packs weights: of a tuple of all, to such a tuple

_PACKS = "meta_schedule.layout_rewrite_preproc"  # of a block that TVM's RewriteLayout made
_PACKING = "_weight_prepack"  # how the names of functions end that are such blocks alone
_LINK = ["-Wl,-S"]  # without debug tables, a third of a small library; kernels keep their names
_x = te.placeholder((1,), name="x")
_STUB = te.create_prim_func([_x, te.compute((1,), lambda i: _x[i])])  # stands for functions that a pass must not see


def build(
    module: tvm.IRModule,
    traces: Mapping[str, str],
    target: Target,
    out: Path,
    packing: Path | None = None,
    *,
    together: bool = True,
) -> None:
    """Compile a fused module and export it.

    Args:
        module: As `fusion.fuse` returned it.
        traces: JSON of the trace to apply, by function name; functions without one stay as TVM lowers them.
        out: The library, which must end in `.so` and must not be loaded by this process.
        packing: Gets what packs the weights, as the JSON of a module with `PACKER`: done once (`lib.packing`), never at
            an inference. `main` then takes, in place of the weights, what that returns. None: kernels pack themselves.
        together: On CPUs, kernels that follow each other are called in parallel regions (`lib.graph.regions`); else
            each is called by itself, and can be looked at.
    """
    module = schedule(module, traces)
    target = target if traces else lowering.for_untuned(target)
    if packing:
        module, packs = _apart(module, target)
        packing.write_text(tvm.ir.save_json(packs))
    lowered(module, target, together=together).export_library(str(out), options=_LINK, **linking.for_export(target))


def lowered(module: tvm.IRModule, target: Target, *, together: bool = False) -> relax.VMExecutable:
    """Compile a module of functions of TIR, scheduled or not; `together`: see `build`."""
    stages = lowering.passes(target)
    _views, *to_calls = stages.dataflow_lower_passes(target)  # the first is RewriteDataflowReshape: see `storage.Views`
    plan, *finalize = stages.finalize_passes(target)
    on_cpu = target.kind.name == "llvm"
    # Not MetaScheduleApplyDatabase's lookup nor compile_relax: both miss silently when an attribute differs.
    with target, tvm.transform.PassContext(opt_level=3):
        lower = tvm.transform.Sequential(
            [
                *stages.library_dispatch_passes(target),
                transform.LegalizeOps(),
                *lowering.default_schedules(target),
                storage.Views(),
                *to_calls,
                plan,
                *([storage.Centre()] if on_cpu else []),
                *([regions.Regions()] if on_cpu and together else []),
                *finalize,
            ]
        )
        pipeline = lowering.pipeline(lowering.standard(target.kind.name), is_delivered=True)
        module = transform.DeadCodeElimination()(module)
        return relax.build(module, target, relax_pipeline=lower, tir_pipeline=pipeline)


def _apart(module: tvm.IRModule, target: Target) -> tuple[tvm.IRModule, tvm.IRModule]:
    """A module with weights that are packed already, and what packs them."""
    with target, tvm.transform.PassContext(opt_level=3):
        split = transform.LiftTransformParams()(_packed_once(_packing_split_off(module)))
    parts = []
    for name in (fusion.ENTRY, PACKER):
        others = {fusion.ENTRY, PACKER} - {name}
        own = {gvar: function for gvar, function in split.functions_items() if str(gvar.name_hint) not in others}
        parts.append(transform.DeadCodeElimination([name])(tvm.IRModule(own, attrs=split.attrs)))
    return parts[0], parts[1]


def schedule(module: tvm.IRModule, traces: Mapping[str, str]) -> tvm.IRModule:
    """Apply traces to functions; their attributes stay, as TVM's MetaScheduleApplyDatabase has it.

    Raises:
        KeyError: A trace is given for a function that the module does not have.
    """
    functions = {str(gvar.name_hint): (gvar, function) for gvar, function in module.functions_items()}
    changed = dict(module.functions_items())
    for name, trace in traces.items():
        gvar, function = functions[name]
        scheduled = apply(as_workload(function), trace).mod["main"]
        tuned = tirx.PrimFunc(scheduled.params, scheduled.body, scheduled.ret_type, attrs=function.attrs)
        changed[gvar] = tuned.with_attr("tirx.is_scheduled", True)
    return tvm.IRModule(changed, attrs=module.attrs)


def _packing_split_off(module: tvm.IRModule) -> tvm.IRModule:
    """TVM's SplitLayoutRewritePreproc, which sees no functions that pack nothing: it takes all apart, and fails where
    one has no other block below its root (TVM 0.27; a cumulative sum, say, is one block with loops of its own)."""
    functions = dict(module.functions_items())
    plain = {str(gvar.name_hint): f for gvar, f in functions.items() if isinstance(f, tirx.PrimFunc) and not _packs(f)}
    hidden = {gvar: _STUB if str(gvar.name_hint) in plain else f for gvar, f in functions.items()}
    apart = concatenation.as_arguments(tvm.IRModule(hidden, attrs=module.attrs))  # nor does it know calls in place
    split = transform.SplitLayoutRewritePreproc()(apart)
    shown = {gvar: plain.get(str(gvar.name_hint), f) for gvar, f in split.functions_items()}
    shown |= {gvar: _with_zeros_in_gaps(f) for gvar, f in shown.items() if str(gvar.name_hint).endswith(_PACKING)}
    return concatenation.in_place_again(tvm.IRModule(shown, attrs=split.attrs))


def _packed_once(module: tvm.IRModule) -> tvm.IRModule:
    """A module in which kernels of one kind that read the same weights, as the steps of an LSTM do, or layers that
    share theirs, read the same packed ones: one copy of each, which may stay in a cache from call to call.

    TVM's EliminateCommonSubexpr would also merge equal first parts of two concatenations, which are written in place.
    """
    return transform.CanonicalizeBindings()(mutated(_PackedOnce(module), module))


@mutator
class _PackedOnce(PyExprMutator):
    """Leaves the first of equal calls that pack weights, and of what is read of their results."""

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self._first: dict[tuple[object, ...], relax.Var] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        found = _packing_called(call)
        return call if found is None else self._once((found[0], *found[1]), call)

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> relax.Expr:
        item = self.visit_expr_post_order(item)
        whole = item.tuple_value
        while isinstance(bound := self.lookup_binding(whole), relax.Var):  # an alias of the first
            whole = bound
        if _packing_called(self.lookup_binding(whole)) is None:
            return item
        return self._once((whole, int(item.index)), relax.TupleGetItem(whole, item.index))

    def _once(self, key: tuple[object, ...], value: relax.Expr) -> relax.Var:
        if key not in self._first:
            self._first[key] = self.builder_.emit(value)
        return self._first[key]


def _packing_called(value: relax.Expr | None) -> tuple[tvm.ir.GlobalVar, list[relax.Expr]] | None:
    """The function that an expression packs weights with, and the weights; None if it does something else."""
    found = concatenation.called(value)
    return found if found is not None and str(found[0].name_hint).endswith(_PACKING) else None


def _with_zeros_in_gaps(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Packing that writes zeros first where a layout has places for which the weight has no element: what was in memory
    there would be kept with the weights, and equal ones of several layers, or shapes, would differ."""
    copies = analysis.leaf_blocks(function)
    packed = {analysis.stored(block).buffer: math.prod(analysis.extents(block).values()) for block in copies}
    zeros = [_zeros(tensor) for tensor, n in packed.items() if math.prod(int(extent) for extent in tensor.shape) > n]
    if not zeros:
        return function
    root = function.body.block
    body = tirx.SeqStmt([*zeros, root.body])
    block = SBlock([], [], [], root.name_hint, body, None, root.alloc_buffers, root.match_buffers, root.annotations)
    return function.with_body(SBlockRealize([], True, block))


def _zeros(tensor: Any) -> tirx.Stmt:
    places = [tirx.Var(f"i{n}", "int64") for n in range(len(tensor.shape))]
    loops: tirx.Stmt = tirx.BufferStore(tensor, tirx.const(0, tensor.dtype), places)
    for place, extent in zip(reversed(places), reversed(tensor.shape), strict=True):
        loops = tirx.For(place, tirx.IntImm("int64", 0), extent, tirx.ForKind.SERIAL, loops)
    return loops


def _packs(function: tirx.PrimFunc) -> bool:
    return any(_PACKS in block.annotations for block in analysis.walk(function.body, SBlock))


def outputs(module: tvm.IRModule, names: Sequence[str] = ()) -> list[dict[str, object]]:
    """The tensors that `main` returns, in order: name, shape, dtype.

    Args:
        names: Those of its file, if it is one that names them; else they are `output0` and so on.
    """
    found: list[relax.TensorType] = []

    def collect(value: tvm.ir.Type) -> None:
        for field in value.fields if isinstance(value, tvm.ir.TupleType) else ():
            collect(field)
        if isinstance(value, relax.TensorType):
            found.append(value)

    collect(module[fusion.ENTRY].ret_ty)
    named = names if len(names) == len(found) else [f"output{n}" for n in range(len(found))]
    return [
        {"name": name, "shape": [int(extent) for extent in value.shape.values], "dtype": str(value.dtype)}
        for name, value in zip(named, found, strict=True)
    ]


def interface(module: tvm.IRModule) -> list[dict[str, object]]:
    """The inputs of `main`: name, shape, dtype, what the values stand for, and their bound; see `inputs.Values`.

    `numerics.random_values` makes such values of shape, dtype and bound.
    """
    values = inputs.values(module)
    return [
        {
            "name": str(param.name),
            "shape": [int(extent) for extent in param.ty.shape.values],
            "dtype": str(param.ty.dtype),
            "values": values[str(param.name)].kind,
            "bound": values[str(param.name)].bound,
        }
        for param in fusion.inputs(module)
    ]
