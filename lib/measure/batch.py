"""The candidates of one `DevicePool.run`, and how far they are: pending, compiling, ready, measuring."""

from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

from lib.measure.process import Worker
from lib.measure.protocol import Param
from lib.measure.runner import Job

CHANCES = 3  # of a candidate whose device is lost under it


@dataclass(frozen=True, slots=True)
class Compiling:
    """What a compiler does, and until when it may."""

    job: Job
    library: Path
    deadline: float


@dataclass(frozen=True, slots=True)
class ReadyToRun:
    """A compiled candidate that waits for a device."""

    job: Job
    library: Path
    params: tuple[Param, ...]
    build_s: float


@dataclass(slots=True)
class Measuring:
    """What a driver does: it waits for a device until `begun`, then has it until `deadline`."""

    candidate: ReadyToRun
    sent: float  # when the driver was given it
    begun: float = 0.0
    deadline: float = float("inf")


@dataclass(slots=True)
class Batch:
    """Moments are in seconds of `time.monotonic`."""

    pending: deque[Job]
    compiling: dict[Worker, Compiling] = field(default_factory=dict)
    ready: deque[ReadyToRun] = field(default_factory=deque)
    measuring: dict[Worker, Measuring] = field(default_factory=dict)
    losses: Counter[str] = field(default_factory=Counter)  # of devices and processes, by candidate
    best: dict[str, float] = field(default_factory=dict)  # s, of each subgraph
    shares_cpu: bool = False  # then compiling and measuring alternate:
    builds: bool = True
    looked: float = float("-inf")  # when, at the fleet
    seen: float = 0.0  # when a device was last at work, or none was needed

    def waits_since(self) -> float | None:
        """Since when no driver gets a device, though one was asked for one; None if one has a device, or none asks."""
        if not self.measuring or any(task.begun for task in self.measuring.values()):
            return None
        # A driver asks from when it is given its candidate on: starting one takes time, while nobody waits for devices.
        return max(self.seen, min(task.sent for task in self.measuring.values()))

    def left(self) -> bool:
        return bool(self.pending or self.compiling or self.ready or self.measuring)

    def may_compile(self) -> bool:
        return self.builds or not self.shares_cpu

    def may_measure(self) -> bool:
        return not (self.builds and self.shares_cpu)

    def alternate(self, builds_ahead: int) -> None:
        """Where devices share this CPU: build as many as may wait, measure them all, and so on."""
        full = not self.pending or len(self.ready) >= builds_ahead
        if self.builds and full and not self.compiling:
            self.builds = False
        elif not self.builds and not self.ready and not self.measuring:
            self.builds = True

    def deadlines(self) -> dict[Worker, float]:
        """Of all processes that were asked something."""
        compiling = {worker: task.deadline for worker, task in self.compiling.items()}
        return compiling | {driver: task.deadline for driver, task in self.measuring.items()}

    def another_chance(self, job: Job) -> bool:
        """Whether a candidate whose process or device was lost is queued again."""
        self.losses[job.candidate_id] += 1
        return self.losses[job.candidate_id] < CHANCES
