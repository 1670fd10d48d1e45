"""Locks between processes, on this host or on others that share the folder; the kernel frees them with the process."""

import fcntl
import os
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
    with os.fdopen(_descriptor(lock), "rb") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, kind)
        yield


def _descriptor(lock: Path) -> int:
    """Of a file that is only ever read, since in a shared folder it may belong to another user."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    os.fchmod(descriptor, 0o644)  # whatever the umask: others must be able to wait for it
    return descriptor


def of_this_machine(kind: str) -> Path:
    """The lock of this machine's CPU (`llvm`) or GPUs (`cuda`): whoever times something there has it for itself.

    It is the same for all users and sessions, whatever their TMPDIR. TUNER_LOCKS names another folder, for who shares
    no CPU with the others (tests that run side by side do, and do not mind).
    """
    return Path(os.environ.get("TUNER_LOCKS", "/tmp")) / f"family-tuner-{kind}.lock"
