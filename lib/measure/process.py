"""Worker processes, seen from the process that started them: asked, waited for, stopped, and buried."""

import contextlib
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lib.contracts.errors import DeviceError, ProtocolError
from lib.contracts.statuses import Status
from lib.machine import targets
from lib.measure import launcher, wire
from lib.measure.protocol import Build, Compile, Define, Failed, R, Ready, Refused, Request, answer_type

_START_TIMEOUT_S = 120.0
_CHANCES = 2  # for a worker that is killed while it starts, before the run stops


class WorkerGone(Exception):
    """The process ended before it answered; the text says how."""

    status: Status  # of the candidate it had
    from_outside = False  # killed by a person, or by the kernel out of memory


class WorkerDied(WorkerGone):
    """It ended by itself, or was killed from outside."""

    status = Status.CRASH

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.from_outside = code == -signal.SIGKILL


class WorkerTimeout(WorkerGone):
    """It did not answer in time, and was killed."""

    status = Status.TIMEOUT


class Worker:
    """One worker process, and the limits it cannot keep itself."""

    def __init__(
        self,
        target: targets.AnyTarget,
        *arguments: str,
        module: str = "lib.measure.worker",
        environment: Mapping[str, str] | None = None,
        memory_bytes: int = 0,
        afresh: bool = False,
    ) -> None:
        """Start a process.

        Args:
            module: Whose `main` it runs, with the socket's descriptor, the target, and `arguments`.
            environment: Added to this process's own.
            memory_bytes: What it may have of it, see `launch.limit_memory`; 0: all there is.
            afresh: It uses CUDA, see `launch`.

        Raises:
            DeviceError: No process can be started.
        """
        ours, theirs = socket.socketpair()
        self._socket, self._buffer = ours, bytearray()
        self._output = tempfile.TemporaryFile()  # what LLVM or a crashing kernel prints  # noqa: SIM115
        # Else TVM uses half the cores: what is measured would not be what is deployed.
        environment = {**(environment or {}), "TVM_NUM_THREADS": str(target.threads)}
        if target.kind == "cuda":  # TVM's default compiler, NVRTC, needs a package that TVM does not depend on
            environment["TVM_CUDA_COMPILE_MODE"] = os.environ.get("TVM_CUDA_COMPILE_MODE", "nvcc")
        try:
            self._process = launcher.start(
                module, target.text, *arguments, connection=theirs, output=self._output, environment=environment,
                memory_bytes=memory_bytes, afresh=afresh,
            )  # fmt: skip
        except DeviceError:
            ours.close()
            self._output.close()
            raise
        finally:
            theirs.close()
        self._workload = ""  # the text of the one that is defined
        self.builds = 0

    def fileno(self) -> int:
        """For `select`: readable when an answer, or the end, has come."""
        return self._socket.fileno()

    def alive(self) -> bool:
        """Whether it can be asked something."""
        return self._process.poll() is None and self._socket.fileno() >= 0

    def wait_until_ready(self) -> None:
        """Block until the process has loaded TVM.

        Raises:
            WorkerGone: It ended instead, or did not come up.
        """
        self.receive(Ready, _START_TIMEOUT_S)

    def ask(self, request: Request[R], timeout_s: float) -> R | Failed:
        """Send a request and wait for the answer.

        Raises:
            WorkerGone: The process ended, or was killed for being late.
            ProtocolError: It does not speak as this process does.
        """
        self.send(request)
        return self.receive(answer_type(request), timeout_s)

    def define(self, workload: str, timeout_s: float) -> None:
        """Make the workload known that later traces apply to; nothing is sent if it is the one that was defined last.

        Args:
            workload: JSON of its IRModule. If it does not load, what is built from it fails.

        Raises:
            WorkerGone, ProtocolError: As `ask`.
        """
        if workload != self._workload:
            self._workload = ""
            self.ask(Define(workload), timeout_s)
            self._workload = workload

    def send(self, request: Request[Any]) -> None:
        """Ask for something; its answer is to be received.

        Raises:
            WorkerDied: The process ended.
        """
        if isinstance(request, (Build, Compile)):
            self.builds += 1
        try:
            self._socket.sendall(wire.encode(request))
        except OSError:
            raise self._obituary() from None

    def answered(self) -> bool:
        """Whether an answer was read already, together with the one before: `select` does not see it."""
        return b"\n" in self._buffer

    def receive(self, kind: type[R], timeout_s: float) -> R | Failed:
        """Wait for a reply, which is of this kind unless something failed.

        Raises:
            WorkerGone, ProtocolError: As `ask`.
        """
        reply = wire.decode_reply(self._line(timeout_s))
        if isinstance(reply, Refused):
            raise ProtocolError(f"A worker process refused a request: {reply.error}. {_ADVICE}")
        if not isinstance(reply, (kind, Failed)):
            raise ProtocolError(f"A worker process sent {reply} where {kind.__name__} was due. {_ADVICE}")
        return reply

    def _line(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while not self.answered():
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
        return line

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
                try:
                    os.killpg(self._process.pid, number)
                except ProcessLookupError:  # it has just begun, and is in no group of its own yet
                    os.kill(self._process.pid, number)

    def _obituary(self) -> WorkerDied:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._output.seek(0)
        said = self._output.read().decode(errors="replace").strip().splitlines()
        self.kill()
        return WorkerDied(f"worker ended with {how}" + (f": {said[-1][:300]}" if said else ""), code)


_ADVICE = "If the code was changed while the command ran, start the command again."


def living(workers: Iterable[Worker]) -> list[Worker]:
    """Those that can be asked something; what the others left is closed."""
    alive = {worker: worker.alive() for worker in workers}  # asked once: one may die in between
    for worker in alive:
        if not alive[worker]:
            worker.kill()
    return [worker for worker in alive if alive[worker]]


def start_all(make: Sequence[Callable[[], Worker]]) -> list[Worker]:
    """Start workers side by side.

    Raises:
        DeviceError: One of them did not come up, however often.
    """
    fresh = [start() for start in make]
    for n, start in enumerate(make):
        try:
            fresh[n] = _ready(fresh[n], start)
        except WorkerGone as error:
            for each in fresh:
                each.kill()
            raise DeviceError(
                f"No worker process could be started: {error}. What was measured is kept; the same command continues."
            ) from error
    return fresh


def _ready(worker: Worker, start: Callable[[], Worker]) -> Worker:
    """The worker, or another one if somebody killed it while it started."""
    for _ in range(_CHANCES):
        try:
            worker.wait_until_ready()
            return worker
        except WorkerDied as error:
            if not error.from_outside:
                raise
            worker.kill()
            worker = start()
    worker.wait_until_ready()
    return worker


def answered_or_late(deadlines: Mapping[Worker, float], look_again: float = float("inf")) -> list[Worker]:
    """Wait until a worker has answered, ended, or is past its deadline; or until it is time to look at other things.

    Args:
        deadlines: Of each worker that was asked something; these and `look_again` in seconds of `time.monotonic`.
    """
    if not any(worker.answered() for worker in deadlines):
        until = min([*deadlines.values(), look_again])
        heard, _, _ = select.select(list(deadlines), [], [], max(0.0, until - time.monotonic()))
    else:
        heard = [worker for worker in deadlines if worker.answered()]
    return [worker for worker, deadline in deadlines.items() if worker in heard or deadline <= time.monotonic()]
