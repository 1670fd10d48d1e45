"""Graphs of exported programs: what callers give, and casts that are put in."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any


def inputs(torch: ModuleType, program: Any) -> Iterator[tuple[Any, Any]]:
    """Placeholders of what a caller gives, but for what the export has fixed, and what stands for their values."""
    from torch.export.graph_signature import ConstantArgument, InputKind

    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT and not isinstance(spec.arg, ConstantArgument):
            yield nodes[spec.arg.name], nodes[spec.arg.name].meta.get("val")


def cast(torch: ModuleType, graph: Any, node: Any, dtype: Any) -> Any:
    """A node that casts another one's value, where the graph is written now."""
    made = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    made.meta["val"] = node.meta["val"].to(dtype)
    return made
