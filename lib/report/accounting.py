"""Where the hours of a run went, from the clocks that its files carry."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Clock = Mapping[str, float]  # Unix time `started`, seconds in `total`, seconds by kind


@dataclass(frozen=True, slots=True)
class Record:
    """One stage's work: who did it, and its clock."""

    session: str
    stage: str
    clock: Clock

    @property
    def end(self) -> float:
        return self.clock["started"] + self.clock["total"]


# What the seconds of a stage were for; what is left of the stage, and between stages, is the pipeline's own.
_KINDS = {
    "extract": {"total": "extract"},
    "recall": {"total": "recall"},
    "generate": {"search": "search"},
    "measure": {"build": "build", "run": "run", "start": "worker start"},
    "train": {"train": "train"},
    "compile": {"finalists": "finalists again", "build": "compile", "verify": "verify"},
}


def spent(records: Iterable[Record]) -> dict[str, float]:
    """Seconds by kind, `rest` for all that no kind explains, and `total`: the wall seconds of the sessions.

    A session is one process, from its first stage to the end of its last; interruptions do not count.
    """
    records = list(records)
    seconds = {kind: 0.0 for kinds in _KINDS.values() for kind in kinds.values()}
    for record in records:
        for key, kind in _KINDS.get(record.stage, {}).items():
            seconds[kind] += record.clock.get(key, 0.0)
    total = sum(end - start for start, end in _sessions(records).values())
    return {**seconds, "rest": total - sum(seconds.values()), "total": total}


def waited(records: Iterable[Record]) -> float:
    """The share of the time in which candidates were timed, that they had no core; see `lib.measure.protocol.Timed`."""
    measured = [record.clock for record in records if record.stage == "measure"]
    run_s, waited_s = (sum(clock.get(kind, 0.0) for clock in measured) for kind in ("run", "waited"))
    return waited_s / run_s if run_s else 0.0


def active_seconds(records: Iterable[Record], moments: Iterable[float]) -> list[float]:
    """For each Unix time the seconds of work before it: the pauses between sessions are left out."""
    spans = sorted(_sessions(records).values())
    return [sum(max(0.0, min(moment, end) - start) for start, end in spans) for moment in moments]


def _sessions(records: Iterable[Record]) -> dict[str, tuple[float, float]]:
    """First start and last end of each session."""
    spans: dict[str, tuple[float, float]] = {}
    for record in records:
        start, end = spans.get(record.session, (record.clock["started"], record.end))
        spans[record.session] = (min(start, record.clock["started"]), max(end, record.end))
    return spans
