"""What tests have worker processes do."""

import os
import socket
import subprocess
import sys
import threading
import time

SIZES_MIB = (100, 1000)
_TAKE = f"""
for size in {SIZES_MIB}:
    try:
        bytearray(size << 20)
        print(size, "MiB", flush=True)
    except MemoryError:
        print("no", size, "MiB", flush=True)
"""


def main(descriptor: int, what: str) -> None:
    with socket.socket(fileno=descriptor) as connection:
        match what:
            case "tell":
                facts = [os.environ.get("MARK"), os.getsid(0) == os.getpid(), sys.stdin.read(), threads()]
                connection.sendall(repr(facts).encode())
            case "fail":
                raise ValueError("on purpose")
            case "sleep":
                connection.sendall(b"asleep")
                time.sleep(600)
            case "take memory":
                exec(_TAKE)
                subprocess.run([sys.executable, "-c", _TAKE], check=True)


def threads() -> int:
    """Beside the one that runs: the one that looks after the parent, and none of TVM's."""
    return threading.active_count() - 1
