"""Arrays in files of NumPy (.npz), which know no bf16: its elements come back as two bytes without a type.

A file may leave out what another one has, so that the weights of a model in thirty shapes stand once: it then has an
entry that says which file that is, and what its arrays are.
"""

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from lib.contracts.errors import ContractError

_ELSEWHERE = "elsewhere.json"
_UNTYPED = np.dtype("V2")
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}  # by version


def write(path: Path, partial: Path, arrays: Mapping[str, np.ndarray], like: Path | None = None) -> None:
    """Write arrays by name.

    Args:
        path: Where the file will be.
        partial: Where it is written; moved there by the caller once it is whole.
        like: Such a file, which stays: what is equal in it is left out.
    """
    other = _origin(path, like) if like else None
    kept = dict(arrays)
    if other:
        theirs = _read(other.resolve(), other.stat().st_mtime_ns)
        kept = {name: array for name, array in arrays.items() if not _are_equal(array, theirs.get(name))}
    np.savez(partial, **kept)  # type: ignore[arg-type]  # the stub takes any name for allow_pickle
    if other and len(kept) < len(arrays):
        are = contents(other)
        where = {
            "file": os.path.relpath(other, path.parent),
            "arrays": {name: "" if name in kept else are[name] for name in arrays},  # in their order
        }
        with zipfile.ZipFile(partial, "a") as archive:
            archive.writestr(_ELSEWHERE, json.dumps(where))


def _origin(path: Path, like: Path) -> Path | None:
    """The file that a file like another one may refer to: one that has all of its arrays; None if that is itself."""
    found = _elsewhere(like)
    origin = like.parent / found["file"] if found else like
    return None if origin.resolve() == path.resolve() else origin


def _are_equal(array: np.ndarray, other: np.ndarray | None) -> bool:
    """To the bit, zeros with their signs and what is no number included."""
    if other is None or array.shape != other.shape or array.dtype != other.dtype:
        return False
    own, others = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (array, other))
    return np.array_equal(own, others)


def _elsewhere(path: Path) -> dict[str, Any] | None:
    with zipfile.ZipFile(path) as archive:
        if _ELSEWHERE not in archive.namelist():
            return None
        found: dict[str, Any] = json.loads(archive.read(_ELSEWHERE))
        return found


def contents(path: Path) -> dict[str, str]:
    """Of each array what tells it from others, without reading them: size and checksum, as the archive has them."""
    with zipfile.ZipFile(path) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename != _ELSEWHERE]
        own = {entry.filename.removesuffix(".npy"): f"{entry.file_size} {entry.CRC}" for entry in entries}
    found = _elsewhere(path)
    return {name: said or own[name] for name, said in found["arrays"].items()} if found else own


def load(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name, in order; bf16 has its type again.

    Raises:
        ContractError: It leaves out what another file had, and has no more.
    """
    found = _elsewhere(path)
    if not found:
        return _arrays_of(path)
    other = path.parent / found["file"]
    is_there = other.exists()
    are = contents(other) if is_there else {}
    missing = [name for name, said in found["arrays"].items() if said and are.get(name) != said]
    if missing:
        raise ContractError(
            f"{path} has the array {missing[0]} in {other}, which {'has another one now' if is_there else 'is gone'}. "
            f"Remove the folder {path.parent.name}: the model is imported again then."
        )
    own, theirs = _arrays_of(path), _read(other.resolve(), other.stat().st_mtime_ns)
    return {name: theirs[name] if said else own[name] for name, said in found["arrays"].items()}


def load_all(paths: Sequence[Path]) -> list[dict[str, np.ndarray]]:
    """See `load`: what one of the files has in another one is the same object in both."""
    origins = {(path.parent / found["file"]).resolve() for path in paths if (found := _elsewhere(path))}
    return [
        dict(_read(path.resolve(), path.stat().st_mtime_ns)) if path.resolve() in origins else load(path)
        for path in paths
    ]


@lru_cache(maxsize=2)  # weights, and what they were in another precision
def _read(path: Path, _changed: int) -> Mapping[str, np.ndarray]:
    """A file that others refer to: the shapes of a model, one after another."""
    return MappingProxyType(_arrays_of(path))


def _arrays_of(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as found:
        return {name: _typed(found[name]) for name in found.files if name != _ELSEWHERE}


def values(path: Path) -> Sequence[np.ndarray]:
    """See `load`."""
    return list(load(path).values())


def dtypes(path: Path) -> set[np.dtype]:
    """The types of a file's arrays, which are not read for that; bf16 has none."""
    found = set()
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name == _ELSEWHERE:
                continue
            with archive.open(name) as file:
                read = _HEADERS[np.lib.format.read_magic(file)]  # type: ignore[no-untyped-call]  # NumPy has no types there
                found.add(read(file)[2])  # type: ignore[no-untyped-call]
    return found


def _typed(array: np.ndarray) -> np.ndarray:
    return array.view(ml_dtypes.bfloat16) if array.dtype == _UNTYPED else array
