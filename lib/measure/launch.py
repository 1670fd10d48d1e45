"""The process that worker processes are forked from: it has loaded TVM, so that each of them begins in milliseconds.

    python -m lib.measure.launch FD

Started by `launcher`, which asks on that socket, a line of JSON at a time, and gets a line back. It runs nothing else
and starts no thread, so that a fork of it is like a fresh process. It ends with its parent; so do the workers, and each
keeps to its memory.

For CUDA such a fork is no fresh process. On a machine with an H200, CUDA 13.0 and PyTorch 2.11 (which TVM's import
loads where it is there), forks of a process that had imported TVM and done nothing else got `initialization error` of
CUDA (2026-11-27). What uses a GPU loads everything anew, which takes seconds.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

LOADED = ("lib.measure.worker", "lib.measure.driver", "lib.building_process")  # before the first fork
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(frozen=True, slots=True)
class Start:
    """Fork a worker process. The line comes with two descriptors: its socket, and a file for what it prints."""

    module: str  # its `main` gets the number of the socket's descriptor, and `arguments`
    arguments: Sequence[str]
    environment: Mapping[str, str]  # all of it
    memory_bytes: int  # see `limit_memory`; 0: all there is
    afresh: bool = False  # loads Python and TVM itself, as what uses CUDA must

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"


def die_with(parent: int) -> None:
    """End this process when the one that started it ends, whatever it dies of.

    Args:
        parent: Its number. If it is gone already, this process has another parent by now.
    """
    if sys.platform == "linux":  # the kernel does it, even while C code holds the GIL
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch, daemon=True).start()


def limit_memory(n_bytes: int) -> None:
    """What this process, and each that it starts, may have of memory that can be written; asking for more fails there.

    Not the address space: reserving that costs nothing, and drivers of GPUs reserve terabytes.
    """
    if sys.platform != "linux":
        return
    import resource  # other systems have none, or another meaning of it

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or n_bytes < most:
        resource.setrlimit(resource.RLIMIT_DATA, (n_bytes, n_bytes))


def serve(connection: socket.socket) -> None:
    """Fork what is asked for, and tell of what has ended, until the parent closes the socket."""
    server = os.getpid()
    while received := _received(connection):
        line, descriptors = received
        request = json.loads(line)
        reply: int | str | None
        if "module" in request:
            reply = _forked()
            if reply == 0:
                connection.close()
                _become(Start(**request), descriptors[0], descriptors[1], server)
        else:  # the exit code of a child that has ended, or that must be waited for; none while it lives
            reply = _exit_code(request["pid"], wait=request["wait"])
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(json.dumps(reply).encode() + b"\n")


def _received(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """The next line with its descriptors; nothing when the parent has closed its end."""
    line, descriptors = b"", list[int]()
    while not line.endswith(b"\n"):
        data, more, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        if not data:
            return None
        line, descriptors = line + data, descriptors + more
    return line, descriptors


def _forked() -> int | str:
    """As `os.fork`; the reason where the system lets no process begin, of which those that live must not die."""
    try:
        return os.fork()
    except OSError as error:
        return str(error)


def _exit_code(pid: int, wait: bool) -> int | None:
    """Is not kept here: once it was told, the system may give the number to another process."""
    found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _become(start: Start, connection: int, output: int, parent: int) -> None:
    """The child's life, to its end."""
    with _to_the_end():
        os.setsid()
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        if start.afresh:
            os.set_inheritable(connection, True)
            life = [start.module, connection, parent, start.memory_bytes, *start.arguments]
            environment = {**start.environment, "PYTHONPATH": os.environ["PYTHONPATH"]}
            os.execve(sys.executable, [sys.executable, "-m", "lib.measure.launch", *map(str, life)], environment)
        os.environ.clear()
        os.environ.update(start.environment)
        tempfile.tempdir = None  # is looked up again
        _live(start.module, connection, parent, start.memory_bytes, start.arguments)


def _live(module: str, connection: int, parent: int, memory_bytes: int, arguments: Sequence[str]) -> None:
    """What a worker process does; it has its own output, session and environment."""
    die_with(parent)
    _name(module)
    if memory_bytes:
        limit_memory(memory_bytes)
    importlib.import_module(module).main(connection, *arguments)


@contextlib.contextmanager
def _to_the_end() -> Iterator[None]:
    """The last that this process does; what goes wrong is printed, and its exit code is 1."""
    code = 1
    try:
        yield
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # what the server would do at its end is not for its children


def _name(module: str) -> None:
    """What `top` calls the process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, module.rpartition(".")[2].encode()[:15])


def main(descriptor: int) -> None:
    """Load what workers need, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in LOADED:
        importlib.import_module(module)
    # Threads of libraries that were loaded (OpenBLAS) are none of ours: those libraries know of forks.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*", category=DeprecationWarning)
    gc.freeze()  # children share these objects' pages
    with socket.socket(fileno=descriptor) as connection:
        serve(connection)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(int(sys.argv[1]))
    else:  # a worker that begins afresh: see `_become`
        with _to_the_end():
            numbers = [int(text) for text in sys.argv[2:5]]
            _live(sys.argv[1], numbers[0], numbers[1], numbers[2], sys.argv[5:])
