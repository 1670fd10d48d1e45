"""What an exported program computes by torch itself, which a compiled one is compared with."""

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from lib.models import torch_float32


def computed(program: Any, inputs: Iterable[np.ndarray]) -> list[np.ndarray]:
    """The tensors that a `torch.export.ExportedProgram` returns, flat and in order, as `torch_import` has them.

    Operator by operator, as it was exported, but for halves, which are computed with in float32: inputs and results may
    be in containers that nobody here knows.
    """
    import torch
    from torch.export.graph_signature import OutputKind

    torch_float32.widen(torch, program)
    with torch.no_grad():
        found = torch.fx.Interpreter(program.graph_module).run(*_arguments(program, iter(inputs)))
    results = zip(found, program.graph_signature.output_specs, strict=True)
    returned = [value for value, spec in results if spec.kind is OutputKind.USER_OUTPUT]
    return [_array(torch, value) for value in returned if isinstance(value, torch.Tensor)]


def _array(torch: ModuleType, value: Any) -> np.ndarray:
    """A tensor in NumPy, which knows no bf16 of its own."""
    if value.dtype != torch.bfloat16:
        found: np.ndarray = value.numpy(force=True)
        return found
    return value.contiguous().view(torch.uint16).numpy(force=True).view(ml_dtypes.bfloat16)


def _tensor(torch: ModuleType, array: np.ndarray) -> Any:
    """The reverse."""
    if array.dtype != ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(array))
    return torch.from_numpy(np.array(array).view(np.uint16)).view(torch.bfloat16)


def _arguments(program: Any, inputs: Iterator[np.ndarray]) -> Iterator[Any]:
    """What stands for each placeholder of the graph: weights, flags that were fixed by the export, and inputs."""
    import torch
    from torch.export.graph_signature import ConstantArgument, InputKind

    tensors = {**program.state_dict, **program.constants}
    for spec in program.graph_signature.input_specs:
        if isinstance(spec.arg, ConstantArgument):
            yield spec.arg.value
        elif spec.kind is InputKind.USER_INPUT:
            yield _tensor(torch, next(inputs))
        else:
            yield tensors[spec.target]
