"""The local CPU pool: warm worker processes, candidates compiled side by side and timed one at a time."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib import host, targets
from lib.clock import Clock
from lib.errors import DeviceError
from lib.runner import Job, MeasureConfig, Measurement

_ROOT = Path(__file__).parent.parent
_START_TIMEOUT_S = 120.0


class WorkerDied(Exception):
    """The worker process ended before it answered; the text says how."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.from_outside = code == -signal.SIGKILL  # a person, or the kernel out of memory


class WorkerTimeout(Exception):
    """The worker did not answer in time, and was killed."""


class Worker:
    """One worker process, and the limits it cannot keep itself."""

    def __init__(
        self,
        target: targets.AnyTarget,
        *arguments: str,
        module: str = "lib.worker",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a process.

        Args:
            module: What it runs; gets the socket's descriptor, the target, and `arguments`.
            environment: Added to this process's own.
        """
        ours, theirs = socket.socketpair()
        self._socket, self._buffer = ours, bytearray()
        self._output = tempfile.TemporaryFile()  # what LLVM or a crashing kernel prints  # noqa: SIM115
        environment = {
            **os.environ,
            **(environment or {}),
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            "TVM_NUM_THREADS": str(target.threads),  # else TVM uses half the cores: measured is not deployed
        }
        command = [sys.executable, "-m", module, str(theirs.fileno()), target.text, *arguments]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL,
            stdout=self._output, stderr=self._output, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self.builds = 0
        self.workload = ""

    def fileno(self) -> int:
        """For `select`: readable when an answer, or the end, has come."""
        return self._socket.fileno()

    def alive(self) -> bool:
        """Whether it can be asked something."""
        return self._process.poll() is None and self._socket.fileno() >= 0

    def wait_until_ready(self) -> None:
        """Block until the process has loaded TVM.

        Raises:
            WorkerDied: It ended instead.
            WorkerTimeout: It did not come up.
        """
        self.receive(_START_TIMEOUT_S)

    def send(self, request: dict[str, Any]) -> None:
        """Ask for something; exactly one answer follows."""
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            raise self._obituary() from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the answer.

        Raises:
            WorkerDied: The process ended.
            WorkerTimeout: It was killed for being late.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                raise WorkerTimeout("killed for taking too long" + (f": {timeout_s:g} s" if timeout_s else ""))
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                raise self._obituary()
            self._buffer += data
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return dict(json.loads(line))

    def ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Send and receive."""
        self.send(request)
        return self.receive(timeout_s)

    def send_build(self, job: Job, timeout_s: float, **request: Any) -> None:
        """Ask to build a candidate, whose workload is made known before if it is another than the last one."""
        self.builds += 1
        if self.workload != job.subgraph_id:
            self.workload = job.subgraph_id
            self.ask(timeout_s, do="define", workload_id=job.subgraph_id, workload=job.workload)
        self.send({**request, "workload_id": job.subgraph_id, "trace": job.trace})

    def pause(self) -> None:
        """Stop the process until `resume`: TVM's idle threads would go on spinning for some 0.3 s."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process and all it started; safe to call twice."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._socket.close()
        self._output.close()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _obituary(self) -> WorkerDied:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._output.seek(0)
        said = self._output.read().decode(errors="replace").strip().splitlines()
        self.kill()
        return WorkerDied(f"worker ended with {how}" + (f": {said[-1][:300]}" if said else ""), code)


def measured(
    job: Job,
    status: str,
    latencies: Sequence[float],
    error: str | None,
    build_s: float,
    run_s: float,
    *,
    device: str,
    threads: int,
) -> Measurement:
    """A row of MEASUREMENTS for what is known now, on this host."""
    return Measurement(
        job.candidate_id, job.subgraph_id, status, list(latencies), error, build_s, run_s, time.time(),
        host.hostname(), device, threads, host.versions(),
    )  # fmt: skip


def start_all(make: Sequence[Callable[[], Worker]]) -> list[Worker]:
    """Start workers side by side.

    Raises:
        DeviceError: One of them did not come up.
    """
    fresh = [start() for start in make]
    for worker in fresh:
        try:
            worker.wait_until_ready()
        except (WorkerDied, WorkerTimeout) as error:
            for other in fresh:
                other.kill()
            raise DeviceError(
                f"No worker process could be started: {error}. What was measured is kept; the same command continues."
            ) from error
    return fresh


class LocalPool:
    """Runs candidates on this CPU.

    Work alternates between two phases, since nothing else may run while a kernel is timed: all workers
    compile, each on one core; then one program after the other is timed on all cores.
    """

    def __init__(self, target: targets.AnyTarget, config: MeasureConfig) -> None:
        self._target, self._config = target, config
        self._workers: list[Worker] = []
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
                for worker, done in built:
                    with _alone(worker, self._workers):
                        yield from self._time_phase(worker, done, best, pending)

    def compare(
        self, workload: str, traces: Sequence[str], repeats: int, *, baseline: str | None
    ) -> tuple[list[list[float]], list[float]]:
        """See `Pool.compare`."""
        before = self._in_turn(workload, [baseline], 1)[0] if baseline is not None else []
        latencies = self._in_turn(workload, traces, repeats)
        after = self._in_turn(workload, [baseline], 1)[0] if baseline is not None and before else []
        return latencies, before + after

    def _in_turn(self, workload: str, traces: Sequence[str], repeats: int) -> list[list[float]]:
        worker = self._healthy_workers()[0]
        with _alone(worker, self._workers):
            try:
                return self._in_turn_on(worker, workload, traces, repeats)
            except (WorkerDied, WorkerTimeout):
                pass
        # One of them is to blame: each alone, so that it spoils no other.
        return [self._in_turn(workload, [trace], repeats)[0] for trace in traces] if len(traces) > 1 else [[]]

    def _in_turn_on(self, worker: Worker, workload: str, traces: Sequence[str], repeats: int) -> list[list[float]]:
        config = self._config
        latencies: list[list[float]] = [[] for _ in traces]
        numbers: dict[int, int] = {}
        worker.workload = ""
        worker.ask(config.build_timeout_s, do="define", workload_id="compared", workload=workload)
        for n, trace in enumerate(traces):
            worker.ask(config.build_timeout_s, do="build", candidate_id=str(n), workload_id="compared", trace=trace)
        for n in list(range(len(traces))) * repeats:
            reply = worker.ask(
                config.run_timeout_s, do="time", candidate_id=str(n), repeats=1, min_repeat_s=config.min_repeat_s,
                slow_above_s=float("inf"), number=numbers.get(n, 0), cold_weights=config.weights == "cold",
            )  # fmt: skip
            if "error" not in reply:
                numbers[n] = reply["number"]
                latencies[n] += reply["latencies"]
        worker.ask(config.build_timeout_s, do="drop")
        return latencies

    def check(self, workload: str, trace: str, timeout_s: float) -> float | None:
        """See `Pool.check`."""
        worker = self._healthy_workers()[0]
        try:
            worker.workload = ""
            worker.ask(timeout_s, do="define", workload_id="checked", workload=workload)
            reply = worker.ask(timeout_s, do="check", workload_id="checked", trace=trace)
        except (WorkerDied, WorkerTimeout):
            return None
        return reply.get("max_error")

    @contextlib.contextmanager
    def models(self, _limit_s: float) -> Iterator[Worker]:
        """See `Pool.models`: all other workers end, so that nothing runs beside it."""
        self.close()
        [worker] = start_all([lambda: Worker(self._target)])
        try:
            yield worker
        finally:
            worker.kill()

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _healthy_workers(self) -> list[Worker]:
        """One worker for each thread of the target, started if need be."""
        for worker in self._workers:
            if worker.builds >= self._config.recycle_after or not worker.alive():
                worker.kill()
        self._workers = [worker for worker in self._workers if worker.alive()]
        missing = self._target.threads - len(self._workers)
        self._workers += start_all([lambda: Worker(self._target)] * missing)
        return self._workers

    def _build_phase(
        self, workers: list[Worker], pending: deque[Job]
    ) -> tuple[list[tuple[Worker, list[tuple[Job, float]]]], list[Measurement]]:
        """Compile the next jobs on all workers at once; what a dying worker had built goes back to `pending`."""
        built: dict[Worker, list[tuple[Job, float]]] = {worker: [] for worker in workers}
        failed: list[Measurement] = []
        busy: dict[Worker, tuple[Job, float]] = {}  # what it builds, and until when
        limit, ahead = self._config.build_timeout_s, self._config.builds_ahead
        while True:
            for worker in list(built):
                if worker in busy or not pending or len(busy) + sum(map(len, built.values())) >= ahead:
                    continue
                job = pending.popleft()
                try:
                    worker.send_build(job, limit, do="build", candidate_id=job.candidate_id)
                    busy[worker] = (job, time.monotonic() + limit)
                except (WorkerDied, WorkerTimeout) as error:
                    self._bury(job, error, "compiling", built.pop(worker), pending, failed)
            if not busy:
                return list(built.items()), failed
            first_deadline = min(deadline for _, deadline in busy.values())
            ready, _, _ = select.select(list(busy), [], [], max(0.0, first_deadline - time.monotonic()))
            for worker in [w for w in busy if w in ready or busy[w][1] <= time.monotonic()]:
                job, _ = busy.pop(worker)
                try:
                    reply = worker.receive(limit if worker in ready else 0)
                except (WorkerDied, WorkerTimeout) as error:
                    self._bury(job, error, "compiling", built.pop(worker), pending, failed)
                    continue
                if "error" in reply:
                    failed.append(self._measurement(job, "build_error", [], reply["error"], 0.0, 0.0))
                else:
                    built[worker].append((job, reply["build_s"]))

    def _time_phase(
        self, worker: Worker, built: list[tuple[Job, float]], best: dict[str, float], pending: deque[Job]
    ) -> Iterator[Measurement]:
        """Time what a worker built, one program at a time, with nothing else running."""
        config = self._config
        while built:
            job, build_s = built.pop(0)
            start = time.monotonic()
            try:
                with self._clock.spent("run"):
                    reply = worker.ask(
                        config.run_timeout_s, do="time", candidate_id=job.candidate_id, repeats=config.repeats,
                        min_repeat_s=config.min_repeat_s, cold_weights=config.weights == "cold",
                        slow_above_s=config.slow_factor * best.get(job.subgraph_id, float("inf")),
                    )  # fmt: skip
            except (WorkerDied, WorkerTimeout) as error:
                failed: list[Measurement] = []
                self._bury(job, error, "running", built, pending, failed, build_s, time.monotonic() - start)
                yield from failed
                return
            if "error" in reply:
                yield self._measurement(job, "run_error", [], reply["error"], build_s, time.monotonic() - start)
                continue
            latencies = reply["latencies"]
            best[job.subgraph_id] = min(best.get(job.subgraph_id, float("inf")), *latencies)
            yield self._measurement(job, "ok", latencies, None, build_s, reply["run_s"])
        with contextlib.suppress(WorkerDied, WorkerTimeout):  # then nothing is left to drop
            worker.ask(config.build_timeout_s, do="drop")

    def _bury(
        self,
        job: Job,
        error: WorkerDied | WorkerTimeout,
        doing: str,
        built: Sequence[tuple[Job, float]],
        pending: deque[Job],
        failed: list[Measurement],
        build_s: float = 0.0,
        run_s: float = 0.0,
    ) -> None:
        """A worker ended with a job: that failed, and what else the worker had built is to be built again.

        SIGKILL comes from outside (a person, or the kernel out of memory): the job gets another chance then, on
        each worker at most, since all of them may have been killed at once.
        """
        pending.extendleft(other for other, _ in reversed(built))
        died = isinstance(error, WorkerDied)
        if isinstance(error, WorkerDied) and error.from_outside:
            self._spared[job.candidate_id] += 1
            if self._spared[job.candidate_id] <= self._target.threads:
                pending.appendleft(job)
                return
        text = f"while {doing}: {error}"
        failed.append(self._measurement(job, "crash" if died else "timeout", [], text, build_s, run_s))

    def _measurement(
        self, job: Job, status: str, latencies: list[float], error: str | None, build_s: float, run_s: float
    ) -> Measurement:
        return measured(
            job, status, latencies, error, build_s, run_s, device=host.cpu_name(), threads=self._target.threads
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
