"""What an exported program says of its inputs and outputs.

    python -m lib.models.torch_facts FILE

It writes a line of JSON; a file that cannot be read is told on stderr. torch keeps no names of dimensions: those that
are open have its symbols (`s77`). See `file_facts`.
"""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.contracts.errors import ModelError
from lib.models import torch_archive, torch_graph, torch_shapes


def axes(torch: ModuleType, program: Any) -> dict[str, list[str]]:
    """By input: the symbol of each dimension that is one, and empty text for the others."""
    return {
        name: [str(extent) if getattr(extent, "is_Symbol", False) else "" for extent in shape]
        for name, shape in _shapes(torch, program)
    }


def computed(torch: ModuleType, program: Any) -> dict[str, str]:
    """By symbol: an extent of an input that is computed of it."""
    extents = [extent for _, shape in _shapes(torch, program) for extent in shape if not isinstance(extent, int)]
    return {str(symbol): str(extent) for extent in extents if not extent.is_Symbol for symbol in extent.free_symbols}


def _shapes(torch: ModuleType, program: Any) -> list[tuple[str, list[Any]]]:
    """Of inputs: extents are integers, or of SymPy."""
    tensors = ((node.name, value) for node, value in torch_graph.inputs(torch, program))
    return [
        (name, torch_shapes.expressions(torch, value)) for name, value in tensors if isinstance(value, torch.Tensor)
    ]


def outputs(program: Any) -> list[str]:
    """Names of the tensors that it returns, as `torch_outputs.computed` has them."""
    from torch.export.graph_signature import OutputKind, TensorArgument

    specs = program.graph_signature.output_specs
    return [
        spec.arg.name for spec in specs if spec.kind is OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument)
    ]


def main(file: str) -> None:
    """See above."""
    import torch

    program = torch_archive.read(torch, Path(file))
    found = {"axes": axes(torch, program), "outputs": outputs(program), "computed": computed(torch, program)}
    print(json.dumps(found))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ModelError as error:
        sys.exit(str(error))
    except ImportError as error:
        sys.exit(f"{sys.argv[1]} needs torch, which is not installed ({error}): pip install torch")
