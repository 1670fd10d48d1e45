"""Locks between processes, on this host or on others that share the folder; the kernel frees them with the process."""

import fcntl
import getpass
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


def exclusive(lock: Path, on_wait: Callable[[], object] = lambda: None) -> AbstractContextManager[None]:
    """Wait until no other process is inside; `on_wait` is told once if that takes any time."""
    return _locked(lock, fcntl.LOCK_EX, on_wait)


def shared(lock: Path, on_wait: Callable[[], object] = lambda: None) -> AbstractContextManager[None]:
    """Wait until no other process has it for itself."""
    return _locked(lock, fcntl.LOCK_SH, on_wait)


@contextmanager
def _locked(lock: Path, kind: int, on_wait: Callable[[], object]) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, kind)
        yield


def of_this_machine(kind: str) -> Path:
    """The lock of this machine's CPU (`llvm`) or GPUs (`cuda`): whoever times something there has it for itself."""
    return Path(tempfile.gettempdir()) / f"family-tuner-{getpass.getuser()}-{kind}.lock"
