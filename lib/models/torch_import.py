"""Files of `torch.export.save` as models: what was read is checked, then translated, with operators kept whole.

torch is imported only when such a file is loaded: it is the extra `torch` of this package.
"""

import gc
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import tvm

from lib.contracts.errors import ModelError, require_file
from lib.graph.fusion import Model, lift_constants
from lib.graph.simplify import channels_last, in_integers, simplify
from lib.models import (
    torch_archive,
    torch_complex,
    torch_experts,
    torch_float32,
    torch_graph,
    torch_halves,
    torch_promotion,
    torch_quantized,
    torch_recurrence,
    torch_shapes,
)
from lib.models.torch_archive import first_line
from lib.models.torch_converters import CONVERTERS, Convert
from lib.models.torch_decompositions import decompositions


def load(
    path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None, *, has_loops: bool = True, lanes: int = 8
) -> Model:
    """Import an exported program; inputs keep their names, tuples and dicts come out flat.

    Weights are never unpickled into anything but tensors, and a file that needs more is refused. Beyond that torch
    vouches for nothing ("never load data from an untrusted source"): it evaluates the symbolic expressions that a
    file holds. So load only files from people whose code you would run.

    Args:
        shapes: Of inputs by name, where the file leaves dimensions open; or extents of these, see `torch_shapes`.
        has_loops: As of ONNX files (`lib.models.onnx_import.load`).
        lanes: Of a vector of the target, for weights that are laid out here (`lib.graph.experts`).

    Raises:
        ModelError: torch is not installed; the file is missing or damaged, has dynamic shapes that `shapes` does
            not settle, was exported in training mode, or uses an operator that TVM does not import. The message says
            which.
    """
    require_file(path)
    with _no_warnings():
        torch = _import_torch(path)
        program = torch_archive.read(torch, path)
        _check_inputs(torch, program, path)
        had_halves = torch_float32.widen(torch, program)
        was_open = torch_shapes.settle(torch, program, shapes or {}, path)
        if not _settle_values(torch, program) and not was_open:
            _check_shapes(torch, program, path)
        _check_weights(torch, program, path)
        program = _decompose(torch, program, path, has_loops=has_loops)
        _check_shapes(torch, program, path)
        _check_state(program, path)
        torch_complex.require_known(program, path)
        narrow = torch_halves.converters(program, lanes) if had_halves and has_loops else {}
        module = _translate(program, path, {**torch_experts.converters(lanes), **narrow})
    del program
    gc.collect()  # graphs of torch are cycles: without this the weights stay in memory beside those cleaned up
    return lift_constants(channels_last(simplify(in_integers(module))))


def _import_torch(path: Path) -> ModuleType:
    try:
        import torch
        import torch.export
    except ImportError as error:
        raise ModelError(
            f"{path} needs torch, which is not installed ({error}). "
            "Install it with `pip install torch`, or with this package: `pip install -e .[torch]`."
        ) from error
    return torch


@contextmanager
def _no_warnings() -> Iterator[None]:
    """What torch warns itself of (a class of its own that it deprecates) is no user's to mend; where warnings are
    errors, it would end the import as the model's fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Checking.


def _check_inputs(torch: ModuleType, program: Any, path: Path) -> None:
    """Inputs are tensors, or flags and the like, which the export has fixed."""
    for node, value in torch_graph.inputs(torch, program):
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"{path}: input {node.name!r} is {value!r}, not a tensor. Export the model without it.")


def _settle_values(torch: ModuleType, program: Any) -> bool:
    """What is computed of constants alone and decides shapes is a constant: numbers that are read out of them, as of
    positions (`positions.max().item()`), and what a mask takes of them, as a graph's edges without loops.

    Returns:
        Whether there is any. Shapes that depend on it follow when the program is decomposed.
    """
    nodes = program.graph.nodes
    if not any(node.target is torch.ops.aten.item.default or _is_open(torch, node) for node in nodes):
        return False
    known = _known(torch, program)
    numbers = {node: value for node, value in known.items() if isinstance(value, (bool, int, float))}
    for user in {user for node in numbers for user in node.users}:
        user.args, user.kwargs = torch.fx.node.map_arg((user.args, user.kwargs), lambda node: numbers.get(node, node))
    masked = [node for node in known if _is_open(torch, node) and not known.keys() >= node.users.keys()]
    for node in masked:
        torch_graph.become_constant(torch, program, node, known[node])
    program.graph.eliminate_dead_code()
    return bool(numbers or masked)


def _check_shapes(torch: ModuleType, program: Any, path: Path) -> None:
    """No operator whose result has as many elements as its values say."""
    for node in program.graph.nodes:
        if _is_open(torch, node):
            raise ModelError(
                f"{path}: the shape of {node.name!r}, which {_operator(node)} makes, depends on its values. "
                "Export a model whose shapes are all fixed."
            )


def _is_open(torch: ModuleType, node: Any) -> bool:
    """Whether a node makes a tensor of a shape that is not known."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(isinstance(extent, torch.SymInt) for extent in value.shape)


def _check_weights(torch: ModuleType, program: Any, path: Path) -> None:
    """What the importer makes products of, in the memory that TVM reads: float32 on the CPU."""
    for name, tensor in {**program.state_dict, **program.constants}.items():
        if tensor.device.type != "cpu":
            raise ModelError(f"{path}: {name!r} is on {tensor.device}. Call model.cpu() before the export.")
        if tensor.dtype.is_floating_point and tensor.dtype != torch.float32:
            raise ModelError(f"{path}: {name!r} is {tensor.dtype}. Call model.float() before the export.")


def _operator(node: Any) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _check_state(program: Any, path: Path) -> None:
    """No inference changes what the next one reads; a decomposed program tells."""
    changed = list(program.graph_signature.buffers_to_mutate.values())
    if changed:
        raise ModelError(
            f"{path}: each inference changes {changed[0]!r}, as in training. Call model.eval() before the export."
        )


# Translating.


def _decompose(torch: ModuleType, program: Any, path: Path, *, has_loops: bool) -> Any:
    """The program in fewer kinds of operators, none of which writes to its arguments."""
    try:
        with torch.no_grad():
            whole = torch_recurrence.kept_whole(torch, program) if has_loops else []
            program = program.run_decompositions(decompositions(torch, whole))
            _drop_checks(torch, program)
            _drop_flags(torch, program)
            torch_promotion.promote(torch, program)
            _fold_constants(torch, program)
            torch_complex.parameters_as_real(torch, program)
            torch_recurrence.with_constants(program)
            _drop_unread(program)
            return program
    except Exception as error:  # torch traces the program, so whatever its operators raise
        raise ModelError(f"{path} cannot be decomposed by torch {torch.__version__}: {first_line(error)}") from error


def _drop_checks(torch: ModuleType, program: Any) -> None:
    """Assertions of what the export has fixed; what only they read goes with them."""
    aten = torch.ops.aten
    checks = {aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten._assert_async.msg,
              aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default}  # fmt: skip
    for node in program.graph.nodes:
        if node.target in checks:
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()


def _drop_flags(torch: ModuleType, program: Any) -> None:
    """Arguments and results that are no tensors (flags, None) were fixed by the export; the importer takes none."""
    from torch.export.graph_signature import ConstantArgument, InputKind

    signature, graph = program.graph_signature, program.graph
    flags = [s for s in signature.input_specs if s.kind is InputKind.USER_INPUT and isinstance(s.arg, ConstantArgument)]
    _drop_inputs(program, flags)
    output = graph.output_node()
    results = zip(output.args[0], signature.output_specs, strict=True)
    tensors = [(value, spec) for value, spec in results if isinstance(value, torch.fx.Node)]
    output.args = (tuple(value for value, _ in tensors),)
    signature.output_specs[:] = [spec for _, spec in tensors]


def _fold_constants(torch: ModuleType, program: Any) -> None:
    """Compute now what depends on buffers alone (positions, causal masks), with torch, whose operators they are.

    What is read afterwards stands in the graph as `get_attr`, of Relax constants: the importer takes them as such.
    Parameters stay out: they are large, and what becomes of them is the clean-up's business.
    """
    graph, known = program.graph, _known(torch, program)
    for node, value in known.items():
        used = any(user not in known for user in node.users)
        if used and isinstance(value, torch.Tensor):
            torch_complex.become_attribute(torch, program, node, value, f"_folded_{node.name}")
    graph.eliminate_dead_code()


def _drop_unread(program: Any) -> None:
    """Weights that nothing reads, as those of a part that these inputs do not reach; some are complex, which the
    importer does not take."""
    from torch.export.graph_signature import InputKind

    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    unread = [spec for spec in program.graph_signature.input_specs
              if spec.kind is not InputKind.USER_INPUT and not nodes[spec.arg.name].users]  # fmt: skip
    _drop_inputs(program, unread)
    for spec in unread:
        program.constants.pop(spec.target, None)  # of which the importer takes all


def _drop_inputs(program: Any, specs: Sequence[Any]) -> None:
    """Inputs of the graph that nothing reads, with what the signature says of them."""
    names = {spec.arg.name for spec in specs}
    for placeholder in program.graph.find_nodes(op="placeholder"):
        if placeholder.name in names:
            program.graph.erase_node(placeholder)
    kept = program.graph_signature.input_specs
    kept[:] = [spec for spec in kept if spec not in specs]


def _known(torch: ModuleType, program: Any) -> dict[Any, Any]:
    """What each node gives that depends on buffers alone, in the order of the graph.

    Nothing is known of a program that writes to its tensors what is not known: others may be views of these. A
    decomposed one writes to none.
    """
    writing = {node for node in program.graph.nodes if node.op == "call_function" and _writes(node)}
    known = {node: value.clone() if writing else value for node, value in _buffers(program).items()}
    for node in program.graph.nodes:
        if node.op == "call_function" and _is_foldable(torch, node, known):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
        elif node in writing and any(source in known for source in node.all_input_nodes):
            return {}
    return known


def _writes(node: Any) -> bool:
    """Whether an operator changes its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _buffers(program: Any) -> dict[Any, Any]:
    """Tensors that are no parameters, by the node that stands for them."""
    signature = program.graph_signature
    names = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    tensors = {**program.state_dict, **program.constants}
    nodes = program.graph.find_nodes(op="placeholder")
    return {node: tensors[names[node.name]] for node in nodes if node.name in names}


def _is_foldable(torch: ModuleType, node: Any, known: Mapping[Any, Any]) -> bool:
    """Whether all is known of a node's inputs, it gives anything, chance plays no part, and nothing is blown up."""
    if node.meta.get("val") is None or not all(source in known for source in node.all_input_nodes):
        return False
    if torch_quantized.is_whole(node):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    expands = node.target is torch.ops.aten.expand.default
    return not expands or known[node.args[0]].numel() == node.meta["val"].numel()


def _translate(program: Any, path: Path, more: Mapping[str, Convert]) -> tvm.IRModule:
    """The program in Relax, with weights as constants that share torch's memory."""
    from tvm.relax.frontend.torch import from_exported_program

    usual = {**CONVERTERS, **more}
    try:
        return from_exported_program(
            program, run_ep_decomposition=False, unwrap_unit_return_tuple=True,
            custom_convert_map={**usual, **torch_complex.converters(usual)},
        )  # fmt: skip
    except Exception as error:  # the importer raises whatever its converters meet
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        if reason.startswith("Unsupported function types"):
            operators = ", ".join(sorted(re.findall(r"'([^']+)'", reason)))
            raise ModelError(f"{path} uses operators that cannot be imported: {operators}.") from error
        raise ModelError(f"{path} cannot be imported: {reason}") from error
