"""Locks between processes, on this host or on others that share the folder; the kernel frees them with the process."""

import fcntl
import getpass
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(lock: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Wait until no other process is inside; `on_wait` is told once if that takes any time."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def of_this_cpu() -> Path:
    """The lock of whoever times something on this machine's CPU or GPUs, whatever run it belongs to."""
    return Path(tempfile.gettempdir()) / f"family-tuner-{getpass.getuser()}.lock"
