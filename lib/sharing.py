"""Weights of several libraries in one file, in which equal ones stand once, and no beginning of a longer one does.

Positions are the case of the latter: a model for 40 words takes the first 40 rows of the table that one for 500 has.
"""

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lib.contracts import tables, weights
from lib.machine import host
from lib.runtime.family_tuner_runtime.weights import ALIGNMENT, Mapped

Named = list[tuple[str, list[int]]]  # entries of the file with the shapes in which a library takes them, in order
_Key = tuple[str, int, str]  # element type, bytes, digest


@dataclass(frozen=True, slots=True)
class Together:
    """What came of it."""

    of_each: list[Named]  # by library; of an entry with more elements than the shape has, it takes the first
    n_bytes: int  # of all entries
    n_bytes_least: int  # of the library whose weights are the most: less, they cannot be

    def write(self, path: Path) -> None:
        """As JSON, for `read_together`."""
        path.write_text(json.dumps(asdict(self)))


def read_together(path: Path) -> Together:
    """What `Together.write` wrote."""
    found = json.loads(path.read_text())
    of_each = [[(name, shape) for name, shape in own] for own in found.pop("of_each")]
    return Together(of_each, **found)


def write(out: Path, taken: Sequence[Sequence[np.ndarray]]) -> Together:
    """Write the weights of libraries into one file.

    Bytes decide what is equal: an order of elements that is split into other axes is the same.

    Args:
        taken: The weights of each library, as it takes them.
    """
    arrays_by_id = {id(array): array for own in taken for array in own}
    with ThreadPoolExecutor(host.physical_cores()) as executor:  # digests leave Python to other threads
        keys = dict(zip(arrays_by_id, executor.map(_key, arrays_by_id.values()), strict=True))
    distinct = {keys[place]: array for place, array in arrays_by_id.items()}
    begins = _beginnings(distinct)
    names = {key: f"{n:06d}" for n, key in enumerate(key for key in distinct if key not in begins)}
    arrays = {name: distinct[key] for key, name in names.items()}
    weights.write(out, arrays)
    name_of = {place: names[begins.get(key, key)] for place, key in keys.items()}
    of_each = [[(name_of[id(array)], list(array.shape)) for array in own] for own in taken]
    sizes = [sum(array.nbytes for array in own) for own in taken]
    return Together(of_each, sum(array.nbytes for array in arrays.values()), max(sizes, default=0))


def without(path: Path, together: Together, places: Container[int]) -> Together:
    """Take what some of the libraries alone take out of a file of weights; the others find theirs by the same names."""
    of_each = [named for n, named in enumerate(together.of_each) if n not in places]
    names, arrays = {name for own in of_each for name, _ in own}, Mapped(path).arrays()
    taken = {name: array for name, array in arrays.items() if name in names}
    if len(taken) < len(arrays):
        with tables.written_whole(path) as partial:
            weights.write(partial, taken)
    sizes = [sum(arrays[name].itemsize * math.prod(shape) for name, shape in own) for own in of_each]
    return Together(of_each, sum(array.nbytes for array in taken.values()), max(sizes, default=0))


def list_weights(path: Path, shared: Path, named: Named) -> None:
    """Write which weights of a file a library takes, for whoever runs it from there (`lib.measure.libraries`)."""
    path.write_text(json.dumps({"file": os.path.relpath(shared, path.parent), "weights": named}))


def _key(array: np.ndarray) -> _Key:
    return array.dtype.name, array.nbytes, hashlib.sha256(_bytes(array).data).hexdigest() if array.size else ""


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _beginnings(distinct: Mapping[_Key, np.ndarray]) -> dict[_Key, _Key]:
    """Arrays that others of their type begin with, and the longest such."""
    found: dict[_Key, _Key] = {}
    longer: defaultdict[tuple[str, bytes], list[_Key]] = defaultdict(list)  # by their first bytes: few look alike
    for key in sorted(distinct, key=lambda key: -key[1]):
        own = _bytes(distinct[key])
        alike = longer[key[0], own[:ALIGNMENT].tobytes()]
        whole = next((each for each in alike if np.array_equal(_bytes(distinct[each])[: own.size], own)), None)
        if whole:
            found[key] = whole
        else:
            alike.append(key)
    return found
