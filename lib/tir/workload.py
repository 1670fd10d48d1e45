"""Workloads: single functions, as MetaSchedule tunes them, with ids that are equal on every platform."""

import ast

import tvm
import tvm_ffi
from tvm import tirx

from lib.contracts import digests


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


def load_workload(workload: str) -> tvm.IRModule:
    """The IRModule of a SUBGRAPHS row."""
    return tvm.ir.load_json(workload)


def program_hash(module: tvm.IRModule) -> str:
    """TVM's structural hash of a scheduled module: finds equal programs within a run, on one platform."""
    return f"{tvm_ffi.structural_hash(module) & 0xFFFFFFFFFFFFFFFF:016x}"


def as_workload(function: tirx.PrimFunc) -> tvm.IRModule:
    """A module with one function, `main`, as MetaSchedule tunes it and looks it up."""
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
