"""From a fused module and the chosen traces to a library that needs nothing of the tuner."""

from collections.abc import Mapping
from pathlib import Path

import tvm
from tvm import relax, tirx
from tvm.relax import transform
from tvm.target import Target

from lib import backends, graph, search, workloads


def build(module: tvm.IRModule, traces: Mapping[str, str], target: Target, out: Path, *, pack: bool) -> None:
    """Compile a fused module and export it.

    Args:
        module: As `graph.fuse` returned it.
        traces: JSON of the trace to apply, by function name; functions without one stay as TVM lowers them.
        pack: Split the packing of weights off into a function of its own, `main_transform_params`, which takes
            the weights and returns what `main` then takes in their place; done once, never at an inference.
        out: The library, which must end in `.so` and must not be loaded by this process.
    """
    module = schedule(module, traces)
    lowering = backends.passes(target)
    # Not MetaScheduleApplyDatabase's lookup nor compile_relax: both miss silently when an attribute differs.
    passes = [transform.SplitLayoutRewritePreproc(), transform.LiftTransformParams()] if pack else []
    with target, tvm.transform.PassContext(opt_level=3):
        module = tvm.transform.Sequential([*passes, transform.DeadCodeElimination()])(module)
        lower = tvm.transform.Sequential(
            [
                *lowering.library_dispatch_passes(target),
                transform.LegalizeOps(),
                *backends.default_schedules(target),
                *lowering.dataflow_lower_passes(target),
                *lowering.finalize_passes(target),
            ]
        )
        pipeline = backends.pipeline(target)
        relax.build(module, target, relax_pipeline=lower, tir_pipeline=pipeline).export_library(str(out))


def schedule(module: tvm.IRModule, traces: Mapping[str, str]) -> tvm.IRModule:
    """Apply traces to functions; their attributes stay, as TVM's MetaScheduleApplyDatabase has it.

    Raises:
        KeyError: A trace is given for a function that the module does not have.
    """
    functions = {str(gvar.name_hint): (gvar, function) for gvar, function in module.functions_items()}
    changed = dict(module.functions_items())
    for name, trace in traces.items():
        gvar, function = functions[name]
        scheduled = search.apply(workloads.as_workload(function), trace).mod["main"]
        tuned = tirx.PrimFunc(scheduled.params, scheduled.body, scheduled.ret_type, attrs=function.attrs)
        changed[gvar] = tuned.with_attr("tirx.is_scheduled", True)
    return tvm.IRModule(changed, attrs=module.attrs)


def interface(module: tvm.IRModule) -> list[dict[str, object]]:
    """The inputs of `main`: name, shape, dtype, and for token ids the exclusive upper bound (else 0)."""
    bounds = graph.index_bounds(module)
    return [
        {
            "name": str(param.name),
            "shape": [int(extent) for extent in param.ty.shape.values],
            "dtype": str(param.ty.dtype),
            "bound": bounds.get(str(param.name), 0),
        }
        for param in graph.inputs(module)
    ]
