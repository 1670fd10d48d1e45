"""Where the seconds of a stage go, for the report's table."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_WALL, _MONOTONIC = time.time(), time.monotonic()


def now() -> float:
    """Unix time as it would be if nobody had set the clock since this process began."""
    return _WALL + time.monotonic() - _MONOTONIC


class Clock:
    """Starts when made; `spent` adds up the seconds of `with` blocks by kind."""

    def __init__(self) -> None:
        self._started, self._start = now(), time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def spent(self, kind: str) -> Iterator[None]:
        """Count the seconds of a block as `kind`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, time.monotonic() - start)

    def add(self, kind: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def by_kind(self) -> dict[str, float]:
        """Seconds by kind."""
        return dict(self._seconds)

    def read(self) -> dict[str, float]:
        """Unix time of the start, seconds in all, and seconds by kind."""
        return {"started": self._started, "total": time.monotonic() - self._start, **self._seconds}
