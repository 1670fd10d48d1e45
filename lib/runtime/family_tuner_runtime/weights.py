"""Tensors in a file that is mapped, not read: pages come in when they are touched, and all processes share them.

The file is one of safetensors (https://github.com/huggingface/safetensors), which says of each tensor its type, shape
and place, in a header of JSON. That format does not align tensors; the tuner writes them so that each begins with a
cache line, as TVM's kernels take for granted (the gaps are tensors whose names begin with two underscores, as the key
of the metadata does). Others are refused here.
"""

import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from . import native
from .errors import BundleError

ALIGNMENT = 64  # bytes: what TVM's kernels assume
_HIDDEN = "__"
_TYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file."""

    name: str
    dtype: str  # as TVM and NumPy call it
    shape: tuple[int, ...]
    begin: int  # bytes from the beginning of the file
    end: int


def entries(path: Path) -> list[Entry]:
    """The tensors of a file, in the order in which they lie there.

    Raises:
        BundleError: It is no such file, is cut short, or a tensor is not aligned.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise _damaged(path, "its header is longer than the file")
        header = file.read(length)
    try:
        found = [
            Entry(name, _TYPES[said["dtype"]], tuple(map(int, said["shape"])), *(8 + length + n for n in places))
            for name, said in json.loads(header).items()
            if not name.startswith(_HIDDEN)
            for places in [said["data_offsets"]]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its header is not one of safetensors ({type(error).__name__}: {error})") from error
    for entry in found:
        expected = int(np.prod(entry.shape, dtype=np.int64)) * itemsize(entry.dtype)
        if entry.end - entry.begin != expected or entry.end > size:
            raise _damaged(path, f"{entry.name} needs {expected} bytes, which are not there")
        if expected and entry.begin % ALIGNMENT:
            raise _damaged(path, f"{entry.name} does not begin at a multiple of {ALIGNMENT} bytes")
    return sorted(found, key=lambda entry: (entry.begin, entry.end, entry.name))


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return np.dtype(stored(dtype)).itemsize


class Mapped:
    """The tensors of a file, in its order; memory and file stay as long as one of them is used."""

    def __init__(self, path: Path) -> None:
        """Raises: BundleError: See `entries`."""
        self.entries = entries(path)
        self._by_name = {entry.name: entry for entry in self.entries}
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self.tensors: list[Any] = [
            tensor_at(self._address + entry.begin, entry.shape, entry.dtype, self._map) for entry in self.entries
        ]

    def view(self, name: str, shape: Sequence[int]) -> Any:
        """A tensor over the memory of an entry, in another shape: buckets read the same bytes otherwise. Of an entry
        with more elements, it has the first.

        Raises:
            BundleError: There is no such entry, or it has fewer elements.
        """
        entry = self._by_name.get(name)
        if entry is None or int(np.prod(shape, dtype=np.int64)) > int(np.prod(entry.shape, dtype=np.int64)):
            raise BundleError(
                f"The manifest names a weight {name} of shape {list(shape)}, which the file does not have."
            )
        return tensor_at(self._address + entry.begin, shape, entry.dtype, self._map)

    def __contains__(self, tensor: Any) -> bool:
        """Whether its memory is of this file."""
        return 0 <= tensor.data_ptr() - self._address < len(self._map)

    def arrays(self) -> dict[str, np.ndarray]:
        """The same for NumPy, by name; they must not be written to."""
        return {
            entry.name: array_at(self._address + entry.begin, entry.shape, stored(entry.dtype), self._map).view(
                numpy_type(entry.dtype)
            )
            for entry in self.entries
        }


def tensor_at(address: int, shape: Sequence[int], dtype: str, owner: object) -> Any:
    """A tensor of TVM over memory that belongs to another object, which it keeps; nothing is copied.

    Raises:
        RuntimeError: It does not begin at a multiple of `ALIGNMENT`.
    """
    array = array_at(address, shape, stored(dtype), owner)
    tensor = tvm_ffi.from_dlpack(array, require_alignment=ALIGNMENT if array.size else 0)
    return as_type(tensor, dtype)


def as_type(tensor: Any, dtype: str) -> Any:
    """A tensor whose elements have the same size, as one of this type; NumPy knows no bf16."""
    if str(tensor.dtype) == dtype:
        return tensor
    return native.function("runtime.TVMTensorCreateView")(tensor, tvm_ffi.Shape(tensor.shape), tvm_ffi.dtype(dtype), 0)


def array_at(address: int, shape: Sequence[int], dtype: str, owner: object) -> np.ndarray:
    """A writable array over memory that belongs to another object, which it keeps."""
    return np.asarray(_Memory(address, tuple(shape), np.dtype(dtype).str, owner))


class _Memory:
    """NumPy's array interface. It says that the memory may be written to, even where it may not: NumPy gives no
    read-only array to others by DLPack as TVM 0.27 asks for them. Kernels write to no weights and no inputs."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str, owner: object) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": typestr, "version": 3}
        self.owner = owner


def stored(dtype: str) -> str:
    """A type of the same size that NumPy has."""
    return "uint16" if dtype == "bfloat16" else dtype


def numpy_type(dtype: str) -> np.dtype:
    """Raises: BundleError: It is bf16, and nobody has taught NumPy that."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    try:
        import ml_dtypes
    except ImportError:
        raise BundleError("NumPy knows no bfloat16: `pip install ml_dtypes` brings it.") from None
    return np.dtype(ml_dtypes.bfloat16)


def _damaged(path: Path, reason: str) -> BundleError:
    return BundleError(f"{path} is damaged: {reason}. Copy the bundle again, or have the tuner make it again.")
