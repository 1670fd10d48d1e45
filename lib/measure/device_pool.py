"""Measuring on devices that are not this process's CPU: one queue, compilers ahead of it, one candidate on a device.

Compilers are workers of this machine that write shared libraries; a driver is a process that uses one device at a
time. Where the devices share this CPU (servers on loopback), compiling and measuring alternate.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib.contracts.clock import Clock
from lib.contracts.errors import DeviceError
from lib.contracts.statuses import Status
from lib.machine import targets
from lib.measure import identity
from lib.measure.batch import CHANCES, Batch, Compiling, Measuring, ReadyToRun
from lib.measure.device_processes import DeviceProcesses
from lib.measure.fleet import Fleet
from lib.measure.model_session import WorkerSession
from lib.measure.process import Worker, WorkerDied, WorkerGone, WorkerTimeout, answered_or_late
from lib.measure.protocol import (
    BeginSession,
    Begun,
    CheckLibraries,
    Compare,
    Compile,
    Compiled,
    DeviceFault,
    Done,
    Failed,
    Measure,
    Param,
    R,
    Request,
    Timed,
    answer_type,
)
from lib.measure.runner import Job, MeasureConfig, Measurement, measured
from lib.tir.traces import EMPTY_TRACE

_Library = tuple[Path, tuple[Param, ...]]  # and the parameters of its program

_GRACE_S = 5.0  # beyond a limit that the device keeps: then the device is lost
_LOOK_S = 2.0  # between looks at which devices there are
_LONG_OPERATIONS = 8  # of a session with models that may take all their time, before a device elsewhere ends it


class DevicePool:
    """Runs candidates on the devices of a fleet."""

    def __init__(self, target: targets.AnyTarget, config: MeasureConfig, fleet: Fleet) -> None:
        self._target, self._config, self._fleet = target, config, fleet
        self.runs = target
        self.conditions = identity.conditions(target, fleet.kind)
        self._processes = DeviceProcesses(target, fleet, config.recycle_after, config.memory_share)
        self._clock = Clock()
        self.width = 1

    @property
    def clock(self) -> dict[str, float]:
        """See `Runner.clock`; where compiling and measuring overlap, `run` counts while a device is busy."""
        return self._clock.by_kind()

    def close(self) -> None:
        """End all processes; remove what they left."""
        self._processes.close()

    # The queue.

    def run(self, jobs: Sequence[Job]) -> Iterator[Measurement]:
        """See `Runner.run`."""
        self._clock = Clock()
        batch = Batch(deque(jobs))
        try:
            while batch.left():
                yield from self._go_on(batch)
        finally:
            for worker in (*batch.compiling, *batch.measuring):  # nobody is left to hear their answers
                worker.kill()

    def _go_on(self, batch: Batch) -> Iterator[Measurement]:
        """Give work to whoever is free, and take the next answers."""
        self._look_at_fleet(batch)
        batch.alternate(self._config.builds_ahead)
        if batch.may_compile():
            yield from self._feed_compilers(batch)
        if batch.may_measure():
            self._feed_drivers(batch)
        with self._clock.spent("run" if batch.measuring else "build"):
            answered = answered_or_late(batch.deadlines(), look_again=time.monotonic() + _LOOK_S)
        for worker in answered:
            yield from (self._compiled if worker in batch.compiling else self._measured)(batch, worker)

    def _look_at_fleet(self, batch: Batch) -> None:
        """As many drivers as devices.

        Raises:
            DeviceError: For too long there was no device.
        """
        now = time.monotonic()
        since = batch.waits_since()
        if since is None:
            batch.seen = now
        elif now - since > self._config.device_patience_s:
            raise self._processes.no_device()
        if now - batch.looked > _LOOK_S:
            batch.looked, batch.shares_cpu = now, self._fleet.shares_cpu()
            with self._clock.spent("start"):
                self._processes.start_drivers(busy=batch.measuring)

    def _feed_compilers(self, batch: Batch) -> Iterator[Measurement]:
        limit_s = self._config.build_timeout_s
        with self._clock.spent("start"):
            self._processes.start_compilers(busy=batch.compiling)
        for worker in [worker for worker in self._processes.compilers if worker not in batch.compiling]:
            if not batch.pending or len(batch.ready) + len(batch.compiling) >= self._config.builds_ahead:
                return
            job, library = batch.pending.popleft(), self._processes.new_library()
            try:
                worker.define(job.workload, limit_s)
                worker.send(Compile(job.trace, library))
                batch.compiling[worker] = Compiling(job, library, time.monotonic() + limit_s)
            except WorkerGone as error:
                yield from self._compiler_gone(batch, job, error)

    def _feed_drivers(self, batch: Batch) -> None:
        for driver in [d for d in self._processes.drivers if d not in batch.measuring and d.alive()]:
            if not batch.ready:
                return
            with contextlib.suppress(WorkerDied):  # then it is replaced at the next look
                driver.send(self._request(batch.ready[0], batch))
                batch.measuring[driver] = Measuring(batch.ready.popleft(), sent=time.monotonic())

    def _request(self, candidate: ReadyToRun, batch: Batch) -> Measure:
        config, best_s = self._config, batch.best.get(candidate.job.subgraph_id)
        return Measure(
            candidate.library,
            candidate.params,
            config.repeats,
            config.min_repeat_s,
            slow_above_s=None if best_s is None else config.slow_factor * best_s,
            limit_s=config.run_timeout_s,
        )

    def _compiled(self, batch: Batch, worker: Worker) -> Iterator[Measurement]:
        """A compiler answered, died, or is late."""
        task = batch.compiling.pop(worker)
        late = task.deadline <= time.monotonic()
        try:
            reply = worker.receive(Compiled, 0 if late else self._config.build_timeout_s)
        except WorkerGone as error:
            yield from self._compiler_gone(batch, task.job, error)
            return
        if isinstance(reply, Failed):
            yield self._failure(task.job, Status.BUILD_ERROR, reply.error)
        else:
            batch.ready.append(ReadyToRun(task.job, task.library, reply.params, reply.build_s))

    def _compiler_gone(self, batch: Batch, job: Job, error: WorkerGone) -> Iterator[Measurement]:
        if error.from_outside and batch.another_chance(job):
            batch.pending.appendleft(job)
        else:
            yield self._failure(job, error.status, f"while compiling: {error}")

    def _measured(self, batch: Batch, driver: Worker) -> Iterator[Measurement]:
        """A driver has its device, or an answer; or it died, or is late."""
        task, limit_s = batch.measuring[driver], self._config.run_timeout_s
        reply: Begun | Timed | Failed
        if task.begun:
            reply = self._hear(driver, Timed, task.deadline - time.monotonic())
        else:
            reply = self._hear(driver, Begun, limit_s)
        if isinstance(reply, Begun):
            task.begun = time.monotonic()
            task.deadline = task.begun + self._patience_with_device(limit_s)
            return
        del batch.measuring[driver]
        if isinstance(reply, Failed):
            batch.looked = float("-inf")  # its process may have ended: another one is started at once
        candidate, job = task.candidate, task.candidate.job
        if isinstance(reply, Failed) and reply.status is DeviceFault.LOST and batch.another_chance(job):
            batch.ready.append(candidate)
            return
        candidate.library.unlink(missing_ok=True)
        if isinstance(reply, Failed):
            run_s = time.monotonic() - task.begun if task.begun else 0.0
            yield self._failed_to_run(candidate, reply, run_s)
            return
        batch.best[job.subgraph_id] = min(batch.best.get(job.subgraph_id, float("inf")), *reply.latencies)
        yield measured(
            job, Status.OK, reply.latencies, None, candidate.build_s, reply.run_s, device=reply.device,
            conditions=self.conditions,
        )  # fmt: skip

    def _failed_to_run(self, candidate: ReadyToRun, reply: Failed, run_s: float) -> Measurement:
        status, error = reply.status, f"while running: {reply.error}"
        if isinstance(status, DeviceFault):
            status, error = Status.CRASH, f"{error} (its device was lost {CHANCES} times)"
        return self._failure(candidate.job, status, error, candidate.build_s, run_s)

    def _failure(self, job: Job, status: Status, error: str, build_s: float = 0.0, run_s: float = 0.0) -> Measurement:
        return measured(job, status, [], error, build_s, run_s, device="", conditions=self.conditions)

    # One question at a time.

    def compare(
        self, workload: str, traces: Sequence[str], repeats: int, *, baseline: str | None
    ) -> tuple[list[list[float]], list[float]]:
        """See `Pool.compare`; all on one device."""
        around = [] if baseline is None else [len(traces)]
        everything = [*traces, *([] if baseline is None else [baseline])]
        with self._compiled_all(workload, everything, pack=False) as built:
            order = [*around, *list(range(len(traces))) * repeats, *around]
            latencies = self._time_interleaved(built, order)
            if not all(latencies):  # one of them is to blame: each alone, so that it spoils no other
                latencies = [self._time_interleaved([each], [0] * order.count(n))[0] for n, each in enumerate(built)]
        return latencies[: len(traces)], [latency for n in around for latency in latencies[n]]

    def check(self, workload: str, trace: str, timeout_s: float) -> float | None:
        """See `Pool.check`."""
        with self._compiled_all(workload, [EMPTY_TRACE, trace], pack=True) as (untuned, tuned):
            if untuned is None or tuned is None:
                return None
            reply = self._ask_device(CheckLibraries((untuned[0], tuned[0]), untuned[1], timeout_s), timeout_s)
            return None if isinstance(reply, Failed) else reply.max_error

    @contextmanager
    def models(self, timeout_s: float) -> Iterator[WorkerSession]:
        """See `Pool.models`."""
        self.close()
        driver = self._processes.a_driver()
        try:
            reply: Begun | Done | Failed = self._begin(driver, BeginSession(_LONG_OPERATIONS * timeout_s))
            if isinstance(reply, Begun):
                reply = self._hear(driver, Done, self._config.build_timeout_s)
            if isinstance(reply, Failed):
                raise DeviceError(f"A device was given, but cannot be used: {reply.error}")
            yield WorkerSession(driver, timeout_s)
        finally:
            self.close()

    def _time_interleaved(self, built: Sequence[_Library | None], order: Sequence[int]) -> list[list[float]]:
        """Latencies of each; empty lists if one of them fails."""
        libraries = [each for each in built if each is not None]
        if len(libraries) < len(built):
            return [[] for _ in built]
        limit_s = self._config.run_timeout_s * (2 + len(order) // self._config.repeats)
        paths, params = tuple(path for path, _ in libraries), libraries[0][1]
        reply = self._ask_device(Compare(paths, tuple(order), params, self._config.min_repeat_s, limit_s), limit_s)
        return [[] for _ in built] if isinstance(reply, Failed) else [list(found) for found in reply.latencies]

    @contextmanager
    def _compiled_all(self, workload: str, traces: Sequence[str], *, pack: bool) -> Iterator[list[_Library | None]]:
        """Library and parameters of each program, while they are needed; None for what does not compile."""
        built: list[_Library | None] = []
        try:
            while len(built) < len(traces):
                built += self._compiled_together(workload, traces[len(built) :], pack=pack)
            yield built
        finally:
            for each in built:
                if each:
                    each[0].unlink(missing_ok=True)

    def _compiled_together(self, workload: str, traces: Sequence[str], *, pack: bool) -> list[_Library | None]:
        """As many of them as there are compilers, at least one."""
        self._processes.start_compilers()
        begun = [
            self._begun(worker, workload, Compile(trace, self._processes.new_library(), pack))
            for worker, trace in zip(self._processes.compilers, traces, strict=False)
        ]
        return [self._ended(*each) if each else None for each in begun]

    def _begun(self, worker: Worker, workload: str, request: Compile) -> tuple[Worker, Path] | None:
        """Who compiles, and what; None if it ended."""
        try:
            worker.define(workload, self._config.build_timeout_s)
            worker.send(request)
        except WorkerGone:
            return None
        return worker, request.library

    def _ended(self, worker: Worker, library: Path) -> _Library | None:
        try:
            reply = worker.receive(Compiled, self._config.build_timeout_s)
        except WorkerGone:
            return None
        return None if isinstance(reply, Failed) else (library, reply.params)

    # A device.

    def _ask_device(self, request: Request[R], limit_s: float) -> R | Failed:
        """The answer of a device; asked again, of another one if there is, where the device was lost."""
        kind, patience_s = answer_type(request), self._patience_with_device(limit_s)
        reply: R | Failed = Failed(DeviceFault.LOST, "")
        for _ in range(CHANCES):
            driver = self._processes.a_driver()
            begun = self._begin(driver, request)
            reply = self._hear(driver, kind, patience_s) if isinstance(begun, Begun) else begun
            if not (isinstance(reply, Failed) and reply.status is DeviceFault.LOST):
                break
        return reply

    def _begin(self, driver: Worker, request: Request[Any]) -> Begun | Failed:
        """Wait until a device is ours."""
        try:
            driver.send(request)
            reply = driver.receive(Begun, self._config.device_patience_s)
        except WorkerTimeout:
            raise self._processes.no_device() from None
        except WorkerDied as error:
            return Failed(DeviceFault.LOST, str(error))
        return self._understood(driver, reply)

    def _hear(self, driver: Worker, kind: type[R], timeout_s: float) -> R | Failed:
        """What a driver says; a driver that dies, or is late, says so of its candidate."""
        try:
            reply = driver.receive(kind, max(timeout_s, 0.0))
        except WorkerGone as error:
            lost = self._fleet.keeps_limits or error.from_outside
            reply = Failed(DeviceFault.LOST if lost else error.status, str(error))
        return self._understood(driver, reply)

    def _understood(self, driver: Worker, reply: R | Failed) -> R | Failed:
        """The same, when it is known what it says of the device."""
        if isinstance(reply, Failed):
            if reply.status is DeviceFault.UNFIT:
                raise DeviceError(reply.error)
            if not self._fleet.keeps_limits:
                driver.kill()  # an illegal access leaves CUDA unusable for the rest of the process
        if not isinstance(reply, Begun):
            lost = reply.error if isinstance(reply, Failed) and reply.status is DeviceFault.LOST else ""
            self._fleet.report(self._processes.drivers[driver], lost)
        return reply

    def _patience_with_device(self, limit_s: float) -> float:
        return limit_s + (_GRACE_S if self._fleet.keeps_limits else 0.0)
