"""Ranges of shapes: what a user writes, and the shapes, called buckets, that are compiled for them.

    sequence=1..512             from 1 to 512; the buckets are chosen here
    sequence=32,64,128          these buckets, for all that is not longer than the last
    batch=1..8 sequence=1..512  each with each

Buckets are chosen so that of what is computed at most a twelfth is padding, or more where that would make more buckets
than the configuration allows, up to a quarter. In ranges that go to 64 and beyond they are multiples of 8, which the
rows of register tiles divide, up to 32 of 4; and up to seven of padding, there up to three, are taken where the share
is less: of a few rows, an inference takes as long as its weights take to be read. With a histogram of lengths there are
as many buckets, so placed that the least is computed over all of them.

Only some buckets, the anchors, are tuned by measurements. They are spread evenly by the square roots of their extents,
between where inferences take their time and where programs change most; the others take over what the anchors have
(`stages.adapt`).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import TYPE_CHECKING

from lib.contracts import digests
from lib.contracts.errors import ConfigError, ModelError, require_file

if TYPE_CHECKING:
    from lib.models.file_facts import Facts

_OPEN = re.compile(r"([1-9][0-9]{0,9})\.\.([1-9][0-9]{0,9})")
_EXTENT = re.compile(r"[1-9][0-9]{0,9}")
# By the kind of file: which names of several extents may be those of dimensions, rather than of inputs. torch's symbols
# are told apart before a file is read, which takes torch.
_MAY_BE_LISTED: Mapping[str, Callable[[str], object]] = {".onnx": bool, ".pt2": re.compile(r"s[0-9]+").fullmatch}
_LONGEST = 60  # characters of a range in a name
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9_.+-]+")
_GRANULE, _FROM = 8, 64  # buckets are multiples of that, of ranges that go so far, ...
_SHORT, _SHORT_TO = 4, 32  # ... and of that, up to there
_MOST = 48  # buckets: each is compiled and checked
_QUARTER, _TWELFTH = 4, 12  # of what is computed, one part in so many may be padding: at worst, and at best

Histogram = Mapping[int, float]  # how often each extent is asked for


@dataclass(frozen=True, slots=True)
class RangeConfig:
    """How many shapes a bundle of a range has."""

    buckets: int = 34  # of a dimension, where they are chosen here; more only where else more than a quarter is padding
    anchors: int = 5  # shapes that are tuned by measurements; the others take over what these have

    def __post_init__(self) -> None:
        if min(self.buckets, self.anchors) < 1:
            raise ConfigError(f"[ranges] needs counts of at least 1, but got {self}.")


@dataclass(frozen=True, slots=True)
class Dimension:
    """An open dimension of a file, by its name there."""

    name: str
    lowest: int
    highest: int
    buckets: tuple[int, ...]  # ascending; the last one is the highest extent


@dataclass(frozen=True, slots=True)
class Range:
    """Shapes of a model that one bundle is for."""

    text: str  # as the user wrote it
    fixed: str  # what of that is one shape
    dimensions: tuple[Dimension, ...]
    n_anchors: int = RangeConfig().anchors  # shapes that are tuned by measurements

    @property
    def buckets(self) -> list[dict[str, int]]:
        """Extents by dimension, the largest first: what is learned there serves the smaller ones."""
        found = product(*(dimension.buckets for dimension in self.dimensions))
        named = [dict(zip([dimension.name for dimension in self.dimensions], each, strict=True)) for each in found]
        return sorted(named, key=lambda extents: (-math.prod(extents.values()), *extents.values()))

    @property
    def importances(self) -> list[float]:
        """Of `buckets`: how many of them an anchor stands for, those to which it is the nearest; of others 0.

        The largest is an anchor, then again and again what is farthest from all anchors: those before are farthest from
        one another, and so none is far from one.
        """
        places = [[math.sqrt(extent) for extent in bucket.values()] for bucket in self.buckets]
        anchors = [0]
        while len(anchors) < min(self.n_anchors, len(places)):
            anchors.append(max(range(len(places)), key=lambda n: min(math.dist(places[n], places[m]) for m in anchors)))
        nearest = [min(anchors, key=lambda m: math.dist(place, places[m])) for place in places]
        return [float(nearest.count(n)) if n in anchors else 0.0 for n in range(len(places))]

    def shape(self, extents: Mapping[str, int]) -> str:
        """What `--shape` says of one of its shapes."""
        return " ".join([*self.fixed.split(), *(f"{name}={extent}" for name, extent in extents.items())])

    @property
    def limits(self) -> dict[str, tuple[int, int]]:
        return {dimension.name: (dimension.lowest, dimension.highest) for dimension in self.dimensions}


def parse(model: str, shape: str, lengths: str = "", config: RangeConfig | None = None) -> Range | None:
    """The range that a model is to be compiled for; None if `--shape` says one shape.

    Args:
        lengths: Path of a histogram of the extents of the one dimension that is open, if there is one.
        config: How many shapes it may have; None: as `RangeConfig` has it.

    Raises:
        ModelError: It is no range, or not of a file that leaves dimensions open, or has too many buckets.
    """
    words = {word: word.rpartition("=")[::2] for word in shape.split()}
    config = config or RangeConfig()
    n_open = sum(bool(_OPEN.fullmatch(extents)) for _, extents in words.values())
    may_be_listed = _MAY_BE_LISTED.get(Path(model).suffix)
    several = [name for name, extents in words.values() if may_be_listed and may_be_listed(name) and "," in extents]
    if not n_open and not (several and Path(model).exists()):
        _require_none(lengths)
        return None
    if not may_be_listed:
        raise ModelError(f"--shape {shape!r}: ranges are for files that leave dimensions open, not for {model}.")
    require_file(model, "--model")
    said = _facts(Path(model))
    named = said.open_dimensions
    if lengths and n_open != 1:
        raise ModelError("--lengths is a histogram of one dimension, which is to be a range: sequence=1..512.")
    histogram = _histogram(Path(lengths)) if lengths else None
    dimensions, fixed = [], []
    most = config.buckets if n_open == 1 and not several else 1  # several dimensions multiply
    for word, (name, extents) in words.items():
        if (found := _OPEN.fullmatch(extents)) or (name in named and "," in extents):
            if name not in named:
                raise ModelError(f"--shape {word!r}: {model} has no open dimension {name!r}; {_told(named)}.")
            if name in said.computed:
                raise ModelError(
                    f"--shape {word!r}: an input of {model} is {said.computed[name]} long, which cannot be padded with "
                    f"{name}. Compile single shapes."
                )
            dimensions.append(
                _dimension(word, name, int(found[1]), int(found[2]), histogram, most)
                if found
                else _listed(word, name, extents)
            )
        else:
            fixed.append(word)
    if not dimensions:
        _require_none(lengths)
        return None
    range = Range(shape, " ".join(fixed), tuple(dimensions), config.anchors)
    if len(range.buckets) > _MOST:
        raise ModelError(
            f"--shape {shape!r} makes {len(range.buckets)} shapes to compile, {_MOST} are the most. List fewer: "
            "sequence=64,128,256,512."
        )
    return range


def _require_none(lengths: str) -> None:
    if lengths:
        raise ModelError("--lengths is for a range of shapes, as in --shape 'sequence=1..512'.")


def _listed(word: str, name: str, extents: str) -> Dimension:
    numbers = extents.split(",")
    if not all(_EXTENT.fullmatch(number) for number in numbers):
        raise ModelError(f"--shape {word!r}: expected {name}=EXTENT,EXTENT,... or {name}=LOWEST..HIGHEST.")
    buckets = sorted({int(number) for number in numbers})
    return Dimension(name, 1, buckets[-1], tuple(buckets))


def _dimension(word: str, name: str, lowest: int, highest: int, histogram: Histogram | None, most: int) -> Dimension:
    if lowest > highest:
        raise ModelError(f"--shape {word!r}: {lowest} is above {highest}.")
    chosen = buckets(lowest, highest, most)
    if histogram:
        within = {extent: count for extent, count in histogram.items() if lowest <= extent <= highest}
        if not within:
            raise ModelError(f"--lengths has no length from {lowest} to {highest}, the range of {name}.")
        chosen = fitted(lowest, highest, within, len(chosen))
    return Dimension(name, lowest, highest, tuple(chosen))


def name(model: str, range: Range) -> str:
    """Of its folder: equal for equal shapes.

    Args:
        model: The name of the model's without a shape.
    """
    digest = digests.of_json([range.buckets, range.limits, range.importances])[:8]
    return _UNNAMEABLE.sub("_", f"{model}-{range.text.replace('=', '_')[:_LONGEST]}-{digest}")


def buckets(lowest: int, highest: int, most: int) -> list[int]:
    """Those of a range, ascending: with as little padding as so many make possible; see above."""
    parts = range(_TWELFTH, _QUARTER, -1)
    found = (_with_padding(lowest, highest, each) for each in parts)
    return next((each for each in found if len(each) <= most), None) or _with_padding(lowest, highest, _QUARTER)


def _with_padding(lowest: int, highest: int, parts: int) -> list[int]:
    """Those with which at most one part in so many is padding."""
    found = [highest]
    while True:
        least = _least_before(found[0], highest, parts)
        if least < lowest:
            return found
        granule = _granule(highest, least)
        before = -(-least // granule) * granule
        found.insert(0, before if before < found[0] else least)


def fitted(lowest: int, highest: int, histogram: Histogram, n: int) -> list[int]:
    """Up to n buckets with which the least is computed for a histogram of extents, at most a quarter of it padding."""
    multiples = {extent for extent in range(lowest, highest) if extent % _granule(highest, extent) == 0}
    ends = sorted(multiples.union(_with_padding(lowest, highest, _QUARTER)))
    upto = list(accumulate((histogram.get(extent, 0.0) for extent in range(1, highest + 1)), initial=0.0))

    best: dict[int, tuple[float, list[int]]] = {lowest - 1: (0.0, [])}  # by the last bucket, of those so far
    finished: list[tuple[float, list[int]]] = []
    for _ in range(n):
        following: dict[int, tuple[float, list[int]]] = {}
        for last, (cost, chosen) in best.items():
            for end in ends:
                least = _least_before(end, highest, _QUARTER)
                if end <= last or (last >= lowest and last < least) or (last < lowest and lowest <= least):
                    continue
                total = cost + end * (upto[end] - upto[last])
                if end not in following or total < following[end][0]:
                    following[end] = total, [*chosen, end]
        best = following
        if highest in best:
            finished.append(best[highest])
    return min(finished)[1]


def _least_before(bucket: int, highest: int, parts: int) -> int:
    """The least that the bucket before one may be; below the lowest extent, none is needed."""
    most = max(bucket // parts, _granule(highest, bucket) - 1)  # of padding
    return bucket - most - 1


def _granule(highest: int, extent: int) -> int:
    """What extents about as large as that are multiples of."""
    if highest < _FROM:
        return 1
    return _SHORT if extent <= _SHORT_TO else _GRANULE


def _histogram(path: Path) -> Histogram:
    """Lines of a length and a count.

    Raises:
        ModelError: It is not there, or a line is something else.
    """
    require_file(path, "--lengths")
    found: dict[int, float] = {}
    for n, line in enumerate(path.read_text().splitlines(), start=1):
        words = re.split(r"[\s,;]+", line.strip())
        if words in ([""], ["length", "count"]) or line.lstrip().startswith("#"):
            continue
        try:
            length, count = int(words[0]), float(words[1])
            if len(words) != 2 or length < 1 or not 0 <= count < math.inf:
                raise ValueError
        except (ValueError, IndexError):
            raise ModelError(f"--lengths {path}, line {n}: expected a length and a count, found {line!r}.") from None
        found[length] = found.get(length, 0.0) + count
    return found


def _facts(path: Path) -> "Facts":
    from lib.models import file_facts  # onnx takes a while to load

    return file_facts.of(path)


def _told(named: Sequence[str]) -> str:
    return f"open are {', '.join(sorted(named))}" if named else "all of its dimensions are fixed, or have no names"
