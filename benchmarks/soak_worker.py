"""The worker process of `soak_runs.py`: that of the tuner, but each request may go wrong."""

import ctypes
import os
import random
import signal
import time
from typing import Any, NoReturn

from lib.measure import connection, wire, worker
from lib.measure.protocol import Request

FAULTS = ("exit", "segfault", "killed", "all killed", "hang", "raises", "no memory", "half an answer")

_rng, _share = random.Random(os.getpid()), float(os.environ["SOAK_FAULT"])  # this module is loaded after the fork
_encode = wire.encode


def fail(how: str) -> NoReturn:
    """Do something else than answer."""
    if how == "exit":
        os._exit(3)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "all killed":  # the process that workers are forked from, and with it all of them
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)
    if how == "hang":
        time.sleep(3600)
    if how == "no memory":
        raise MemoryError("injected")
    raise RuntimeError("injected")


def _faulty(handlers: connection.Handlers) -> connection.Handlers:
    def wrapped(handler: Any) -> Any:
        def answer(request: Request[Any]) -> Any:
            if _rng.random() < _share:
                how = _rng.choice(FAULTS)
                if how == "half an answer":
                    wire.encode = lambda message: _encode(message)[:7]
                else:
                    fail(how)
            return handler(request)

        return answer

    return {kind: wrapped(handler) for kind, handler in handlers.items()}


class _Connection(connection.Connection):
    def serve(self, handlers: connection.Handlers, explain: connection.Explain = lambda _error: None) -> None:
        super().serve(_faulty(handlers), explain)


def main(descriptor: int, target_text: str) -> None:
    """As `worker.main`."""
    worker.Connection = _Connection  # type: ignore[attr-defined]
    worker.main(descriptor, target_text)
