"""Measuring, seen from outside: candidates in, one measurement for each out, whatever happens to them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from lib.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MeasureConfig:
    """How candidates are timed, and when they are given up."""

    repeats: int = 3  # latencies kept of a candidate
    min_repeat_s: float = 0.02  # a repeat loops the kernel for at least about this long
    weights: str = "cold"  # on this CPU: each run reads them from memory, as in a large model; or "warm", from caches
    slow_factor: float = 2.5  # a candidate this much slower than its batch's best is timed once only
    build_timeout_s: float = 20.0
    run_timeout_s: float = 10.0  # all repeats together; begins when the device begins
    device_patience_s: float = 120.0  # without any device before the run stops
    builds_ahead: int = 32  # programs compiled before they are timed; a crash costs the builds of one worker
    recycle_after: int = 2000  # builds of a worker before it is replaced: compilers leak

    def __post_init__(self) -> None:
        if self.weights not in ("cold", "warm"):
            raise ConfigError(f"[measure] weights must be cold or warm, but got {self.weights!r}.")
        if self.repeats < 1 or self.builds_ahead < 1 or self.slow_factor <= 1:
            raise ConfigError(f"[measure] needs repeats >= 1, builds_ahead >= 1, slow_factor > 1, but got {self}.")
        if self.run_timeout_s <= 2 * self.repeats * self.min_repeat_s:
            raise ConfigError(
                "[measure] run_timeout_s must exceed 2 x repeats x min_repeat_s, or every candidate "
                f"times out, but got {self}."
            )


@dataclass(frozen=True, slots=True)
class Job:
    """A candidate as a runner needs it."""

    candidate_id: str
    subgraph_id: str
    workload: str  # JSON of its IRModule
    trace: str  # JSON


@dataclass(frozen=True, slots=True)
class Measurement:
    """A row of MEASUREMENTS; see there for units."""

    candidate_id: str
    subgraph_id: str
    status: str
    latencies: list[float]
    error: str | None
    build_s: float
    run_s: float
    measured_at: float
    host: str
    device: str
    threads: int
    versions: str


class Runner(Protocol):
    """Builds and times candidates; a candidate's failure comes back as a measurement with a status."""

    def run(self, jobs: Sequence[Job]) -> Iterator[Measurement]:
        """Measure each job once; yields each measurement as soon as it is known, in any order.

        Raises:
            DeviceError: No device is left. What was yielded before stays valid.
        """
        ...

    @property
    def clock(self) -> dict[str, float]:
        """Wall seconds of the last `run`, by kind: `build`, `run`, and `start` of processes."""
        ...

    def close(self) -> None:
        """End what it started."""
        ...


class Process(Protocol):
    """A process that answers requests of `lib.worker`."""

    def ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """See `workers.Worker.ask`."""
        ...


class Pool(Runner, Protocol):
    """A runner with devices, which can also settle who wins."""

    def compare(
        self, workload: str, traces: Sequence[str], repeats: int, *, baseline: str | None
    ) -> tuple[list[list[float]], list[float]]:
        """Time programs of one workload in turn, A B C A B C ..., with a baseline, if there is one, before and after.

        Returns:
            For each trace its `repeats` latencies in seconds, and the baseline's two; empty for what failed or
            took too long.
        """
        ...

    def check(self, workload: str, trace: str, timeout_s: float) -> float | None:
        """Relative error of a program against the untuned one; None if it failed or took too long."""
        ...

    def models(self, limit_s: float) -> AbstractContextManager[Process]:
        """A process that loads whole models on a device, which it has for itself, for so long at most."""
        ...
