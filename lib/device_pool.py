"""Measuring on devices that are not this process's CPU: one queue, compilers ahead of it, one candidate on a device.

Compilers are workers of this machine that write shared libraries; a driver is a process that uses one device at a
time. Where the devices share this CPU (servers on loopback), compiling and measuring take turns.
"""

import contextlib
import select
import shutil
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lib import host, targets
from lib.clock import Clock
from lib.errors import DeviceError
from lib.fleet import Fleet, Slot
from lib.rpc_server import scratch_folder
from lib.runner import Job, MeasureConfig, Measurement
from lib.search import EMPTY_TRACE
from lib.workers import Worker, WorkerDied, WorkerTimeout, measured, start_all

_Library = tuple[Path, list[Any]]  # and the parameters of its program

_GRACE_S = 5.0  # beyond a limit that the device keeps: then the device is lost
_LOOK_S = 2.0  # between looks at which devices there are
_CHANCES = 3  # of a candidate whose device is lost under it


@dataclass(slots=True)
class _Built:
    """A candidate that waits for a device."""

    job: Job
    library: Path
    params: list[Any]
    build_s: float


@dataclass(slots=True)
class _Compiling:
    job: Job
    library: Path
    deadline: float


@dataclass(slots=True)
class _Measuring:
    """What a driver does: it waits for a device until `begun`, then has it until `deadline`."""

    built: _Built
    begun: float = 0.0
    deadline: float = float("inf")


@dataclass(slots=True)
class _Batch:
    """The candidates of one `run`, and how far they are."""

    pending: deque[Job]
    compiling: dict[Worker, _Compiling] = field(default_factory=dict)
    ready: deque[_Built] = field(default_factory=deque)
    measuring: dict[Worker, _Measuring] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    best: dict[str, float] = field(default_factory=dict)  # s, of each subgraph
    shares_cpu: bool = False  # then compiling and measuring take turns:
    builds: bool = True
    looked: float = float("-inf")  # when, at the fleet
    seen: float = 0.0  # when a device was last at work, or none was needed

    def left(self) -> bool:
        return bool(self.pending or self.compiling or self.ready or self.measuring)

    def may_compile(self) -> bool:
        return self.builds or not self.shares_cpu

    def may_measure(self) -> bool:
        return not (self.builds and self.shares_cpu)

    def another_chance(self, job: Job) -> bool:
        """Whether a candidate whose process or device was lost is queued again."""
        self.lost[job.candidate_id] += 1
        return self.lost[job.candidate_id] < _CHANCES


class DevicePool:
    """Runs candidates on the devices of a fleet."""

    def __init__(self, target: targets.AnyTarget, config: MeasureConfig, fleet: Fleet) -> None:
        self._target, self._config, self._fleet = target, config, fleet
        self._compilers: list[Worker] = []
        self._drivers: dict[Worker, Slot] = {}
        self._folder: Path | None = None
        self._n_libraries = 0
        self._clock = Clock()

    @property
    def clock(self) -> dict[str, float]:
        """See `Runner.clock`; where compiling and measuring overlap, `run` counts while a device is busy."""
        return self._clock.by_kind()

    # The queue.

    def run(self, jobs: Sequence[Job]) -> Iterator[Measurement]:
        """See `Runner.run`."""
        self._clock = Clock()
        batch = _Batch(deque(jobs))
        try:
            while batch.left():
                yield from self._go_on(batch)
        finally:
            for worker in (*batch.compiling, *batch.measuring):  # nobody is left to hear their answers
                worker.kill()

    def _go_on(self, batch: _Batch) -> Iterator[Measurement]:
        """Give work to whoever is free, and take the next answers."""
        self._look_at_fleet(batch)
        self._take_turns(batch)
        if batch.may_compile():
            yield from self._feed_compilers(batch)
        if batch.may_measure():
            self._feed_drivers(batch)
        with self._clock.spent("run" if batch.measuring else "build"):
            answered = self._wait(batch)
        for worker in answered:
            yield from (self._compiled if worker in batch.compiling else self._measured)(batch, worker)

    def _look_at_fleet(self, batch: _Batch) -> None:
        """As many drivers as devices.

        Raises:
            DeviceError: For too long there was no device.
        """
        now = time.monotonic()
        if any(task.begun for task in batch.measuring.values()) or not batch.measuring:
            batch.seen = now
        if now - batch.seen > self._config.device_patience_s:
            raise self._no_device()
        if now - batch.looked > _LOOK_S:
            batch.looked, batch.shares_cpu = now, self._fleet.shares_cpu()
            with self._clock.spent("start"):
                self._start_drivers(busy=batch.measuring)

    def _take_turns(self, batch: _Batch) -> None:
        """Where devices share this CPU: build as many as may wait, measure them all, and so on."""
        full = not batch.pending or len(batch.ready) >= self._config.builds_ahead
        if batch.builds and full and not batch.compiling:
            batch.builds = False
        elif not batch.builds and not batch.ready and not batch.measuring:
            batch.builds = True

    def _feed_compilers(self, batch: _Batch) -> Iterator[Measurement]:
        with self._clock.spent("start"):
            self._start_compilers(busy=batch.compiling)
        for worker in [worker for worker in self._compilers if worker not in batch.compiling]:
            if not batch.pending or len(batch.ready) + len(batch.compiling) >= self._config.builds_ahead:
                return
            job = batch.pending.popleft()
            batch.compiling[worker] = _Compiling(
                job, self._new_library(), time.monotonic() + self._config.build_timeout_s
            )
            try:
                library = str(batch.compiling[worker].library)
                worker.send_build(job, self._config.build_timeout_s, do="compile", library=library)
            except (WorkerDied, WorkerTimeout) as error:
                del batch.compiling[worker]
                yield from self._compiler_died(batch, job, error)

    def _feed_drivers(self, batch: _Batch) -> None:
        for driver in [driver for driver in self._drivers if driver not in batch.measuring and driver.alive()]:
            if not batch.ready:
                return
            with contextlib.suppress(WorkerDied):  # then it is replaced at the next look
                driver.send(self._request(batch.ready[0], batch))
                batch.measuring[driver] = _Measuring(batch.ready.popleft())

    def _request(self, built: _Built, batch: _Batch) -> dict[str, Any]:
        best_s = batch.best.get(built.job.subgraph_id, float("inf"))
        return {
            "do": "measure",
            "library": str(built.library),
            "params": built.params,
            "repeats": self._config.repeats,
            "min_repeat_s": self._config.min_repeat_s,
            "slow_above_s": self._config.slow_factor * best_s,
            "limit_s": self._config.run_timeout_s,
        }

    def _wait(self, batch: _Batch) -> list[Worker]:
        """Until a process has something to say, or is too late with it."""
        deadlines = {**{w: c.deadline for w, c in batch.compiling.items()},
                     **{w: m.deadline for w, m in batch.measuring.items()}}  # fmt: skip
        next_look = min([*deadlines.values(), time.monotonic() + _LOOK_S])
        heard, _, _ = select.select(list(deadlines), [], [], max(0.0, next_look - time.monotonic()))
        return [w for w, deadline in deadlines.items() if w in heard or deadline <= time.monotonic()]

    def _compiled(self, batch: _Batch, worker: Worker) -> Iterator[Measurement]:
        """A compiler answered, died, or is late."""
        task = batch.compiling.pop(worker)
        late = task.deadline <= time.monotonic()
        try:
            reply = worker.receive(0 if late else self._config.build_timeout_s)
        except (WorkerDied, WorkerTimeout) as error:
            yield from self._compiler_died(batch, task.job, error)
            return
        if "error" in reply:
            yield self._measurement(task.job, "build_error", error=reply["error"])
        else:
            batch.ready.append(_Built(task.job, task.library, reply["params"], reply["build_s"]))

    def _compiler_died(self, batch: _Batch, job: Job, error: WorkerDied | WorkerTimeout) -> Iterator[Measurement]:
        if isinstance(error, WorkerDied) and error.from_outside and batch.another_chance(job):
            batch.pending.appendleft(job)
            return
        status = "crash" if isinstance(error, WorkerDied) else "timeout"
        yield self._measurement(job, status, error=f"while compiling: {error}")

    def _measured(self, batch: _Batch, driver: Worker) -> Iterator[Measurement]:
        """A driver has its device, or an answer; or it died, or is late."""
        task = batch.measuring[driver]
        reply = self._hear(driver, task.deadline - time.monotonic() if task.begun else self._config.run_timeout_s)
        if "begun" in reply:
            task.begun = time.monotonic()
            task.deadline = task.begun + self._patience_with_device(self._config.run_timeout_s)
            return
        del batch.measuring[driver]
        job, built = task.built.job, task.built
        if reply.get("status") == "lost" and batch.another_chance(job):
            batch.ready.append(built)
            return
        built.library.unlink(missing_ok=True)
        if "error" not in reply:
            batch.best[job.subgraph_id] = min(batch.best.get(job.subgraph_id, float("inf")), *reply["latencies"])
            yield self._measurement(job, "ok", reply["latencies"], None, built.build_s, reply["run_s"], reply["device"])
            return
        status, error = reply["status"], f"while running: {reply['error']}"
        if status == "lost":
            status, error = "crash", f"{error} (its device was lost {_CHANCES} times)"
        run_s = time.monotonic() - task.begun if task.begun else 0.0
        yield self._measurement(job, status, [], error, built.build_s, run_s)

    # One question at a time.

    def compare(
        self, workload: str, traces: Sequence[str], repeats: int, *, baseline: str | None
    ) -> tuple[list[list[float]], list[float]]:
        """See `Pool.compare`; all on one device."""
        around = [] if baseline is None else [len(traces)]
        everything = [*traces, *([] if baseline is None else [baseline])]
        with self._compiled_all(workload, everything, pack=False) as built:
            in_turn = [*around, *list(range(len(traces))) * repeats, *around]
            latencies = self._time_in_turn(built, in_turn)
            if not all(latencies):  # one of them is to blame: each alone, so that it spoils no other
                latencies = [self._time_in_turn([each], [0] * in_turn.count(n))[0] for n, each in enumerate(built)]
        return latencies[: len(traces)], [latency for n in around for latency in latencies[n]]

    def check(self, workload: str, trace: str, timeout_s: float) -> float | None:
        """See `Pool.check`."""
        with self._compiled_all(workload, [EMPTY_TRACE, trace], pack=True) as (untuned, tuned):
            if untuned is None or tuned is None:
                return None
            libraries = [str(untuned[0]), str(tuned[0])]
            return self._ask_device(timeout_s, do="check", libraries=libraries, params=untuned[1]).get("max_error")

    @contextmanager
    def models(self, limit_s: float) -> Iterator[Worker]:
        """See `Pool.models`."""
        self.close()
        driver = self._a_driver()
        try:
            reply = self._begin(driver, do="begin", limit_s=limit_s)
            if "begun" in reply:
                reply = self._hear(driver, self._config.build_timeout_s)
            if "error" in reply:
                raise DeviceError(f"A device was given, but cannot be used: {reply['error']}")
            yield driver
        finally:
            self.close()

    def _time_in_turn(self, built: Sequence[_Library | None], order: Sequence[int]) -> list[list[float]]:
        """Latencies of each; empty lists if one of them fails."""
        libraries = [each for each in built if each is not None]
        if len(libraries) < len(built):
            return [[] for _ in built]
        limit_s = self._config.run_timeout_s * (2 + len(order) // self._config.repeats)
        reply = self._ask_device(
            limit_s, do="compare", libraries=[str(path) for path, _ in libraries], order=list(order),
            params=libraries[0][1], min_repeat_s=self._config.min_repeat_s,
        )  # fmt: skip
        return reply.get("latencies") or [[] for _ in built]

    @contextmanager
    def _compiled_all(self, workload: str, traces: Sequence[str], *, pack: bool) -> Iterator[list[_Library | None]]:
        """Library and parameters of each program, while they are needed; None for what does not compile."""
        built = [self._compile_one(workload, trace, pack=pack) for trace in traces]
        try:
            yield built
        finally:
            for each in built:
                if each:
                    each[0].unlink(missing_ok=True)

    def _compile_one(self, workload: str, trace: str, *, pack: bool) -> _Library | None:
        self._start_compilers(busy={})
        worker, limit_s, library = self._compilers[0], self._config.build_timeout_s, self._new_library()
        worker.workload = ""
        try:
            worker.ask(limit_s, do="define", workload_id="one", workload=workload)
            reply = worker.ask(
                limit_s, do="compile", workload_id="one", trace=trace, library=str(library), pack=pack
            )  # fmt: skip
        except (WorkerDied, WorkerTimeout):
            return None
        return None if "error" in reply else (library, reply["params"])

    def _ask_device(self, limit_s: float, **request: Any) -> dict[str, Any]:
        """The answer of a device; asked again, of another one if there is, where the device was lost."""
        reply: dict[str, Any] = {}
        for _ in range(_CHANCES):
            driver = self._a_driver()
            reply = self._begin(driver, limit_s=limit_s, **request)
            if "begun" in reply:
                reply = self._hear(driver, self._patience_with_device(limit_s))
            if reply.get("status") != "lost":
                break
        return reply

    def _begin(self, driver: Worker, **request: Any) -> dict[str, Any]:
        """Wait until a device is ours."""
        try:
            driver.send(request)
            return driver.receive(self._config.device_patience_s)
        except WorkerTimeout:
            raise self._no_device() from None
        except WorkerDied as error:
            return {"status": "lost", "error": str(error)}

    def _no_device(self) -> DeviceError:
        return DeviceError(f"{self._fleet.missing()}\nWhat was measured is kept; the same command continues.")

    def _hear(self, driver: Worker, timeout_s: float) -> dict[str, Any]:
        """What a driver says; a driver that dies, or is late, says so of its candidate."""
        try:
            reply = driver.receive(max(timeout_s, 0.0))
        except WorkerTimeout as error:
            return {"status": "lost" if self._fleet.keeps_limits else "timeout", "error": str(error)}
        except WorkerDied as error:
            outside = self._fleet.keeps_limits or error.from_outside
            return {"status": "lost" if outside else "crash", "error": str(error)}
        if reply.get("status") == "unfit":
            raise DeviceError(reply["error"])
        if "error" in reply and not self._fleet.keeps_limits:
            driver.kill()  # an illegal access leaves CUDA unusable for the rest of the process
        return reply

    def _patience_with_device(self, limit_s: float) -> float:
        return limit_s + (_GRACE_S if self._fleet.keeps_limits else 0.0)

    # Processes and files.

    def _start_compilers(self, busy: Collection[Worker]) -> None:
        """One for each core; those that built enough are replaced."""
        for worker in self._compilers:
            if worker not in busy and worker.builds >= self._config.recycle_after:
                worker.kill()
        self._compilers = [worker for worker in self._compilers if worker.alive()]
        # TVM's default compiler of CUDA, NVRTC, needs a package that TVM does not depend on.
        environment = {"TMPDIR": str(self._scratch()), "TVM_CUDA_COMPILE_MODE": "nvcc"}
        missing = host.physical_cores() - len(self._compilers)
        self._compilers += start_all([lambda: Worker(self._target, environment=environment)] * missing)

    def _start_drivers(self, busy: Collection[Worker]) -> None:
        """One for each device there is; those whose device is gone end when they are idle.

        Raises:
            DeviceError: There is no device, and none will come.
        """
        self._drivers = {driver: slot for driver, slot in self._drivers.items() if driver.alive()}
        missing = Counter(self._fleet.slots())
        if not missing:
            raise DeviceError(self._fleet.missing())
        for driver, slot in list(self._drivers.items()):
            if missing[slot]:
                missing[slot] -= 1
            elif driver not in busy:
                driver.kill()
                del self._drivers[driver]
        slots = list(missing.elements())
        self._drivers |= dict(zip(start_all([partial(self._driver, slot) for slot in slots]), slots, strict=True))

    def _driver(self, slot: Slot) -> Worker:
        environment = {"TMPDIR": str(self._scratch()), **dict(slot.environment)}
        return Worker(self._target, slot.place, module="lib.driver", environment=environment)

    def _a_driver(self) -> Worker:
        self._start_drivers(busy={})
        return next(iter(self._drivers))

    def _scratch(self) -> Path:
        """A folder for libraries, and for what compilers leave when they are killed."""
        if self._folder is None:
            self._folder = scratch_folder()
        return self._folder

    def _new_library(self) -> Path:
        self._n_libraries += 1
        return self._scratch() / f"{self._n_libraries}.so"

    def close(self) -> None:
        """End all processes; remove what they left."""
        for worker in [*self._compilers, *self._drivers]:
            worker.kill()
        self._compilers, self._drivers = [], {}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _measurement(
        self,
        job: Job,
        status: str,
        latencies: Sequence[float] = (),
        error: str | None = None,
        build_s: float = 0.0,
        run_s: float = 0.0,
        device: str = "",
    ) -> Measurement:
        threads = self._target.threads
        return measured(job, status, latencies, error, build_s, run_s, device=device, threads=threads)
