"""Subgraphs of a fused module: deduplicated, described, and named by what they are."""

import ast
import math
import re
from collections import Counter
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.s_tir.analysis import estimate_tir_flops

from lib import digests, graph, structure
from lib.concatenation import called
from lib.rewrite import is_call


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


def extract(module: tvm.IRModule) -> list[Subgraph]:
    """The distinct TIR functions that `main` calls, those with most FLOP per inference first.

    Like MetaSchedule's `extract_tasks`, but deduplicated by our own id and with what cannot be tuned kept in
    the list, marked: functions of dynamic shape, calls of libraries, and what TVM's runtime computes (NonZero).
    """
    calls = _count_calls(module[graph.ENTRY])
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
    for name, weight in _count_runtime_calls(module[graph.ENTRY]).items():
        merged[name] = _of_runtime(name, weight)
    return sorted(merged.values(), key=lambda s: (-s.flop * s.weight, -s.weight, s.subgraph_id))


def workload_id(module: tvm.IRModule) -> str:
    """Digest of the workload's canonical text: TVMScript with buffers and variables numbered as they appear.

    Block names stay, since traces refer to them. Unlike TVM's structural hash it is equal on every platform.
    """
    tree = ast.parse(module.script(show_meta=False))
    numbers: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.arg = numbers.setdefault(node.arg, f"v{len(numbers)}")
        elif isinstance(node, ast.Name) and node.id not in ("T", "I"):
            node.id = numbers.setdefault(node.id, f"v{len(numbers)}")
    return digests.of_text(ast.unparse(tree))


def load(workload: str) -> tvm.IRModule:
    """The IRModule of a SUBGRAPHS row."""
    return tvm.ir.load_json(workload)


def program_hash(module: tvm.IRModule) -> str:
    """TVM's structural hash of a scheduled module: finds equal programs within a run, on one platform."""
    return f"{tvm_ffi.structural_hash(module) & 0xFFFFFFFFFFFFFFFF:016x}"


def as_workload(function: tirx.PrimFunc) -> tvm.IRModule:
    """A function alone, as `main`, the way MetaSchedule tunes it and looks it up."""
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main")})


def _count_calls(function: relax.Function) -> Counter[str]:
    calls: Counter[str] = Counter()

    def visit(expr: relax.Expr) -> None:
        found = called(expr)
        if found is not None:
            calls[str(found[0].name_hint)] += 1

    relax.analysis.post_order_visit(function, visit)
    return calls


def _count_runtime_calls(function: relax.Function) -> Counter[str]:
    """Functions of the runtime that it calls, by name."""
    calls: Counter[str] = Counter()

    def visit(expr: relax.Expr) -> None:
        if is_call(expr, "relax.call_pure_packed", "relax.call_packed", "relax.call_dps_packed"):
            expr = expr.args[0]
        elif isinstance(expr, relax.Call):
            expr = expr.op
        if isinstance(expr, relax.ExternFunc):
            calls[str(expr.global_symbol)] += 1

    # Of the bindings alone: a visit of all expressions meets the name of a function once for each call as well.
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
    names = structure.operators(module)
    return Subgraph(
        subgraph_id=workload_id(module),
        name=name,
        functions=[name],
        weight=weight,
        flop=float(estimate_tir_flops(module)),
        core_operator=structure.core_operator(names),
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
    """Whether TVM makes a view of it; its own analysis also says so of a slice of the first rows."""
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
    if re.search(r"T\.call_packed|T\.call_extern", function.script()):
        return "it calls a library"
    return ""
