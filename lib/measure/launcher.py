"""Starts worker processes: asks the process `launch`, which they are forked from and which begins with the first."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from lib.contracts.errors import DeviceError
from lib.measure.launch import Start

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 120.0  # with an answer; the first comes when TVM is loaded
_REFUSED = "No worker process could be started: {}. What was measured is kept; the same command continues."


class Process:
    """A worker process: its number, and what became of it."""

    def __init__(self, server: "_Server", pid: int) -> None:
        self._server, self.pid = server, pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; none while it lives."""
        return self._exit_code(wait=False)

    def wait(self) -> int:
        """Block until it has ended; the exit code."""
        code = self._exit_code(wait=True)
        assert code is not None
        return code

    def _exit_code(self, *, wait: bool) -> int | None:
        if self._code is None:
            self._code = self._server.exit_code(self.pid, wait=wait)
        return self._code


def start(
    module: str, *arguments: str, connection: socket.socket, output: IO[bytes], environment: Mapping[str, str],
    memory_bytes: int, afresh: bool = False,
) -> Process:  # fmt: skip
    """Start a worker process; see `Start`. It ends with this one.

    Raises:
        DeviceError: The process that it is forked from does not come up, or the system lets it fork none.
    """
    order = Start(module, arguments, {**os.environ, **environment}, memory_bytes, afresh)
    for last_chance in (False, True):
        server = _server()
        try:
            return Process(server, server.start(order, [connection.fileno(), output.fileno()]))
        except OSError as error:
            reason = server.bury()
            if last_chance:
                raise DeviceError(_REFUSED.format(reason)) from error
    raise AssertionError


def prepare() -> None:
    """Begin to load what workers need, beside whatever this process does: the first of them is there at once then."""
    _server()


class _Server:
    """The process `launch`, for one process: a fork of that has one of its own."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        ours.settimeout(_PATIENCE_S)  # late is an OSError as well
        self._socket, self._output = ours, tempfile.TemporaryFile()  # noqa: SIM115
        self._lock, self._reason, self._owner = threading.Lock(), "", os.getpid()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lib.measure.launch", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=self._output,
                stderr=self._output, start_new_session=True,
            )  # fmt: skip

    def start(self, order: Start, descriptors: list[int]) -> int:
        """Number of a new process.

        Raises:
            OSError: This one has ended, or does not answer.
            DeviceError: The system lets no process begin.
        """
        with self._lock:
            line = order.line()
            sent = socket.send_fds(self._socket, [line], descriptors)
            self._socket.sendall(line[sent:])
            reply = self._reply()
        if isinstance(reply, str):
            raise DeviceError(_REFUSED.format(reply))
        return int(reply)

    def exit_code(self, pid: int, *, wait: bool) -> int | None:
        """Of a process that was started here: all are killed when this one ends."""
        try:
            with self._lock:
                self._socket.sendall(json.dumps({"pid": pid, "wait": wait}).encode() + b"\n")
                code = self._reply()
        except OSError:
            self.bury()  # an answer that came late would be taken for the next one
            return -signal.SIGKILL
        return None if code is None else int(code)

    def _reply(self) -> Any:
        line = b""
        while not line.endswith(b"\n"):
            data = self._socket.recv(1 << 10)
            if not data:
                raise ConnectionError("the process that starts workers ended")
            line += data
        return json.loads(line)

    def alive(self) -> bool:
        """Whether it can be asked by this process."""
        return self._owner == os.getpid() and self._socket.fileno() >= 0 and self._process.poll() is None

    def bury(self) -> str:
        """End it, unless it is that of a process that this one is a fork of; the last that it printed, or its end."""
        with self._lock if self._owner == os.getpid() else contextlib.nullcontext():
            if self._socket.fileno() >= 0:
                self._socket.close()
                if self._owner == os.getpid():
                    self._process.kill()  # of no effect if it has ended
                    code = self._process.wait()
                    self._output.seek(0)
                    said = self._output.read().decode(errors="replace").strip().splitlines()
                    self._reason = said[-1][:300] if said else f"the process `launch` ended with exit code {code}"
                self._output.close()
            return self._reason


_running: list[_Server] = []  # the one, if any
_starting = threading.Lock()


def _server() -> _Server:
    with _starting:
        if _running and not _running[0].alive():
            _running.pop().bury()
        if not _running:
            _running.append(_Server())
        return _running[0]


@atexit.register
def _end() -> None:
    while _running:
        _running.pop().bury()
