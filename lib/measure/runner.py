"""Measuring, seen from outside: candidates in, one measurement for each out, whatever happens to them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lib.contracts import clock
from lib.contracts.conditions import Conditions
from lib.contracts.errors import ConfigError
from lib.contracts.settings import limit
from lib.contracts.statuses import Status
from lib.machine import host
from lib.machine.targets import AnyTarget


@dataclass(frozen=True, slots=True)
class MeasureConfig:
    """How candidates are timed, and when they are given up."""

    repeats: int = 3  # latencies kept of a candidate
    min_repeat_s: float = 0.02  # a repeat loops the kernel for at least about this long
    weights: str = "cold"  # on this CPU: each run reads them from memory, as in a large model; or "warm", from caches
    slow_factor: float = 2.5  # a candidate this much slower than its batch's best is timed once only
    build_timeout_s: float = limit(20.0)
    run_timeout_s: float = limit(10.0)  # all repeats together; begins when the device begins
    device_patience_s: float = limit(120.0)  # without any device before the run stops
    builds_ahead: int = limit(32)  # programs compiled before they are timed; a crash costs the builds of one worker
    recycle_after: int = limit(2000)  # builds of a worker before it is replaced: compilers leak
    memory_share: float = limit(0.8)  # of this machine's or container's memory, that all workers together may have

    def __post_init__(self) -> None:
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"[measure] memory_share is above 0 and at most 1, but got {self.memory_share}.")
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
    status: Status
    latencies: list[float]
    error: str | None
    build_s: float
    run_s: float
    measured_at: float
    host: str
    device: str
    conditions: Conditions

    @staticmethod
    def of(row: Mapping[str, Any]) -> "Measurement":
        """From a row as Parquet and JSON have it.

        Raises:
            TypeError, KeyError: Fields are missing, or there are others.
            ValueError: The status is none of `Status`.
        """
        read = {"status": Status(row["status"]), "conditions": Conditions.of(row["conditions"])}
        return Measurement(**{**row, **read})


def measured(
    job: Job,
    status: Status,
    latencies: Sequence[float],
    error: str | None,
    build_s: float,
    run_s: float,
    *,
    device: str,
    conditions: Conditions,
) -> Measurement:
    """A row of MEASUREMENTS for what is known now, on this host."""
    return Measurement(
        job.candidate_id, job.subgraph_id, status, list(latencies), error, build_s, run_s, clock.now(),
        host.hostname(), device, conditions,
    )  # fmt: skip


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
        """Wall seconds of the last `run`, by kind: `build`, `run`, and `start` of processes; and how many of `run`
        candidates `waited` for a core, where that is known."""
        ...

    @property
    def conditions(self) -> Conditions:
        """Under which it measures; each of its measurements carries them."""
        ...

    def close(self) -> None:
        """End what it started."""
        ...


class ModelFailed(Exception):
    """An operation of a `ModelSession` raised, took its process with it, or took too long."""

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(f"{operation}: {reason}")
        self.operation, self.reason = operation, reason


class ModelSession(Protocol):
    """Whole compiled models on a device that nothing else uses; all that fails is a `ModelFailed`."""

    def open_library(self, name: str, library: Path, params: Path, inputs: Path) -> None:
        """Load a library under a name, with its parameters and the inputs it will be run on (both .npz)."""
        ...

    def infer(self, name: str, out: Path) -> float:
        """Run one inference, write its outputs, in order, to an .npz file; returns its seconds."""
        ...

    def time(self, name: str, seconds: float) -> float:
        """Median latency of an inference in seconds, over about `seconds` after as long a warm-up."""
        ...


class Pool(Runner, Protocol):
    """A runner with devices, which can also settle who wins."""

    width: int  # how many threads may ask it at a time, each about a workload of its own

    @property
    def runs(self) -> AnyTarget:
        """What the models that it runs are compiled for: its target, or this machine, if there is no device of that."""
        ...

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

    def models(self, timeout_s: float) -> AbstractContextManager[ModelSession]:
        """A session with whole models, each operation of which may take so long.

        Raises:
            DeviceError: There is no device for it.
        """
        ...
