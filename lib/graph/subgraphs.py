"""Subgraphs of a fused module: deduplicated, and described by the structure of their TIR."""

import math
import re
from collections import Counter
from dataclasses import dataclass

import tvm
from tvm import relax, tirx
from tvm.s_tir.analysis import estimate_tir_flops

from lib.contracts import digests
from lib.graph import fusion
from lib.graph.concatenation import called
from lib.graph.rewrite import is_call
from lib.tir.operators import core_operator, operators
from lib.tir.workload import as_workload, workload_id


@dataclass(frozen=True, slots=True)
class Subgraph:
    """A row of SUBGRAPHS; see there for units."""

    subgraph_id: str
    name: str
    functions: list[str]
    weight: int
    flop: float
    core_operator: str
    operators: list[str]
    tunable: bool
    note: str
    workload: str


def extract_subgraphs(module: tvm.IRModule) -> list[Subgraph]:
    """The distinct TIR functions that `main` calls, those with most FLOP per inference first.

    Like MetaSchedule's `extract_tasks`, but deduplicated by our own id. The list includes what cannot be tuned:
    functions of dynamic shape, calls of libraries, and what TVM's runtime computes (NonZero).
    """
    calls = _count_calls(module[fusion.ENTRY])
    merged: dict[str, Subgraph] = {}
    for gvar, function in sorted(module.functions_items(), key=lambda item: str(item[0].name_hint)):
        name = str(gvar.name_hint)
        if not isinstance(function, tirx.PrimFunc) or not calls[name]:
            continue
        found = _describe(name, function, calls[name])
        known = merged.get(found.subgraph_id)
        if known is not None:
            found = _merge(known, found)
        merged[found.subgraph_id] = found
    for name, weight in _count_runtime_calls(module[fusion.ENTRY]).items():
        merged[name] = _of_runtime(name, weight)
    return sorted(merged.values(), key=lambda s: (-s.flop * s.weight, -s.weight, s.subgraph_id))


def _count_calls(function: relax.Function) -> Counter[str]:
    calls: Counter[str] = Counter()

    def visit(expr: relax.Expr) -> None:
        found = called(expr)
        if found is not None:
            calls[str(found[0].name_hint)] += 1

    relax.analysis.post_order_visit(function, visit)
    return calls


def _count_runtime_calls(function: relax.Function) -> Counter[str]:
    """How often it calls each function of the runtime, by name."""
    calls: Counter[str] = Counter()

    def visit(expr: relax.Expr) -> None:
        if is_call(expr, "relax.call_pure_packed", "relax.call_packed", "relax.call_dps_packed"):
            expr = expr.args[0]
        elif isinstance(expr, relax.Call):
            expr = expr.op
        if isinstance(expr, relax.ExternFunc):
            calls[str(expr.global_symbol)] += 1

    # Bindings alone: a visit of all expressions would count the function's own expression with each call as well.
    for block in function.body.blocks:
        for binding in block.bindings:
            visit(binding.value.value if isinstance(binding, relax.MatchCast) else binding.value)
    return calls


def _of_runtime(name: str, weight: int) -> Subgraph:
    note = "computed by TVM's runtime: the shape of the result depends on the data"
    return Subgraph(digests.of_text(name), name, [], weight, 0.0, "runtime", [name], False, note, "")


def _describe(name: str, function: tirx.PrimFunc, weight: int) -> Subgraph:
    module = as_workload(function)
    note = _untunable(function)
    names = operators(module)
    return Subgraph(
        subgraph_id=workload_id(module),
        name=name,
        functions=[name],
        weight=weight,
        flop=float(estimate_tir_flops(module)),
        core_operator=core_operator(names),
        operators=names,
        tunable=not note,
        note=note,
        workload=tvm.ir.save_json(module),
    )


def _merge(a: Subgraph, b: Subgraph) -> Subgraph:
    functions = a.functions + b.functions
    return Subgraph(
        a.subgraph_id, a.name, functions, a.weight + b.weight, a.flop, a.core_operator, a.operators,
        a.tunable, a.note, a.workload,
    )  # fmt: skip


def _is_reshape(function: tirx.PrimFunc) -> bool:
    """Whether TVM makes a view of its argument; TVM's own analysis says so of a slice of the first rows, too."""
    if not relax.analysis.has_reshape_pattern(function):
        return False
    extents = [getattr(param.ty, "shape", []) for param in function.params]
    sizes = [math.prod(int(n) for n in shape if isinstance(n, tirx.IntImm)) for shape in extents]
    return len(set(sizes)) == 1


def _untunable(function: tirx.PrimFunc) -> str:
    """Why a function cannot be tuned; empty if it can."""
    if _is_reshape(function):
        return "a reshape: a view, no kernel"
    for param in function.params:
        if not all(isinstance(extent, tirx.IntImm) for extent in getattr(param.ty, "shape", [None])):
            return "its shape is not static"
        if any(int(extent) == 0 for extent in param.ty.shape):
            return "a tensor without elements"
    if re.search(r"T\.call_packed|T\.call_extern", function.script()):
        return "it calls a library"
    return ""
