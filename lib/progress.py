"""One line that says where a run stands; silent unless it goes to a terminal."""

import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TextIO

from lib.runner import Measurement


@dataclass(slots=True)
class Goal:
    """When the run ends; the first that is reached counts. 0: no such limit."""

    trials: int = 0
    seconds: float = 0.0
    latency_s: float = 0.0


@dataclass(slots=True)
class Progress:
    """State of a run as a person wants to see it."""

    stream: TextIO = sys.stderr
    goal: Goal = field(default_factory=Goal)
    round: int = 0
    doing: str = ""
    trials: int = 0
    seconds: float = 0.0  # spent on finished rounds
    latency_s: float = float("inf")  # of the model, estimated
    failures: Counter[str] = field(default_factory=Counter)
    _since: float = field(default_factory=time.monotonic)  # of the round in flight
    _width: int = 0

    def begin_round(self, number: int, trials: int, seconds: float, latency_s: float, failures: Counter[str]) -> None:
        """Take over what is known of the rounds before."""
        self.round, self.trials, self.seconds, self.latency_s = number, trials, seconds, latency_s
        self.failures, self._since = Counter(failures), time.monotonic()

    def measured(self, measurement: Measurement) -> None:
        """Count a measurement of the round in flight."""
        self.trials += 1
        if measurement.status != "ok":
            self.failures[measurement.status] += 1

    def say(self, doing: str) -> str:
        """Show what is being done now; returns the line."""
        self.doing = doing
        line = self.line()
        if self.stream.isatty():
            shown = line[: shutil.get_terminal_size().columns - 1]
            self.stream.write("\r" + shown.ljust(self._width))
            self.stream.flush()
            self._width = len(shown)
        return line

    def note(self, text: str) -> None:
        """Print a line that stays, if somebody watches."""
        if self.stream.isatty():
            self.stream.write("\r" + text.ljust(self._width) + "\n")
            self._width = 0

    def end(self) -> None:
        """Leave the line, so that what follows starts on one of its own."""
        if self._width:
            self.stream.write("\n")
            self._width = 0

    def line(self) -> str:
        """E.g. `round 7 · measuring conv2d · 420/1000 trials · 3 failed (2 timeout, 1 crash) · 24.1 ms · ETA 12:30`."""
        parts = [f"round {self.round}", self.doing]
        parts.append(f"{self.trials}/{self.goal.trials} trials" if self.goal.trials else f"{self.trials} trials")
        if self.failures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.failures.items()))
            parts.append(f"{self.failures.total()} failed ({kinds})")
        if self.latency_s < float("inf"):
            parts.append(f"best {self.latency_s * 1e3:.2f} ms")
        eta = self.eta_s()
        if eta is not None:
            parts.append(f"ETA {int(eta) // 60}:{int(eta) % 60:02d}")
        return " · ".join(parts)

    def eta_s(self) -> float | None:
        """Seconds until a limit is reached at the pace so far; None if that cannot be told."""
        spent = self.seconds + time.monotonic() - self._since
        left = []
        if self.goal.seconds:
            left.append(max(0.0, self.goal.seconds - spent))
        if self.goal.trials and self.trials and spent > 1:
            left.append(max(0, self.goal.trials - self.trials) * spent / self.trials)
        return min(left) if left else None
