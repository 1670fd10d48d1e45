"""Shapes that are open within a range: which of the compiled ones an inference takes, padded, and cut again.

A bundle of a range has a library for some extents of each open dimension, its buckets. What is called with other
extents is computed by the smallest bucket in which it fits. The tuner has checked, when it made the bundle, that what
is filled in changes nothing of what remains when outputs are cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from .errors import InputError

Extents = Mapping[str, int]  # of open dimensions, by name
Shape = Sequence[int | str]  # extents, or names of open dimensions


@dataclass(frozen=True, slots=True)
class Bucket:
    """A compiled shape."""

    extents: dict[str, int]
    library: str  # file name
    weights: tuple[tuple[str, tuple[int, ...]], ...] | None  # in order, with shapes; None: all, as they lie in the file

    def holds(self, extents: Extents) -> bool:
        """Whether something of these extents fits in."""
        return all(extents[name] <= most for name, most in self.extents.items())


@dataclass(frozen=True, slots=True)
class Ranges:
    """What open dimensions may be, lowest and highest, by name; none for a bundle of one shape."""

    limits: dict[str, tuple[int, int]]
    buckets: tuple[Bucket, ...]

    @staticmethod
    def of(facts: Mapping[str, Any]) -> "Ranges":
        """What a manifest says."""
        if "buckets" not in facts:
            return Ranges({}, (Bucket({}, str(facts["library"]), None),))
        limits = {str(name): (int(said["from"]), int(said["to"])) for name, said in facts["ranges"].items()}
        buckets = [
            Bucket(
                {str(name): int(extent) for name, extent in said["extents"].items()},
                str(said["library"]),
                tuple((str(name), tuple(map(int, shape))) for name, shape in said["weights"]),
            )
            for said in facts["buckets"]
        ]
        return Ranges(limits, tuple(sorted(buckets, key=lambda bucket: prod(bucket.extents.values()))))

    def extents(self, values: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Of the open dimensions, read from the shapes of all inputs.

        Args:
            values: The model's inputs (`bundle.Value`), and `shapes` those that were given, in the same order.

        Raises:
            InputError: A shape is not one of the model's, two inputs say otherwise of a dimension, or an extent is out
                of its range.
        """
        found: dict[str, int] = {}
        for value, shape in zip(values, shapes, strict=True):
            if len(shape) != len(value.shape):
                raise InputError(f"{value} is what the model takes, and {list(shape)} was given for it.")
            for expected, extent in zip(value.shape, shape, strict=True):
                if isinstance(expected, str):
                    if found.setdefault(expected, extent) != extent:
                        raise InputError(
                            f"{expected} is {found[expected]} in one input, and {extent} in {value.name}, whose shape "
                            f"is {list(shape)}."
                        )
                elif expected != extent:
                    raise InputError(f"{value} is what the model takes, and {list(shape)} was given for it.")
        for name, extent in found.items():
            lowest, highest = self.limits[name]
            if not lowest <= extent <= highest:
                raise InputError(f"{name} is {extent}, and the model was compiled for {lowest} to {highest}.")
        return found

    def smallest(self, extents: Extents) -> int:
        """The place of the smallest bucket in which something of these extents fits."""
        return next(n for n, bucket in enumerate(self.buckets) if bucket.holds(extents))


def settled(shape: Shape, extents: Extents) -> tuple[int, ...]:
    """A shape with the extents of its open dimensions."""
    return tuple(extents[extent] if isinstance(extent, str) else extent for extent in shape)


def cut(array: np.ndarray, shape: Shape, extents: Extents) -> np.ndarray:
    """An output without what was computed for the padding."""
    return array[tuple(slice(extents[extent] if isinstance(extent, str) else extent) for extent in shape)]
