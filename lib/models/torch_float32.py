"""Exported programs in float16 or bfloat16 as programs that compute in float32, as `onnx_float32` has it of ONNX files.

Weights are widened, which is exact; inputs and outputs keep their types, with a cast behind and before. What rounds
between operators rounds no longer.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from lib.models.torch_graph import cast, inputs


def widen(torch: ModuleType, program: Any) -> bool:
    """Have a program compute in float32, in place; returns whether anything changed. Of its nodes' values only those of
    inputs and outputs are what they were: others follow when it is decomposed."""
    narrow, tensors = _narrow(torch), (program.state_dict, program.constants)
    values = [*(value for each in tensors for value in each.values()),
              *(node.meta.get("val") for node in program.graph.nodes)]  # fmt: skip
    if not any(_is_narrow(torch, value) for value in values) and not any(
        _names(narrow, node) for node in program.graph.nodes
    ):
        return False
    for each in tensors:
        for name, value in each.items():
            if _is_narrow(torch, value):
                wide = value.float()
                each[name] = torch.nn.Parameter(wide, False) if isinstance(value, torch.nn.Parameter) else wide
    given = {node for node, _ in inputs(torch, program)}
    for node in program.graph.find_nodes(op="placeholder"):  # weights, by whose types operators are promoted
        if node not in given and _is_narrow(torch, node.meta.get("val")):
            node.meta["val"] = node.meta["val"].float()
    graphs = [each for each in program.graph_module.modules() if isinstance(each, torch.fx.GraphModule)]
    for each in graphs:  # also what is called with other settings, as without autocast
        for node in each.graph.nodes:
            if node.op == "call_function":
                node.args, node.kwargs = _widened(torch, narrow, (node.args, node.kwargs))
    _cast_outside(torch, program)
    for each in graphs:
        each.recompile()
    return True


def _narrow(torch: ModuleType) -> tuple[Any, ...]:
    return (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def _is_narrow(torch: ModuleType, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _narrow(torch)


def _names(narrow: Sequence[Any], node: Any) -> bool:
    """Whether an operator is asked for such numbers."""
    return any(value is kind for value in (*node.args, *node.kwargs.values()) for kind in narrow)


def _widened(torch: ModuleType, narrow: Sequence[Any], given: Any) -> Any:
    """Arguments that name float32 where they named a narrow type."""
    from torch.utils import _pytree

    def wide(value: Any) -> Any:
        return torch.float32 if isinstance(value, torch.dtype) and value in narrow else value

    return _pytree.tree_map(wide, given)


def _cast_outside(torch: ModuleType, program: Any) -> None:
    """Inputs are widened, and outputs made narrow again."""
    graph = program.graph
    for node, value in inputs(torch, program):
        if _is_narrow(torch, value):
            users = list(node.users)
            with graph.inserting_after(node):
                wide = cast(torch, graph, node, torch.float32)
            for user in users:
                user.replace_input_with(node, wide)
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = (tuple(_narrow_again(torch, graph, each) for each in output.args[0]),)


def _narrow_again(torch: ModuleType, graph: Any, result: Any) -> Any:
    """What stands for a result of the type that it had."""
    value = result.meta.get("val") if isinstance(result, torch.fx.Node) else None
    if value is None or not _is_narrow(torch, value) or result.op == "placeholder":
        return result
    return cast(torch, graph, result, value.dtype)
