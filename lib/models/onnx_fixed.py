"""Inputs that always have the same value, as constants of a file: what depends on them is decided before it is tuned.

A merged decoder has an input that says whether its cache holds anything (`use_cache_branch`), a detector of voices one
for the rate of its samples, a segmenter one for the size of the image that its masks are scaled to. Branches and shapes
that depend on such an input cannot be compiled; those that depend on a constant are none.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lib.contracts import digests
from lib.contracts.errors import ModelError, require_file
from lib.models import onnx_import, onnx_saving

_WORD = re.compile(r"(?P<name>[^=]+)=(?P<value>[^=]+)")
_LOGICAL = {"true": True, "false": False}
_EXPECTED = "expected NAME=VALUE, with numbers (`sizes=480,640`), `true`, `false`, or the path of a .npy file"


def parse(text: str) -> dict[str, str]:
    """`use_cache_branch=true sizes=480,640` by name.

    Raises:
        ModelError: It is written in another way.
    """
    found = {}
    for word in text.split():
        match = _WORD.fullmatch(word)
        if not match or match["name"] in found:
            raise ModelError(f"--fix {word!r}: {_EXPECTED}, each input once (several in quotes, separated by spaces).")
        found[match["name"]] = match["value"]
    return found


def fixed(path: Path, text: str, folder: Path) -> Path:
    """The file without these inputs, in a folder; made if it is not there of the same file and values.

    Args:
        text: As `--fix` has it.

    Raises:
        ModelError: The file cannot be read, has no such input, or the input takes no such value.
    """
    values = parse(text)
    arrays = [Path(value) for value in values.values() if value.endswith(".npy")]
    for array in arrays:
        require_file(str(array), "--fix")
    made_from = digests.of_text(digests.of_state(path), text, *map(digests.of_state, arrays))
    out = folder / f"{path.stem}-{made_from[:8]}" / path.name
    if not out.exists():
        proto = onnx_import.read(path)
        _fix(proto.graph, values, path)
        onnx_saving.save_all({path.name: proto}, out.parent)
    return out


def _fix(graph: onnx.GraphProto, values: Mapping[str, str], path: Path) -> None:
    weights = {tensor.name for tensor in graph.initializer}
    inputs = {value.name: value for value in graph.input if value.name not in weights}
    for name, text in values.items():
        if name not in inputs:
            raise ModelError(f"--fix {name}={text}: {path} has the inputs {', '.join(sorted(inputs))}.")
        graph.initializer.append(numpy_helper.from_array(_array(inputs[name], text, path), name))
        graph.input.remove(inputs[name])


def _array(given: onnx.ValueInfoProto, text: str, path: Path) -> np.ndarray:
    """What a user wrote, in the type and the shape of an input.

    Raises:
        ModelError: It does not fit these.
    """
    tensor = given.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
    shape = f"{np.dtype(dtype).name}[{', '.join('?' if dim < 0 else str(dim) for dim in dims)}]"
    told = f"--fix {given.name}={text}: {path} has {shape} there"
    if text.endswith(".npy"):
        found = np.load(text)
        if found.dtype != dtype or len(found.shape) != len(dims) or not _fits(found.shape, dims):
            raise ModelError(f"{told}, and the file has {found.dtype.name}{list(found.shape)}.")
        return np.ascontiguousarray(found) if found.ndim else found
    try:
        numbers = [_LOGICAL[word] if word in _LOGICAL else float(word) for word in text.split(",")]
    except ValueError:
        raise ModelError(f"{told}; {_EXPECTED}.") from None
    found = np.array(numbers).astype(dtype)
    if not np.array_equal(found.astype(np.float64), np.array(numbers, np.float64)) and found.dtype.kind in "iub":
        raise ModelError(f"{told}, which does not hold that value.")
    if len(numbers) == 1 and -1 not in dims:
        return np.full(dims, found[0], dtype)
    try:
        return found.reshape(dims)
    except ValueError:  # another number of them, or two dimensions that are open
        raise ModelError(f"{told}, and {len(numbers)} numbers were given. A .npy file can have any shape.") from None


def _fits(shape: tuple[int, ...], dims: list[int]) -> bool:
    return all(dim in (-1, extent) for extent, dim in zip(shape, dims, strict=True))
