"""Weights of several libraries in one file, in which equal ones stand once, and no beginning of a longer one does.

Positions are the case of the latter: a model for 40 words takes the first 40 rows of the table that one for 500 has.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lib.contracts import weights
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

    def without(self, places: Container[int]) -> "Together | None":
        """The same without some libraries; None if they alone take some of the weights."""
        kept = [named for n, named in enumerate(self.of_each) if n not in places]
        taken, all_of_it = ({name for own in some for name, _ in own} for some in (kept, self.of_each))
        return replace(self, of_each=kept) if taken == all_of_it else None


def write(out: Path, packed: Sequence[Path]) -> Together:
    """Write the weights of libraries, as each takes them, into one file.

    Bytes decide what is equal: an order of elements that is split into other axes is the same.

    Args:
        packed: A file of weights for each library.
    """
    distinct: dict[_Key, np.ndarray] = {}
    taken: list[list[tuple[_Key, list[int]]]] = []
    sizes = []
    for path in packed:
        found = list(Mapped(path).arrays().values())
        with ThreadPoolExecutor(host.physical_cores()) as executor:  # digests leave Python to other threads
            keys = list(executor.map(_key, found))
        distinct |= dict(zip(keys, found, strict=True))
        taken.append([(key, list(array.shape)) for key, array in zip(keys, found, strict=True)])
        sizes.append(sum(array.nbytes for array in found))
    begins = _beginnings(distinct)
    names = {key: f"{n:06d}" for n, key in enumerate(key for key in distinct if key not in begins)}
    arrays = {name: distinct[key] for key, name in names.items()}
    weights.write(out, arrays)
    of_each = [[(names[begins.get(key, key)], shape) for key, shape in own] for own in taken]
    return Together(of_each, sum(array.nbytes for array in arrays.values()), max(sizes, default=0))


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
