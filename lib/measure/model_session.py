"""Whole models in a worker process, asked one operation at a time."""

from pathlib import Path

from lib.measure.process import Worker, WorkerGone
from lib.measure.protocol import Failed, Infer, OpenLibrary, R, Request, TimeLibrary
from lib.measure.runner import ModelFailed


class WorkerSession:
    """A `runner.ModelSession` in a worker that was started for it, or in a driver that has its device."""

    def __init__(self, worker: Worker, timeout_s: float) -> None:
        self._worker, self._timeout_s = worker, timeout_s

    def open_library(self, name: str, library: Path, params: Path, inputs: Path) -> None:
        self._ask("open_library", OpenLibrary(name, library, params, inputs))

    def infer(self, name: str, out: Path) -> float:
        return self._ask("infer", Infer(name, out)).latency_s

    def time(self, name: str, seconds: float) -> float:
        return self._ask("time_library", TimeLibrary(name, seconds)).latency_s

    def _ask(self, operation: str, request: Request[R]) -> R:
        try:
            reply = self._worker.ask(request, self._timeout_s)
        except WorkerGone as error:
            raise ModelFailed(operation, str(error)) from error
        if isinstance(reply, Failed):
            raise ModelFailed(operation, reply.error)
        return reply
