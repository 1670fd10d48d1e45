"""A TVM RPC server that outlives what it runs; needs TVM and this one file.

    python -m lib.rpc_server --tracker HOST:PORT --key KEY [--host ADDRESS] [--port PORT] [--threads N] [--cores 0,1]

`tvm.exec.rpc_server` of TVM 0.27 stops listening for ever after a session that crashed, or after a minute without its
tracker, while its process lives on; and what it started survives it. This one goes on listening, tells the client how
a session died, and takes its sessions along when it ends.

Whoever reaches its port can run any code as the user who started it: TVM's RPC has no authentication. It binds to
loopback unless told otherwise; use other addresses on trusted networks only, or an SSH tunnel.
"""

import argparse
import ctypes
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

CRASHED = "RPCSessionCrashed"  # begins what a client is told of a session that died

_PORTS = 200  # tried from the first on


def main() -> None:
    """Serve until killed."""
    options = _options()
    # All before TVM is loaded. Threads that TVM binds to cores would meet those of other servers on this machine.
    os.environ["TVM_BIND_THREADS"] = "0"
    if options.cores:
        os.sched_setaffinity(0, [int(core) for core in options.cores.split(",")])
    threads = options.threads or (len(options.cores.split(",")) if options.cores else 0)
    if threads:
        os.environ["TVM_NUM_THREADS"] = str(threads)
    if options.with_parent:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch_folder())
    host, _, port = options.tracker.rpartition(":")
    _serve(options, (host, int(port)))


def scratch_folder() -> Path:
    """A new temporary folder of this process; removes those of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob("family-tuner-*-*"):
        owner = folder.name.split("-")[2]
        if owner.isdigit() and not _lives(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"family-tuner-{os.getpid()}-"))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tracker", required=True, help="HOST:PORT of `python -m tvm.exec.rpc_tracker`")
    parser.add_argument("--key", required=True, help="kind of device; what is equally fast has an equal key")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=9100, help="first port that is tried")
    parser.add_argument("--custom-addr", help="address that the tracker tells clients, behind a tunnel")
    parser.add_argument("--threads", type=int, default=0, help="threads of a kernel; must be those of the target")
    parser.add_argument("--cores", default="", help="run on these only: `0,1`")
    parser.add_argument("--with-parent", action="store_true", help="end when the process that started it ends")
    parser.add_argument("--silent", action="store_true", help="print errors only")
    return parser.parse_args()


def _serve(options: argparse.Namespace, tracker: tuple[str, int]) -> None:
    from tvm.rpc import base, server

    serving, serve_loop = server._serving, server._serve_loop
    multiprocessing.set_start_method("fork")

    def serve_session(sock: Any, *arguments: Any) -> None:
        """In the session's process."""
        _die_with_parent()
        serve_loop(sock, *arguments)

    def survive_session(sock: Any, *arguments: Any) -> None:
        """In this process, while the session runs in its own."""
        folder = Path.cwd()
        try:
            serving(sock, *arguments)
        except Exception as error:  # TVM raises when the session's process failed, and would listen no more
            server.logger.warning("%s", error)
            _tell(sock, str(error))
            sock.close()
        finally:
            os.chdir(folder)  # TVM's own session folder may be gone by now

    def connect_at_last(address: tuple[str, int], *_limits: Any) -> Any:
        """To the tracker, however long it is away."""
        while True:
            try:
                return connect(address, timeout=0, retry_period=0)
            except (OSError, RuntimeError):
                time.sleep(1)

    def receive_at_once(sock: Any, size: int) -> bytes:
        """TVM writes messages in small pieces, each of which waits for our ack of the one before: 40 ms."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_QUICKACK"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return bytes(receive(sock, size))

    connect, receive = base.connect_with_retry, base.recvall
    server._serve_loop, server._serving = serve_session, survive_session
    base.connect_with_retry, base.recvall = connect_at_last, receive_at_once
    state = server.PopenRPCServerState(
        options.host, options.port, options.port + _PORTS, tracker_addr=tracker, key=options.key,
        custom_addr=options.custom_addr or (None if options.host == "0.0.0.0" else options.host), silent=options.silent,
    )  # fmt: skip
    print(f"serving {options.key} at {options.host}:{state.port}", flush=True)
    state.thread.join()


def _tell(sock: Any, text: str) -> None:
    """Let the client know how its session died, in place of the answer that it waits for."""
    from tvm.rpc import _ffi_api

    code = text.rpartition(" ")[2]
    how = f"signal {signal.Signals(-int(code)).name}" if code.startswith("-") else f"exit code {code}"
    try:
        _ffi_api.ReturnException(sock.fileno(), f"{CRASHED}: the process on the device ended with {how}")
    except Exception:  # nobody listens any more
        return


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # TVM ends a late session by it, also one that is in a kernel


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    main()
