"""The thread in which a session computes, with the cores and the helpers that are its own.

TVM 0.27 keeps a pool of threads for each thread that calls it, pins these pools of all sessions to the same cores, and
changes the affinity of the caller. So each session has one thread of its own that calls TVM: pools are as many as
sessions, not as threads of a server; thread counts and cores are a session's own; a caller's affinity stays as it was.
Calls of several threads wait for each other. Handing a call over costs some ten microseconds.
"""

import itertools
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from . import native
from .errors import InputError

_ONE_EACH, _SHARED = -2, -3  # TVM's kSpecifyOneCorePerThread, kSpecifyThreadShareAllCore

Call = Callable[[], Any]


class _Answer:
    """Of one call."""

    __slots__ = ("error", "is_there", "value")

    def __init__(self) -> None:
        self.is_there = threading.Lock()
        self.is_there.acquire()
        self.value: Any = None
        self.error: BaseException | None = None


Calls = SimpleQueue[tuple[Call, _Answer] | None]


class Driver:
    """Runs calls one after the other in a thread of its own, which begins with the first call."""

    def __init__(self, threads: int, cores: Sequence[int]) -> None:
        """
        Args:
            threads: Of each call, itself included.
            cores: Where they may run.
        """
        self._threads, self._cores = threads, list(cores)
        self._begin_anew()
        _drivers.add(self)

    def _begin_anew(self) -> None:
        """Without a thread: threads do not survive a fork, the next call starts another one."""
        self._calls: Calls = SimpleQueue()
        self._starting = threading.Lock()
        self._is_started = False

    def run(self, call: Call) -> Any:
        """Have it called there; returns what it returns, and raises what it raises."""
        if not self._is_started:
            self._start()
        answer = _Answer()
        self._calls.put((call, answer))
        answer.is_there.acquire()
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _start(self) -> None:
        with self._starting:
            if not self._is_started:
                arguments = (self._calls, self._threads, self._cores)
                threading.Thread(target=_serve, args=arguments, name="family_tuner_runtime", daemon=True).start()
                weakref.finalize(self, self._calls.put, None)
                self._is_started = True


_drivers: "weakref.WeakSet[Driver]" = weakref.WeakSet()


def _after_fork() -> None:
    for driver in _drivers:
        driver._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _serve(calls: Calls, threads: int, cores: Sequence[int]) -> None:
    """Until a None comes. It knows the queue alone, so that a session that nobody has any more can end it."""
    failure: BaseException | None = None
    try:
        _configure(threads, cores)
    except BaseException as error:
        failure = error
    while (given := calls.get()) is not None:
        call, answer = given
        try:
            if failure is not None:
                raise failure
            answer.value = call()
        except BaseException as error:
            answer.error = error
        answer.is_there.release()
        del given, call, answer  # inputs and outputs belong to the caller alone


def _configure(threads: int, cores: Sequence[int]) -> None:
    """Give the pool of this thread its size and its place; it is made here."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # of this thread; where TVM is told not to bind threads, its others inherit it
    mode = _ONE_EACH if threads == len(cores) else _SHARED
    native.function("runtime.config_threadpool")(mode, threads, [str(cores[n % len(cores)]) for n in range(threads)])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def placed(tuned_for: int, threads: int | None, cores: Sequence[int] | None) -> tuple[int, list[int]]:
    """How many threads, and where.

    As many as asked for, else as many as cores are given, else as many as the library was tuned for, at most as many as
    there are cores. A session of several threads has a core for each: two that wait for each other on one core take
    twice the time, and the system separates them late. Without a list of cores, sessions take them in turn. A session
    of one thread may run on any.

    Raises:
        InputError: There is no such core, or a count is not positive.
    """
    allowed = allowed_cores()
    if cores is not None:
        if not cores:
            raise InputError("The list of cores is empty.")
        if foreign := sorted(set(cores) - set(allowed)):
            raise InputError(f"This process may not use the cores {foreign}, but {allowed}.")
    chosen = allowed if cores is None else list(dict.fromkeys(cores))
    count = threads if threads is not None else min(tuned_for, len(chosen)) if cores is None else len(chosen)
    if count < 1:
        raise InputError(f"A session has at least one thread, but {count} were asked for.")
    if not 1 < count < len(chosen):
        return count, chosen
    if cores is not None:
        return count, chosen[:count]
    first = next(_turns) * count
    ranked = _by_siblings(tuple(allowed))
    return count, [ranked[(first + n) % len(ranked)] for n in range(count)]


def allowed_cores() -> list[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@lru_cache
def _by_siblings(cores: tuple[int, ...]) -> list[int]:
    """First one of each physical core, as far as the system tells, then their hyper-threads."""

    def rank(core: int) -> int:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        siblings = re.findall(r"[0-9]+", path.read_text()) if path.exists() else []
        return siblings.index(str(core)) if str(core) in siblings else 0

    return sorted(cores, key=rank)


_turns = itertools.count()
