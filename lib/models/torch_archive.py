"""Files of `torch.export.save`: read without unpickling anything but tensors, whatever their writer put into them."""

import json
import logging
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.contracts.errors import ModelError
from lib.models import torch_declared

# Where the program stands in an archive: as torch 2.13 writes it, and as 2.6 did.
_PROGRAM = re.compile(r"(^|/)(models/[^/]+|serialized_exported_program)\.json$")

_OF_TORCHAO = (
    ". Its weights are tensors of kinds that torchao has: before the export, call "
    "torchao.utils.unwrap_tensor_subclass(model)."
)
EXPERTS = "grouped_mm_fallback"  # of transformers, for where torch has no `_grouped_mm` that fits
_declared: list[Any] = []  # declarations last as long as the object that made them


def read(torch: ModuleType, path: Path) -> Any:
    """The `torch.export.ExportedProgram` of a file.

    Raises:
        ModelError: The file is damaged, is no exported program, or holds more than tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_payload(archive, path)
            _register_containers(archive)
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is damaged or was not written by torch.export.save: {error}") from error
    declare_experts(torch)
    torch_declared.declare(torch)
    with _tensors_only(), _empty_calls(torch), _complaints() as complaints:
        try:
            return torch.export.load(path)
        except Exception as error:  # whatever its deserialisers meet, often only logged
            reason = first_line(complaints[0] if complaints else error)
            hint = _OF_TORCHAO if "torchao" in reason else ""
            raise ModelError(f"{path} cannot be read by torch {torch.__version__}: {reason}{hint}") from error


def _check_payload(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse what `torch.export.load` would unpickle without asking, and files of torch that are no programs."""
    names = archive.namelist()
    if not any(_PROGRAM.search(name) for name in names):
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


def declare_experts(torch: ModuleType) -> None:
    """Make an operator known to torch by which transformers multiplies the rows of each expert, if it did not itself.

    It need not be installed to read a file that has it, and a file shall not choose what is imported.
    """
    if _declared or hasattr(torch.ops.transformers, EXPERTS):
        return

    def each(rows: Any, weight: Any, ends: Any) -> Any:
        made, begin = rows.new_zeros(rows.shape[0], weight.shape[2]), 0
        for expert, end in enumerate(ends.tolist()):
            made[begin:end], begin = rows[begin:end] @ weight[expert], end
        return made

    library = torch.library.Library("transformers", "FRAGMENT")
    library.define(f"{EXPERTS}(Tensor input, Tensor weight, Tensor offs) -> Tensor")
    library.impl(EXPERTS, each, "CPU")
    library.impl(EXPERTS, lambda rows, weight, _: rows.new_empty(rows.shape[0], weight.shape[2]), "Meta")
    _declared.append(library)


def _register_containers(archive: zipfile.ZipFile) -> None:
    """Stand-ins for containers that a model takes or returns (a ModelOutput of transformers, say).

    torch wants the package that defines each of them imported; but only their leaves matter here, and a file shall
    not choose what is imported. A real class that is registered later takes the name over.
    """
    from torch.utils import _pytree

    specs = [
        entry["signature"][end]
        for name in archive.namelist()
        if _PROGRAM.search(name)
        for entry in json.loads(archive.read(name))["graph_module"]["module_call_graph"]
        if entry.get("signature")
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


def first_line(error: BaseException) -> str:
    """What torch says first; below it often stands a graph."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _empty_calls(torch: ModuleType) -> Iterator[None]:
    """Calls of subgraphs that nobody reads, as `torch.no_grad()` leaves them, need not say what they give: torch 2.13
    writes nothing of that for a subgraph without results, and refuses to read it."""
    from torch._export import verifier

    check = verifier._check_val

    def checked(node: Any) -> None:
        if node.users or not isinstance(node.target, torch._ops.HigherOrderOperator):
            check(node)

    verifier._check_val = checked
    try:
        yield
    finally:
        verifier._check_val = check


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
