"""No device: for a CPU of another architecture, or with instructions that this one lacks, where nothing but this
machine is at hand.

Nothing is timed. That programs compute what they should is checked on this machine: a trace, compiled for it, computes
the same, but for what LLVM makes of it for the other CPU. The library itself runs where an emulator is set up, once.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from lib.contracts.errors import DeviceError
from lib.machine import targets
from lib.measure import identity
from lib.measure.emulator import Emulator
from lib.measure.local_pool import LocalPool
from lib.measure.model_session import WorkerSession
from lib.measure.runner import Job, MeasureConfig, Measurement


class AbsentDevice:
    """A `runner.Pool` that cannot time anything."""

    width = 1

    def __init__(self, target: targets.CpuTarget, config: MeasureConfig, emulator: Emulator | None = None) -> None:
        self._target, self.emulator = target, emulator
        self.runs = targets.stand_in(target)
        self.conditions = identity.conditions(target, "no device", config.weights)
        self._here = LocalPool(self.runs, config)

    @property
    def clock(self) -> dict[str, float]:
        """See `Runner.clock`."""
        return {}

    def run(self, jobs: Sequence[Job]) -> Iterator[Measurement]:
        """See `Runner.run`.

        Raises:
            DeviceError: Always.
        """
        raise DeviceError(missing(self._target))

    def compare(
        self, workload: str, traces: Sequence[str], repeats: int, *, baseline: str | None
    ) -> tuple[list[list[float]], list[float]]:
        """See `Pool.compare`: nothing runs."""
        return [[] for _ in traces], []

    def check(self, workload: str, trace: str, timeout_s: float) -> float | None:
        """See `Pool.check`; of the programs as they are compiled for this machine."""
        return self._here.check(workload, trace, timeout_s)

    def models(self, timeout_s: float) -> AbstractContextManager[WorkerSession]:
        """See `Pool.models`; of models that were compiled for `runs`."""
        return self._here.models(timeout_s)

    def close(self) -> None:
        """See `Runner.close`."""
        self._here.close()


def missing(target: targets.CpuTarget) -> str:
    """What to do where something is to be measured."""
    which = f"one with {', '.join(target.lacking)}" if target.lacking else target.triple
    return (
        f"--target is a CPU of another machine ({which}): nothing that is compiled for it can be timed here. "
        "Measure on one: --devices rpc://HOST:PORT/KEY, with `lib/rpc_server.py` running there (README.md, Measure "
        "elsewhere); or measure nothing, and go by what models foretell: --trials 0."
    )
