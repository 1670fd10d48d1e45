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


def become_constant(torch: ModuleType, program: Any, node: Any, value: Any) -> None:
    """Have a tensor take a node's place, as a constant of the program."""
    from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

    specs, name = program.graph_signature.input_specs, f"constant_of_{node.name}"
    place = next((n for n, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT), len(specs))
    with program.graph.inserting_before(list(program.graph.nodes)[place]):
        made = program.graph.placeholder(name)
    made.meta["val"] = node.meta["val"].fake_mode.from_tensor(value, static_shapes=True)
    node.replace_all_uses_with(made)
    specs.insert(place, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(made.name), name))
    program.constants[name] = value
