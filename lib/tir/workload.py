"""Workloads: single functions, as MetaSchedule tunes them, with ids that are equal on every platform."""

import ast
import re

import tvm
import tvm_ffi
from tvm import tirx
from tvm_ffi import serialization

from lib.contracts import digests

PART = "part"  # name of a block that takes some channels of an image
_OF_CHANNELS = ("place", PART)  # names of blocks that move channels of a wider image
_SBLOCK = "T.sblock"
_NAME = re.compile(r"(?<![\w.\"])[A-Za-z_]\w*")


def workload_id(module: tvm.IRModule) -> str:
    """Digest of the workload's canonical text: TVMScript with buffers and variables numbered as they appear.

    Block names stay, since traces refer to them. Which of a wider image's channels are read or written is left out:
    programs are the same, and so are their times. Unlike TVM's structural hash it is equal on every platform.
    """
    text = module.script(show_meta=False)
    try:
        tree = _FromTheFirst().visit(ast.parse(text))
    except SyntaxError:  # Python takes 200 parentheses within one another, of which a join of many parts has more
        return digests.of_text(_numbered(text))
    numbers: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.arg = numbers.setdefault(node.arg, f"v{len(numbers)}")
        elif isinstance(node, ast.Name) and node.id not in ("T", "I"):
            node.id = numbers.setdefault(node.id, f"v{len(numbers)}")
    return digests.of_text(ast.unparse(tree))


def _numbered(text: str) -> str:
    """A text with its names numbered as they appear, but for those behind a point."""
    numbers: dict[str, str] = {}
    return _NAME.sub(lambda found: numbers.setdefault(found[0], f"v{len(numbers)}"), text)


class _FromTheFirst(ast.NodeTransformer):
    """Blocks that move channels of a wider image, as if these were its first ones."""

    def visit_With(self, node: ast.With) -> ast.With:
        call = node.items[0].context_expr
        if isinstance(call, ast.Call) and ast.unparse(call.func) == _SBLOCK:
            name = ast.literal_eval(call.args[0])
            if name in _OF_CHANNELS:
                return _WithoutOffsets().visit(node)
        self.generic_visit(node)
        return node


class _WithoutOffsets(ast.NodeTransformer):
    """Sums and differences with a number, without it."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return node.left if isinstance(node.right, ast.Call) else node


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
