"""A TVM RPC tracker with servers on loopback, started as a user would start them, and ways to hurt them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from lib.measure.tracker import Tracker

ROOT = Path(__file__).parent.parent
KEY = "test"


class Farm:
    """One tracker, and the servers that were started so far."""

    def __init__(self, servers: int = 0, cores: Sequence[str] = ()) -> None:
        """Start a tracker, so many servers with one thread each, and one more pinned to each of the cores."""
        self.tracker = Tracker("127.0.0.1", _free_port())
        self._tracker_process: psutil.Popen | None = None
        self.servers: list[psutil.Popen] = []
        self.start_tracker()
        for core in [*[""] * servers, *cores]:
            self.start_server(core)
        self.wait_for(servers + len(cores))

    @property
    def address(self) -> str:
        """For `--devices`."""
        return f"rpc://{self.tracker}/{KEY}"

    def start_tracker(self) -> None:
        host, port = self.tracker.host, str(self.tracker.port)
        options = ["--host", host, "--port", port, "--port-end", str(self.tracker.port + 1), "--silent"]
        self._tracker_process = _start("tvm.exec.rpc_tracker", *options)
        until(lambda: self.registered() is not None)

    def stop_tracker(self) -> None:
        assert self._tracker_process
        _kill_tree(self._tracker_process)

    def start_server(self, core: str = "") -> psutil.Popen:
        options = ["--tracker", str(self.tracker), "--key", KEY, "--threads", "1", "--cores", core, "--silent"]
        self.servers.append(_start("lib.rpc_server", *options, "--with-parent", "--port", str(_free_port())))
        return self.servers[-1]

    def registered(self) -> int | None:
        """How many servers the tracker knows; None if there is no tracker."""
        try:
            return len(self.tracker.servers(KEY))
        except OSError:
            return None

    def wait_for(self, servers: int) -> None:
        until(lambda: self.registered() == servers)

    def close(self) -> None:
        for server in self.servers:
            _kill_tree(server)
        self.stop_tracker()


def kill(process: psutil.Popen) -> None:
    """As `kill -9` of a server: what it started is not asked."""
    process.send_signal(signal.SIGKILL)
    process.wait()


def until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.05)


def _start(module: str, *options: str) -> psutil.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return psutil.Popen(
        [sys.executable, "-m", module, *options], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _kill_tree(process: psutil.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
