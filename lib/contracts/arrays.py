"""Arrays in files of NumPy (.npz), which know no bf16: its elements come back as two bytes without a type."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

_UNTYPED = np.dtype("V2")
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}  # by version


def load(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name, in order; bf16 has its type again."""
    with np.load(path) as found:
        return {name: _typed(found[name]) for name in found.files}


def values(path: Path) -> Sequence[np.ndarray]:
    """See `load`."""
    return list(load(path).values())


def dtypes(path: Path) -> set[np.dtype]:
    """The types of a file's arrays, which are not read for that; bf16 has none."""
    found = set()
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                read = _HEADERS[np.lib.format.read_magic(file)]  # type: ignore[no-untyped-call]  # NumPy has no types there
                found.add(read(file)[2])  # type: ignore[no-untyped-call]
    return found


def _typed(array: np.ndarray) -> np.ndarray:
    return array.view(ml_dtypes.bfloat16) if array.dtype == _UNTYPED else array
