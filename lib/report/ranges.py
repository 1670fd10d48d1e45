"""What came of a model that was compiled for a range of shapes, as a text and as values for a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.contracts import manifest
from lib.contracts.files import ModelFiles, RoundFiles, RunFiles
from lib.report import accounting
from lib.report.rows import clocks
from lib.report.text import align, milliseconds, time_table


@dataclass(frozen=True, slots=True)
class BucketRow:
    """A shape that was compiled."""

    extents: str
    latency_s: float  # of the whole library, at its shape
    onnxruntime_s: float | None
    alone_s: float | None  # estimated, with the programs that it would have alone; None: it took them over from others
    agreed_s: float | None  # with those that pack weights as the other shapes do
    max_error: float
    padded: str  # extents that were checked, padded to this shape
    padded_error: float


@dataclass(frozen=True, slots=True)
class RangeRows:
    """All of a range."""

    title: str
    ranges: str
    buckets: tuple[BucketRow, ...]
    weights_bytes: int
    weights_least: int  # those of one shape
    n_rounds: int
    n_trials: int
    left_out: tuple[str, ...]  # shapes that were no faster than a larger one, in words
    probed: str  # how it was found that padding changes nothing
    seconds: Mapping[str, float]

    @property
    def cost(self) -> float:
        """Of agreeing on how weights are packed, over all shapes, as a share."""
        ratios = [row.agreed_s / row.alone_s for row in self.buckets if row.alone_s and row.agreed_s]
        return sum(ratios) / len(ratios) - 1 if ratios else 0.0

    @property
    def times(self) -> float:
        """How often weights stand in the bundle, on average."""
        return self.weights_bytes / self.weights_least if self.weights_least else 1.0


def collect(title: str, joint: ModelFiles, families: Path, past: Sequence[RoundFiles], run: RunFiles) -> RangeRows:
    """Read them.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    facts = manifest.read(run.compiled.manifest)
    rows = zip(facts["buckets"], facts["agreement"], facts["padded"], strict=True)
    checked = facts["probed"]["checked"]
    worst = max((each["max_error"] for each in checked), default=0.0)
    return RangeRows(
        title=title,
        ranges=", ".join(f"{name} from {said['from']} to {said['to']}" for name, said in facts["ranges"].items()),
        buckets=tuple(_row(*each) for each in rows),
        weights_bytes=facts["weights_bytes"]["all"],
        weights_least=facts["weights_bytes"]["one_shape"],
        n_rounds=facts["n_rounds"],
        n_trials=facts["n_trials"],
        left_out=tuple(
            f"{_told(each['extents'])} ({milliseconds(each['latency_s'])} ms, {_told(each['taken'])} in its place "
            f"{milliseconds(each['taken_s'])} ms)"
            for each in facts["left_out"]
        ),
        probed=f"{facts['probed']['by']} makes the same of the file at {len(checked)} lengths and of these, padded "
        f"with anything: the largest difference is {worst:.1e} of the largest value",
        seconds=accounting.spent(clocks([joint.subgraphs], families, past, [facts])),
    )


def _row(bucket: Mapping[str, Any], cost: Mapping[str, Any], padded: Mapping[str, Any]) -> BucketRow:
    return BucketRow(
        _told(bucket["extents"]), bucket["latency_s"], bucket["onnxruntime_s"], cost["alone_s"], cost["agreed_s"],
        bucket["max_error"], _told(padded["extents"]), padded["max_error"],
    )  # fmt: skip


def _told(extents: Mapping[str, int]) -> str:
    return " ".join(f"{name}={extent}" for name, extent in extents.items())


def report(found: RangeRows) -> str:
    """All of it, for the terminal."""
    header = ("compiled for", "library ms", "ONNX Runtime ms", "alone ms", "agreed ms", "cost", "error", "padded to it",
              "error")  # fmt: skip
    rows = [
        (row.extents, milliseconds(row.latency_s), milliseconds(row.onnxruntime_s), milliseconds(row.alone_s),
         milliseconds(row.agreed_s), share(row), f"{row.max_error:.1e}", row.padded, f"{row.padded_error:.1e}")
        for row in found.buckets
    ]  # fmt: skip
    told = (
        f"one bundle for {found.ranges}: {len(found.buckets)} shapes, {found.n_rounds} rounds, {found.n_trials} "
        "trials\n"
        f"padding: {found.probed}\n"
        f"weights: {found.weights_bytes / 1e6:,.1f} MB, {found.times:.2f} times those of one shape; packing them alike "
        f"costs {100 * found.cost:.1f} % by estimate"
        + "".join(f"\nleft out, no faster than a larger one: {text}" for text in found.left_out)
    )
    how = (
        "library, ONNX Runtime: whole models at the shape; alone, agreed: estimates, sums over subgraphs, with the "
        "fastest programs\nand with those that pack weights as other shapes do; padded: a shorter input, run as a user "
        "does; errors are to the file. Where\nthere are no estimates, programs were taken over from shapes that were "
        "measured."
    )
    return "\n\n".join([found.title, told, f"{align([header, *rows])}\n{how}", time_table(found.seconds)])


def share(row: BucketRow) -> str:
    """What agreeing costs a shape."""
    return f"{100 * (row.agreed_s / row.alone_s - 1):.1f} %" if row.alone_s and row.agreed_s else "-"
