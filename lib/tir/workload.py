"""Workloads: single functions, as MetaSchedule tunes them, with ids that are equal on every platform."""

import ast

import tvm
import tvm_ffi
from tvm import tirx
from tvm_ffi import serialization

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


def load_module(text: str) -> tvm.IRModule:
    """The IRModule that `tvm.ir.save_json` wrote: of a SUBGRAPHS row, or of a whole model.

    `tvm.ir.load_json` parses and writes all of it in Python first, to bring up to date what an older TVM wrote: 0.2 s
    for a transformer, of which loading takes 0.01. What this version wrote needs none of that.
    """
    is_own = text.endswith(f'"metadata":{{"tvm_version":"{tvm.__version__}"}}}}')
    return serialization.from_json_graph_str(text) if is_own else tvm.ir.load_json(text)


def program_hash(module: tvm.IRModule) -> str:
    """TVM's structural hash of a scheduled module: finds equal programs within a run, on one platform."""
    return f"{tvm_ffi.structural_hash(module) & 0xFFFFFFFFFFFFFFFF:016x}"


def as_workload(function: tirx.PrimFunc) -> tvm.IRModule:
    """A module with one function, `main`, as MetaSchedule tunes it and looks it up."""
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
