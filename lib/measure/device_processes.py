"""The processes of a `DevicePool`, and the folder they share: compilers of this machine, and drivers of devices."""

import shutil
from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path

from lib.contracts.errors import DeviceError
from lib.machine import host, targets
from lib.measure.devices import Local
from lib.measure.fleet import Fleet, Slot
from lib.measure.process import Worker, living, start_all
from lib.rpc_server import scratch_folder


class DeviceProcesses:
    """Compilers, one for each core; drivers, one for each device; both started when they are needed."""

    def __init__(self, target: targets.AnyTarget, fleet: Fleet, recycle_after: int, memory_share: float) -> None:
        """
        Args:
            recycle_after: Builds of a compiler before it is replaced.
            memory_share: Of this machine's memory, that all compilers together may have.
        """
        self._target, self._fleet, self._recycle_after = target, fleet, recycle_after
        self._memory_bytes = host.memory_of_each(memory_share, host.physical_cores())  # of a compiler
        self.compilers: list[Worker] = []
        self.drivers: dict[Worker, Slot] = {}
        self._folder: Path | None = None
        self._n_libraries = 0

    def start_compilers(self, busy: Collection[Worker] = ()) -> None:
        """One for each core; those that built enough are replaced, and those that ended.

        Args:
            busy: Are left alone, as by `start_drivers`.
        """
        idle = [worker for worker in self.compilers if worker not in busy]
        for worker in idle:
            if worker.builds >= self._recycle_after:
                worker.kill()
        self.compilers = [*busy, *living(idle)]
        environment = {"TMPDIR": str(self.scratch())}
        missing = host.physical_cores() - len(self.compilers)
        compiler = partial(Worker, self._target, environment=environment, memory_bytes=self._memory_bytes)
        self.compilers += start_all([compiler] * missing)

    def start_drivers(self, busy: Collection[Worker] = ()) -> None:
        """One for each device there is; those whose device is gone end when they are idle.

        Args:
            busy: Are left alone, even those that ended: nobody has heard yet what became of their candidate.

        Raises:
            DeviceError: There is no device, and none will come.
        """
        idle = living(driver for driver in self.drivers if driver not in busy)
        self.drivers = {driver: self.drivers[driver] for driver in [*busy, *idle]}
        missing = Counter(self._fleet.slots())
        if not missing:
            raise self.no_device()
        for driver, slot in list(self.drivers.items()):
            if missing[slot]:
                missing[slot] -= 1
            elif driver not in busy:
                driver.kill()
                del self.drivers[driver]
        slots = list(missing.elements())
        self.drivers |= dict(zip(start_all([partial(self._driver, slot) for slot in slots]), slots, strict=True))

    def a_driver(self) -> Worker:
        """One that is idle, where nothing else is going on."""
        self.start_drivers()
        return next(iter(self.drivers))

    def _driver(self, slot: Slot) -> Worker:
        environment = {"TMPDIR": str(self.scratch()), **dict(slot.environment)}
        return Worker(
            self._target, str(slot.devices), module="lib.measure.driver", environment=environment,
            afresh=isinstance(slot.devices, Local),
        )  # fmt: skip

    def no_device(self) -> DeviceError:
        """For who waited in vain."""
        return DeviceError(f"{self._fleet.missing()}\nWhat was measured is kept; the same command continues.")

    def scratch(self) -> Path:
        """A folder for libraries, and for what compilers leave when they are killed."""
        if self._folder is None:
            self._folder = scratch_folder()
        return self._folder

    def new_library(self) -> Path:
        """Where the next library goes."""
        self._n_libraries += 1
        return self.scratch() / f"{self._n_libraries}.so"

    def close(self) -> None:
        """End all processes; remove what they left."""
        for worker in [*self.compilers, *self.drivers]:
            worker.kill()
        self.compilers, self.drivers = [], {}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
