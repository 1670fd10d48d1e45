"""Files of `torch.export.save` as models: read without unpickling, checked, with operators kept as torch wrote them.

torch is imported only here, and only when such a file is loaded: it is the extra `torch` of this package.
"""

import gc
import json
import logging
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tvm
from tvm import relax

from lib.errors import ModelError, require_file
from lib.graph import Model, lift_constants
from lib.simplify import channels_last, simplify


def load(path: Path) -> Model:
    """Import an exported program with static shapes; inputs keep their names, tuples and dicts come out flat.

    Weights are never unpickled into anything but tensors, and a file that needs more is refused. Beyond that torch
    vouches for nothing ("never load data from an untrusted source"): it evaluates the symbolic expressions that a
    file holds. So load only files from people whose code you would run.

    Raises:
        ModelError: torch is not installed; the file is missing or damaged, has dynamic shapes, was exported in
            training mode, or uses an operator that TVM does not import. The message says which.
    """
    require_file(path)
    torch = _import_torch(path)
    program = _read(torch, path)
    _check_inputs(torch, program, path)
    _check_shapes(torch, program, path)
    _check_weights(torch, program, path)
    program = _decompose(torch, program, path)
    _check_state(program, path)
    module = _translate(program, path)
    del program
    gc.collect()  # graphs of torch are cycles: without this the weights stay in memory beside those cleaned up
    return lift_constants(channels_last(simplify(module)))


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


# Reading.


def _read(torch: ModuleType, path: Path) -> Any:
    """The `torch.export.ExportedProgram` of a file."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check_payload(archive, path)
            _register_containers(archive)
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is damaged or was not written by torch.export.save: {error}") from error
    with _tensors_only(), _complaints() as complaints:
        try:
            return torch.export.load(path)
        except Exception as error:  # whatever its deserialisers meet, often only logged
            reason = _line(complaints[0] if complaints else error, 0)
            raise ModelError(f"{path} cannot be read by torch {torch.__version__}: {reason}") from error


def _check_payload(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse what `torch.export.load` would unpickle without asking, and files of torch that are no programs."""
    names = archive.namelist()
    if not any(re.search(r"(^|/)(models/[^/]+|serialized_exported_program)\.json$", name) for name in names):
        raise ModelError(
            f"{path} holds no exported program: it is a state dict or a TorchScript, or damaged. "
            "Write it with torch.export.save(torch.export.export(model.eval(), inputs), path)."
        )
    objects = [name for name in names if re.search(r"/constants/(custom|opaque)_obj", name)]
    if objects:
        raise ModelError(
            f"{path} holds the pickled object {objects[0]!r}, which could run any code when loaded. "
            "Export a model whose constants are tensors."
        )


def _register_containers(archive: zipfile.ZipFile) -> None:
    """Stand-ins for containers that a model takes or returns (a ModelOutput of transformers, say).

    torch wants the package that defines each of them imported; but only their leaves matter here, and a file shall
    not choose what is imported. A real class that is registered later takes the name over.
    """
    from torch.utils import _pytree

    specs = [
        entry["signature"][end]
        for name in archive.namelist()
        if re.search(r"(^|/)models/[^/]+\.json$", name)
        for entry in json.loads(archive.read(name))["graph_module"]["module_call_graph"]
        if entry["signature"]
        for end in ("in_spec", "out_spec")
    ]
    found = {name for spec in specs for name in _container_names(json.loads(spec)[1])}
    for name in found - set(_pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE):
        _register(type(name.rpartition(".")[2], (_Container,), {}), name)


class _Container:
    def __init__(self, leaves: Any, context: Any) -> None:
        self.leaves = list(leaves)
        self.context = context


def _register(stand_in: type[_Container], name: str) -> None:
    from torch.utils import _pytree

    _pytree.register_pytree_node(
        stand_in,
        lambda container: (container.leaves, container.context),
        stand_in,
        serialized_type_name=name,
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda context: context,
    )


def _container_names(spec: dict[str, Any]) -> Iterator[str]:
    if spec["type"] is not None:
        yield spec["type"]
    for child in spec["children_spec"]:
        yield from _container_names(child)


@contextmanager
def _tensors_only() -> Iterator[None]:
    """Every `torch.load` below, also those that ask for more, unpickles nothing but tensors."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _complaints() -> Iterator[list[BaseException]]:
    """Errors that torch.export logs before it raises one that says less; they are not printed."""
    errors: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1]:
            errors.append(record.exc_info[1])
        return False

    loggers = [logging.getLogger("torch.export"), logging.getLogger("torch._export.serde.serialize")]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield errors
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


# Checking.


def _check_inputs(torch: ModuleType, program: Any, path: Path) -> None:
    """Inputs are tensors of fixed shapes, or flags and the like, which are fixed altogether."""
    from torch.export.graph_signature import ConstantArgument, InputKind

    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT or isinstance(spec.arg, ConstantArgument):
            continue
        name, value = spec.arg.name, values.get(spec.arg.name)
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"{path}: input {name!r} is {value!r}, not a tensor. Export the model without it.")
        dynamic = [axis for axis, extent in enumerate(value.shape) if isinstance(extent, torch.SymInt)]
        if dynamic:
            shape = ", ".join(str(extent) for extent in value.shape)
            raise ModelError(
                f"{path}: input {name!r} has the dynamic shape ({shape}): dimension {dynamic[0]} is not fixed. "
                "Call torch.export.export without `dynamic_shapes`, on inputs of the size to tune for."
            )


def _check_shapes(torch: ModuleType, program: Any, path: Path) -> None:
    """No operator whose result has as many elements as its values say."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(isinstance(extent, torch.SymInt) for extent in value.shape):
            raise ModelError(
                f"{path}: the shape of {node.name!r}, which {_operator(node)} makes, depends on its values. "
                "Export a model whose shapes are all fixed."
            )


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


def _decompose(torch: ModuleType, program: Any, path: Path) -> Any:
    """The program in fewer kinds of operators, none of which writes to its arguments."""
    try:
        with torch.no_grad():
            program = program.run_decompositions(_decompositions(torch))
            _drop_flags(torch, program)
            _fold_constants(torch, program)
            return program
    except Exception as error:  # torch traces the program, so whatever its operators raise
        raise ModelError(f"{path} cannot be decomposed by torch {torch.__version__}: {_line(error, 0)}") from error


def _drop_flags(torch: ModuleType, program: Any) -> None:
    """Arguments and results that are no tensors (flags, None) were fixed by the export; the importer takes none."""
    from torch.export.graph_signature import ConstantArgument, InputKind

    signature, graph = program.graph_signature, program.graph
    flags = [s for s in signature.input_specs if s.kind is InputKind.USER_INPUT and isinstance(s.arg, ConstantArgument)]
    for placeholder in graph.find_nodes(op="placeholder"):
        if placeholder.name in [flag.arg.name for flag in flags]:
            graph.erase_node(placeholder)
    signature.input_specs[:] = [spec for spec in signature.input_specs if spec not in flags]
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
    graph, known = program.graph, _buffers(program)
    for node in graph.nodes:
        if node.op == "call_function" and _is_foldable(torch, node, known):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    for node, value in known.items():
        used = any(user not in known for user in node.users)
        if used and isinstance(value, torch.Tensor):
            name = f"_folded_{node.name}"
            setattr(program.graph_module, name, relax.const(value.numpy(force=True)))
            with graph.inserting_before(node):
                folded = graph.create_node("get_attr", name)
            folded.meta = dict(node.meta)
            node.replace_all_uses_with(folded)
    graph.eliminate_dead_code()


def _buffers(program: Any) -> dict[Any, Any]:
    """Tensors that are no parameters, by the node that stands for them."""
    signature = program.graph_signature
    names = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    tensors = {**program.state_dict, **program.constants}
    nodes = program.graph.find_nodes(op="placeholder")
    return {node: tensors[names[node.name]] for node in nodes if node.name in names}


def _is_foldable(torch: ModuleType, node: Any, known: Mapping[Any, Any]) -> bool:
    """Whether all is known of a node's inputs, chance plays no part, and nothing is blown up."""
    if not all(source in known for source in node.all_input_nodes):
        return False
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    expands = node.target is torch.ops.aten.expand.default
    return not expands or known[node.args[0]].numel() == node.meta["val"].numel()


def _translate(program: Any, path: Path) -> tvm.IRModule:
    """The program in Relax, with weights as constants that share torch's memory."""
    from tvm.relax.frontend.torch import from_exported_program

    try:
        return from_exported_program(
            program, run_ep_decomposition=False, unwrap_unit_return_tuple=True, custom_convert_map=_CONVERTERS
        )
    except Exception as error:  # the importer raises whatever its converters meet
        reason = _line(error, -1)
        if reason.startswith("Unsupported function types"):
            operators = ", ".join(sorted(re.findall(r"'([^']+)'", reason)))
            raise ModelError(f"{path} uses operators that cannot be imported: {operators}.") from error
        raise ModelError(f"{path} cannot be imported: {reason}") from error


def _line(error: BaseException, number: int) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[number]


def _decompositions(torch: ModuleType) -> Any:
    """How operators are taken apart: as torch does it, but products stay whole.

    torch makes `addmm` of linear layers and `bmm` of batched products, in reshapes and expansions.
    """
    aten = torch.ops.aten
    table = torch.export.default_decompositions()
    for operator in (aten.linear.default, aten.matmul.default):
        table.pop(operator, None)
    table[aten.scaled_dot_product_attention.default] = _attention
    return table


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """scaled_dot_product_attention in four operators; torch's own decomposition scans all scores for masked rows.

    Args:
        query: `... x n x d`; key and value are `... x m x d`, of fewer heads if `enable_gqa`.
        attn_mask: Broadcasts to `... x n x m`; where it is False, or adds -inf, nothing is read.

    A row that may read nothing gives zeros, as in torch.
    """
    import torch

    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    scores = (query @ key.transpose(-2, -1)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if attn_mask is None:
        return scores.softmax(-1) @ value
    readable = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -math.inf
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
    result = (scores + attn_mask).softmax(-1) @ value
    return result if is_causal else torch.where(readable.any(-1, keepdim=True), result, 0.0)


# What TVM 0.27's importer writes wrongly, or in a way that costs.


def _embedding(node: Any, importer: Any) -> relax.Var:
    """A plain gather by the ids as they come; the importer casts, flattens and restores them."""
    table, ids = (importer.env[argument] for argument in node.args[:2])
    return importer.block_builder.emit(relax.op.take(table, ids, axis=0, mode="clip"))


def _index(node: Any, importer: Any) -> relax.Var:
    """To read every element once, in order (as the masks of transformers are read), is to reshape."""
    x, indices = importer.env[node.args[0]], [importer.env.get(index) for index in node.args[1]]
    if all(isinstance(index, tvm.ir.Constant) for index in indices):
        numbers = np.arange(math.prod(node.args[0].meta["val"].shape)).reshape(node.args[0].meta["val"].shape)
        read = numbers[tuple(index.value.numpy() for index in indices)]
        if np.array_equal(read.ravel(), numbers.ravel()):
            return importer.block_builder.emit(relax.op.reshape(x, read.shape))
    return importer._index_tensor(node)


def _select(node: Any, importer: Any) -> relax.Var:
    """A slice without its axis; the importer gathers by a constant index."""
    x = importer.env[node.args[0]]
    axis, index = node.args[1] % x.ty.ndim, node.args[2] % int(x.ty.shape[node.args[1]])
    part = relax.op.strided_slice(x, [axis], [index], [index + 1])
    return importer.block_builder.emit(relax.op.squeeze(importer.block_builder.emit(part), [axis]))


def _cumsum(node: Any, importer: Any) -> relax.Var:
    """Sums of booleans and small integers are int64 in torch; the importer keeps their type."""
    x = importer.env[node.args[0]]
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    if str(x.ty.dtype) != dtype:
        x = importer.block_builder.emit(relax.op.astype(x, dtype))
    return importer.block_builder.emit(relax.op.cumsum(x, axis=node.args[1]))


def _permute(node: Any, importer: Any) -> relax.Var:
    """Axes counted from the start: ConvertLayout takes no others."""
    x = importer.env[node.args[0]]
    return importer.block_builder.emit(relax.op.permute_dims(x, [axis % x.ty.ndim for axis in node.args[1]]))


def _squeeze(node: Any, importer: Any) -> relax.Var:
    """Axes counted from the start (ConvertLayout crashes on others), and only those of extent 1, as torch has it."""
    x = importer.env[node.args[0]]
    axes = {axis % x.ty.ndim for axis in np.atleast_1d(node.args[1]).tolist()}
    kept = sorted(axis for axis in axes if int(x.ty.shape[axis]) == 1)
    return importer.block_builder.emit(relax.op.squeeze(x, kept)) if kept else x


_CONVERTERS: dict[str, Callable[[Any, Any], relax.Var]] = {
    "cumsum.default": _cumsum,
    "embedding.default": _embedding,
    "index.Tensor": _index,
    "permute.default": _permute,
    "select.int": _select,
    "squeeze.dim": _squeeze,
    "squeeze.dims": _squeeze,
}
