"""Tensors in a file that is mapped when it is used: safetensors, in which each tensor begins with a cache line.

`lib.runtime.family_tuner_runtime.weights` says why, and reads them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

_ALIGNMENT = 64  # bytes
_TYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """Write arrays, in their order; names must not begin with two underscores.

    Raises:
        KeyError: The format has no such type.
    """
    header: dict[str, object] = {}
    gaps: list[int] = []  # bytes after each array
    at = 0
    for n, (name, array) in enumerate(arrays.items()):
        header[name] = _entry(_TYPES[array.dtype.name], array.shape, at, array.nbytes)
        at += array.nbytes
        gaps.append(-at % _ALIGNMENT)
        if gaps[-1]:  # safetensors wants each byte to belong to a tensor
            header[f"__gap{n}"] = _entry("U8", (gaps[-1],), at, gaps[-1])
            at += gaps[-1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array, gap in zip(arrays.values(), gaps, strict=True):
            for part in _bytes_of(array):
                file.write(part)
            file.write(bytes(gap))
    return path


def numbered(arrays: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays that go by their place: the weights of a library."""
    return {f"{n:06d}": array for n, array in enumerate(arrays)}


def _entry(dtype: str, shape: tuple[int, ...], begin: int, size: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}


def _bytes_of(array: np.ndarray) -> Iterator[memoryview]:
    """Without a copy where it is contiguous."""
    if array.nbytes:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
