"""Whether the open dimensions of a model can be padded: asked of its file, before anything is tuned.

The file is run (by ONNX Runtime, or torch) at a length, and at the length of the bucket that it falls into, with
whatever in the padding: where that changes an output, the range is refused. Of a batch it never should; of a sequence
it does not where a mask hides what is padded, or where the model is causal, so that no position sees those after it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lib.contracts.errors import ModelError
from lib.measure.file_peer import FilePeer, Original, opened
from lib.measure.runner import ModelFailed
from lib.models import onnx_float32
from lib.runtime.family_tuner_runtime.ranges import cut, settled
from lib.tir.numerics import random_values, relative_error

TOLERANCE = 1e-4  # largest difference, over the largest value of an output: other sums, no other values
_TIMEOUT_S = 120.0  # to load and run the file once
_PAIRS = 3  # buckets that are looked at
_MASK = "mask"

Extents = Mapping[str, int]
Arrays = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Probed:
    """What a manifest says of a model with open dimensions; names stand for these in shapes."""

    inputs: list[dict[str, Any]]  # as `deploy.interface` has them, with what each is padded with
    outputs: list[dict[str, Any]]  # name and shape
    by: str  # what ran the file
    checked: list[dict[str, Any]]  # extents, those of the bucket, and the largest error


def padding_of(
    buckets: Sequence[Extents], limits: Mapping[str, tuple[int, int]], seed: int = 0
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Extents to be looked at, each with those of its bucket: of some buckets, the largest among them, what needs the
    most padding and something in between.

    Args:
        buckets: In any order.
        limits: The lowest and the highest extent of each dimension.
    """
    rng = np.random.default_rng(seed)
    each = {name: sorted({bucket[name] for bucket in buckets}) for name in limits}
    found = []
    n = max(len(extents) for extents in each.values())
    for place in sorted({n - 1, n // 2, min(1, n - 1)}, reverse=True)[:_PAIRS]:
        bucket, least = {}, {}
        for name, extents in each.items():
            at = min(place, len(extents) - 1)
            bucket[name], least[name] = extents[at], _least(extents, at, limits[name][0])
        between = {name: int(rng.integers(least[name], bucket[name] + 1)) for name in bucket}
        found += [(extents, bucket) for extents in (least, between) if extents != bucket]
    return [pair for n, pair in enumerate(found) if pair not in found[:n]]


def _least(extents: Sequence[int], at: int, lowest: int) -> int:
    """The smallest extent that falls into one of the buckets, in ascending order; `lowest` of the range."""
    return max(lowest, extents[at - 1] + 1 if at else 1)


def probe(
    file: Original,
    inputs: Sequence[Mapping[str, Any]],
    axes: Mapping[str, Sequence[str]],
    names: Sequence[str],
    buckets: Sequence[Extents],
    limits: Mapping[str, tuple[int, int]],
    work: Path,
) -> Probed:
    """Look at a file.

    Args:
        inputs: Of the model in one of its shapes, as `deploy.interface` describes them.
        axes: By input: the name of each dimension that is open, empty text for others.
        names: Of the outputs.
        buckets, limits: See `padding_of`.
        work: A folder for what is handed to the process that runs it.

    Raises:
        ModelError: Padding changes what the model computes, or it does not run; the message says why.
    """
    shapes = {
        each["name"]: [name if name in limits else extent
                       for name, extent in zip(axes[each["name"]], each["shape"], strict=True)]
        for each in inputs
    }  # fmt: skip
    described = [{**each, "shape": shapes[each["name"]], "fill": 0} for each in inputs]
    if unread := set(limits) - {dim for shape in shapes.values() for dim in shape if isinstance(dim, str)}:
        raise ModelError(f"{file.path}: no input has the dimension {', '.join(sorted(unread))}.")
    with opened(file, _TIMEOUT_S, onnx_float32.compared_with) as session:
        run = _Run(file, session, work)
        try:
            outputs = _outputs(run, described, names, limits)
            pairs = padding_of(buckets, limits)
            checked = [
                _checked(run, described, outputs, extents, bucket, n) for n, (extents, bucket) in enumerate(pairs)
            ]
        except ModelFailed as failure:
            raise ModelError(f"{file.path} does not run in one of its shapes: {failure.reason}") from failure
        return Probed(described, outputs, run.by, checked)


class _Run:
    """Runs the file on inputs."""

    def __init__(self, file: Original, session: FilePeer, work: Path) -> None:
        self._file, self._session, self._work, self.by = file, session, work, ""

    @property
    def path(self) -> Path:
        return self._file.path

    def __call__(self, arrays: Arrays) -> Arrays:
        inputs = self._work / "probed-inputs.npz"
        np.savez(inputs, *arrays)
        found, told = self._session.outputs(self._file, inputs, self._work / "probed-outputs.npz")
        self.by = told.by
        return found


def values(inputs: Sequence[Mapping[str, Any]], extents: Extents, seed: int) -> Arrays:
    """Inputs of some extents; the first position of a mask is never hidden: else there is nothing to attend to."""
    found = []
    for n, each in enumerate(inputs):
        array = random_values(settled(each["shape"], extents), each["dtype"], each["bound"], seed=1000 * seed + n)
        if each["values"] == _MASK:
            array[..., :1] = 1
        found.append(array)
    return found


def padded(inputs: Sequence[Mapping[str, Any]], arrays: Arrays, bucket: Extents, seed: int | None) -> Arrays:
    """Inputs brought to the shape of a bucket: masks with what they are padded with, others with random values; with
    what they are padded with as well if there is no seed."""
    found = []
    garbage = values(inputs, bucket, seed) if seed is not None else [None] * len(arrays)
    for each, array, random in zip(inputs, arrays, garbage, strict=True):
        whole = (
            np.full(settled(each["shape"], bucket), each["fill"], array.dtype)
            if random is None or each["values"] == _MASK
            else random
        )
        whole[tuple(map(slice, array.shape))] = array
        found.append(whole)
    return found


def _outputs(
    run: _Run, inputs: Sequence[Mapping[str, Any]], names: Sequence[str], limits: Mapping[str, tuple[int, int]]
) -> list[dict[str, Any]]:
    """Names and shapes: which axes follow which dimension, seen from the shapes of two inferences."""
    low = {name: lowest for name, (lowest, _) in limits.items()}
    high: dict[str, int] = {}
    for name, (_, highest) in limits.items():
        high[name] = next(n for n in range(highest, 0, -1) if n not in high.values())
    pairs = zip(names, run(values(inputs, low, 0)), run(values(inputs, high, 0)), strict=True)
    found = []
    for name, one, other in pairs:
        shape: list[int | str] = []
        for axis, (small, large) in enumerate(zip(one.shape, other.shape, strict=True)):
            following = [dim for dim in limits if (low[dim], high[dim]) == (small, large)]
            if small != large and not following:
                raise ModelError(
                    f"{run.path}: axis {axis} of the output {name} is {small} and {large} where "
                    f"{told(low)} and {told(high)}: what was padded cannot be cut from it. Compile single shapes."
                )
            shape.append(following[0] if small != large else int(small))
        found.append({"name": name, "shape": shape, "dtype": str(one.dtype)})
    return found


def _checked(
    run: _Run,
    inputs: Sequence[Mapping[str, Any]],
    outputs: Sequence[Mapping[str, Any]],
    extents: Extents,
    bucket: Extents,
    seed: int,
) -> dict[str, Any]:
    """Compare what the model makes of some extents with what it makes of the same, padded.

    Raises:
        ModelError: It is something else.
    """
    arrays = values(inputs, extents, seed)
    expected = run(arrays)
    worst = 0.0
    for garbage in (None, seed + 1):
        found = [cut(each, said["shape"], extents)
                 for each, said in zip(run(padded(inputs, arrays, bucket, garbage)), outputs, strict=True)]  # fmt: skip
        for error, said in zip(map(relative_error, found, expected), outputs, strict=True):
            if not error <= TOLERANCE:
                raise ModelError(_refusal(run.path, inputs, said["name"], extents, bucket, error))
            worst = max(worst, error)
    return {"extents": dict(extents), "bucket": dict(bucket), "max_error": worst}


def _refusal(
    path: Path, inputs: Sequence[Mapping[str, Any]], output: str, extents: Extents, bucket: Extents, error: float
) -> str:
    masks = [each["name"] for each in inputs if each["values"] == _MASK]
    hidden = (
        f"although {', '.join(masks)} hides it" if masks else "no input is a mask that hides it, and it is not causal"
    )
    return (
        f"{path} cannot be compiled for a range: padding from {told(extents)} to {told(bucket)} changes the output "
        f"{output} by {error:.1e} of its largest value, {hidden}. Compile single shapes, or export the model with a "
        "mask."
    )


def told(extents: Extents) -> str:
    """Extents, for people."""
    return ", ".join(f"{name} = {extent}" for name, extent in extents.items())


def lengths_within(
    buckets: Sequence[Extents], limits: Mapping[str, tuple[int, int]], seed: int
) -> Iterator[dict[str, int]]:
    """Extents, one for each bucket, for which it is the smallest that holds them: what needs the most padding and
    something in between, by turns."""
    rng = np.random.default_rng(seed)
    each = {name: sorted({bucket[name] for bucket in buckets}) for name in limits}
    for n, bucket in enumerate(buckets):
        found = {}
        for name, extents in each.items():
            least = _least(extents, extents.index(bucket[name]), limits[name][0])
            found[name] = least if n % 2 else int(rng.integers(least, bucket[name] + 1))
        yield found
