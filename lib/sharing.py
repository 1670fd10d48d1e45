"""Weights of several libraries in one file, in which equal ones stand once."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.contracts import weights
from lib.machine import host
from lib.runtime.family_tuner_runtime.weights import Mapped

Named = list[tuple[str, list[int]]]  # entries of the file with the shapes in which a library takes them, in order


@dataclass(frozen=True, slots=True)
class Together:
    """What came of it."""

    of_each: list[Named]  # by library
    n_bytes: int  # of all entries
    n_bytes_least: int  # of the library whose weights are the most: less, they cannot be


def write(out: Path, packed: Sequence[Path]) -> Together:
    """Write the weights of libraries, as each takes them, into one file.

    Bytes decide what is equal: an order of elements that is split into other axes is the same.

    Args:
        packed: A file of weights for each library.
    """
    arrays: dict[str, np.ndarray] = {}
    names: dict[tuple[str, int, str], str] = {}
    of_each: list[Named] = []
    sizes = []
    for path in packed:
        own: Named = []
        found = list(Mapped(path).arrays().values())
        with ThreadPoolExecutor(host.physical_cores()) as executor:  # digests leave Python to other threads
            made = list(executor.map(_digest, found))
        for array, digest in zip(found, made, strict=True):
            key = array.dtype.name, array.nbytes, digest
            if key not in names:
                names[key] = f"{len(names):06d}"
                arrays[names[key]] = array
            own.append((names[key], list(array.shape)))
        of_each.append(own)
        sizes.append(sum(array.nbytes for array in found))
    weights.write(out, arrays)
    return Together(of_each, sum(array.nbytes for array in arrays.values()), max(sizes, default=0))


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest() if array.size else ""
