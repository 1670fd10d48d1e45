"""The local CPU pool: warm worker processes, candidates compiled side by side and timed one at a time."""

import contextlib
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lib.contracts.clock import Clock
from lib.contracts.statuses import Status
from lib.machine import host, targets
from lib.measure import identity
from lib.measure.model_session import WorkerSession
from lib.measure.process import Worker, WorkerGone, WorkerTimeout, answered_or_late, living, start_all
from lib.measure.protocol import Build, Built, Check, Drop, Failed, Time
from lib.measure.runner import Job, MeasureConfig, Measurement, measured
from lib.rpc_server import scratch_folder


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A job that was built, and waits in its worker to be timed."""

    job: Job
    build_s: float


class LocalPool:
    """Runs candidates on this CPU.

    Work alternates between two phases, since nothing else may run while a kernel is timed: all workers
    compile, each on one core; then one program after the other is timed on all cores.
    """

    def __init__(self, target: targets.AnyTarget, config: MeasureConfig) -> None:
        self._target, self._config = target, config
        self.runs = target
        self.conditions = identity.conditions(target, host.cpu_name(), config.weights)
        self._workers: list[Worker] = []
        self._scratch: Path | None = None
        # Who asks from several threads gets a worker for each; one that is timed has the machine for itself.
        self.width = target.threads
        self._lent: set[Worker] = set()
        self._lock = threading.Lock()
        self._spared: Counter[str] = Counter()  # how often a candidate's worker was killed from outside
        self._clock = Clock()

    @property
    def clock(self) -> dict[str, float]:
        """See `Runner.clock`."""
        return self._clock.by_kind()

    def run(self, jobs: Sequence[Job]) -> Iterator[Measurement]:
        """See `Runner.run`. One candidate that crashes or hangs costs its worker; the others are built again."""
        self._clock = Clock()
        self._spared.clear()
        best: dict[str, float] = {}  # of each subgraph in this batch, in seconds
        groups: dict[str, deque[Job]] = {}
        for job in jobs:
            groups.setdefault(job.subgraph_id, deque()).append(job)
        for pending in groups.values():
            while pending:
                with self._clock.spent("start"):
                    workers = self._healthy_workers()
                with self._clock.spent("build"):
                    built, failed = self._build_phase(workers, pending)
                yield from failed
                for worker, candidates in built.items():
                    with _alone(worker, self._workers):
                        yield from self._time_phase(worker, candidates, best, pending)

    def compare(
        self, workload: str, traces: Sequence[str], repeats: int, *, baseline: str | None
    ) -> tuple[list[list[float]], list[float]]:
        """See `Pool.compare`."""
        before = self._interleaved(workload, [baseline], 1)[0] if baseline is not None else []
        latencies = self._interleaved(workload, traces, repeats)
        after = self._interleaved(workload, [baseline], 1)[0] if baseline is not None and before else []
        return latencies, before + after

    def _interleaved(self, workload: str, traces: Sequence[str], repeats: int) -> list[list[float]]:
        try:
            with self._a_worker() as worker:
                self._build_all(worker, workload, traces)
                with self._lock, _alone(worker, self._workers):
                    return self._time_in_turn(worker, len(traces), repeats)
        except WorkerGone:
            pass
        # One of them is to blame: each alone, so that it spoils no other.
        return [self._interleaved(workload, [trace], repeats)[0] for trace in traces] if len(traces) > 1 else [[]]

    def _build_all(self, worker: Worker, workload: str, traces: Sequence[str]) -> None:
        limit_s = 2 * self._config.build_timeout_s  # it may have to stand still while another one times
        worker.define(workload, limit_s)
        for n, trace in enumerate(traces):
            # As what is chosen will be compiled. One that fails fails to be timed, too.
            worker.ask(Build(str(n), trace, as_shipped=True), limit_s)

    def _time_in_turn(self, worker: Worker, count: int, repeats: int) -> list[list[float]]:
        """Latencies of what a worker has built, A B C A B C ...; empty lists for what does not run."""
        config = self._config
        latencies: list[list[float]] = [[] for _ in range(count)]
        numbers: dict[int, int] = {}
        for n in list(range(count)) * repeats:
            request = Time(
                str(n), 1, config.min_repeat_s, number=numbers.get(n, 0), cold_weights=config.weights == "cold"
            )
            reply = worker.ask(request, config.run_timeout_s)
            if not isinstance(reply, Failed):
                numbers[n] = reply.number
                latencies[n] += reply.latencies
        worker.ask(Drop(), config.build_timeout_s)
        return latencies

    def check(self, workload: str, trace: str, timeout_s: float) -> float | None:
        """See `Pool.check`; what fails in a worker that did much before, say for want of memory, has a new one."""
        found = self._checked(workload, trace, timeout_s)
        if isinstance(found, str):
            with self._lock:
                for worker in self._workers:
                    if worker not in self._lent:
                        worker.kill()
            found = self._checked(workload, trace, timeout_s)
        return None if isinstance(found, str) else found

    def _checked(self, workload: str, trace: str, timeout_s: float) -> float | str | None:
        """The error; why there is none, if another worker may tell; None if not."""
        try:
            with self._a_worker() as worker:
                worker.define(workload, timeout_s)
                reply = worker.ask(Check(trace), timeout_s)
        except WorkerTimeout:
            return None
        except WorkerGone as gone:
            return str(gone)
        return reply.error if isinstance(reply, Failed) else reply.max_error

    @contextlib.contextmanager
    def _a_worker(self) -> Iterator[Worker]:
        """An idle one, for as long as a block lasts."""
        with self._lock:
            worker = next(worker for worker in self._healthy_workers() if worker not in self._lent)
            self._lent.add(worker)
        try:
            yield worker
        finally:
            with self._lock:
                self._lent.remove(worker)

    @contextlib.contextmanager
    def models(self, timeout_s: float) -> Iterator[WorkerSession]:
        """See `Pool.models`: all other workers end, so that nothing runs beside it."""
        self.close()
        [worker] = start_all([partial(self._worker, 1)])
        try:
            yield WorkerSession(worker, timeout_s)
        finally:
            worker.kill()
            self.close()

    def close(self) -> None:
        """End all workers; remove what they left."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _worker(self, among: int) -> Worker:
        """One of so many; with a folder for what its compilers leave when they are killed."""
        if self._scratch is None:
            self._scratch = scratch_folder()
        memory_bytes = host.memory_of_each(self._config.memory_share, among)
        return Worker(self._target, environment={"TMPDIR": str(self._scratch)}, memory_bytes=memory_bytes)

    def _healthy_workers(self) -> list[Worker]:
        """One worker for each thread of the target, started if need be; those that are lent are left alone."""
        idle = [worker for worker in self._workers if worker not in self._lent]
        for worker in idle:
            if worker.builds >= self._config.recycle_after:
                worker.kill()
        self._workers = [*self._lent, *living(idle)]
        missing = self._target.threads - len(self._workers)
        self._workers += start_all([partial(self._worker, self._target.threads)] * missing)
        return self._workers

    def _build_phase(
        self, workers: list[Worker], pending: deque[Job]
    ) -> tuple[dict[Worker, list[_Candidate]], list[Measurement]]:
        """Compile the next jobs on all workers at once; what a dying worker had built goes back to `pending`."""
        built: dict[Worker, list[_Candidate]] = {worker: [] for worker in workers}
        failed: list[Measurement] = []
        busy: dict[Worker, Job] = {}
        deadlines: dict[Worker, float] = {}
        limit_s, ahead = self._config.build_timeout_s, self._config.builds_ahead
        while True:
            for worker in list(built):
                if worker in busy or not pending or len(busy) + sum(map(len, built.values())) >= ahead:
                    continue
                job = pending.popleft()
                try:
                    worker.define(job.workload, limit_s)
                    worker.send(Build(job.candidate_id, job.trace))
                    busy[worker], deadlines[worker] = job, time.monotonic() + limit_s
                except WorkerGone as error:
                    failed += self._bury(job, error, "compiling", built.pop(worker), pending)
            if not busy:
                return built, failed
            for worker in answered_or_late(deadlines):
                job, late = busy.pop(worker), deadlines.pop(worker) <= time.monotonic()
                try:
                    reply = worker.receive(Built, 0 if late else limit_s)
                except WorkerGone as error:
                    failed += self._bury(job, error, "compiling", built.pop(worker), pending)
                    continue
                if isinstance(reply, Failed):
                    failed.append(self._failure(job, Status.BUILD_ERROR, reply.error))
                else:
                    built[worker].append(_Candidate(job, reply.build_s))

    def _time_phase(
        self, worker: Worker, built: list[_Candidate], best: dict[str, float], pending: deque[Job]
    ) -> Iterator[Measurement]:
        """Time what a worker built, one program at a time, with nothing else running."""
        config = self._config
        while built:
            candidate = built.pop(0)
            job, build_s = candidate.job, candidate.build_s
            best_s = best.get(job.subgraph_id)
            request = Time(
                job.candidate_id, config.repeats, config.min_repeat_s, cold_weights=config.weights == "cold",
                slow_above_s=None if best_s is None else config.slow_factor * best_s,
            )  # fmt: skip
            start = time.monotonic()
            try:
                with self._clock.spent("run"):
                    reply = worker.ask(request, config.run_timeout_s)
            except WorkerGone as error:
                yield from self._bury(job, error, "running", built, pending, build_s, time.monotonic() - start)
                return
            if isinstance(reply, Failed):
                yield self._failure(job, Status.RUN_ERROR, reply.error, build_s, time.monotonic() - start)
                continue
            self._clock.add("waited", reply.waited_s)
            best[job.subgraph_id] = min(best.get(job.subgraph_id, float("inf")), *reply.latencies)
            yield self._measurement(job, Status.OK, reply.latencies, None, build_s, reply.run_s)
        with contextlib.suppress(WorkerGone):  # then nothing is left to drop
            worker.ask(Drop(), config.build_timeout_s)

    def _bury(
        self,
        job: Job,
        error: WorkerGone,
        doing: str,
        built: Sequence[_Candidate],
        pending: deque[Job],
        build_s: float = 0.0,
        run_s: float = 0.0,
    ) -> list[Measurement]:
        """A worker ended with a job: that failed, and what else the worker had built is to be built again.

        SIGKILL comes from outside (a person, or the kernel out of memory): the job gets another chance then, on
        each worker at most, since all of them may have been killed at once.
        """
        pending.extendleft(other.job for other in reversed(built))
        if error.from_outside:
            self._spared[job.candidate_id] += 1
            if self._spared[job.candidate_id] <= self._target.threads:
                pending.appendleft(job)
                return []
        return [self._failure(job, error.status, f"while {doing}: {error}", build_s, run_s)]

    def _failure(self, job: Job, status: Status, error: str, build_s: float = 0.0, run_s: float = 0.0) -> Measurement:
        return self._measurement(job, status, [], error, build_s, run_s)

    def _measurement(
        self, job: Job, status: Status, latencies: Sequence[float], error: str | None, build_s: float, run_s: float
    ) -> Measurement:
        return measured(
            job, status, latencies, error, build_s, run_s, device=host.cpu_name(), conditions=self.conditions
        )


@contextlib.contextmanager
def _alone(worker: Worker, workers: Sequence[Worker]) -> Iterator[None]:
    """Let one worker run while the others stand still."""
    others = [other for other in workers if other is not worker]
    for other in others:
        other.pause()
    try:
        yield
    finally:
        for other in others:
            other.resume()
