"""Where a run stands: on a terminal one line that changes, elsewhere (cron, CI, a file) a line a round and a minute."""

import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TextIO

from lib.contracts.statuses import Status
from lib.measure.runner import Measurement
from lib.tuning.budget import Budget, Standing

_EACH_S = 60.0  # a line, where nobody watches


@dataclass(slots=True)
class Progress:
    """State of a run as a person wants to see it."""

    stream: TextIO = sys.stderr
    budget: Budget = field(default_factory=Budget)
    round: int = 0
    doing: str = ""
    trials: int = 0
    seconds: float = 0.0  # spent on finished rounds
    latency_s: float = float("inf")  # of the model, estimated
    is_relative: bool = False  # of several models: the mean of what is left of their first latencies
    failures: Counter[str] = field(default_factory=Counter)
    _since: float = field(default_factory=time.monotonic)  # of the round in flight
    _width: int = 0
    _last: float = float("-inf")  # when a line was written where nobody watches
    _begun: int = -1  # the round that such a line told of
    _exhausted: set[str] = field(default_factory=set)  # subgraphs of which that was told

    def begin_round(self, standing: Standing, *, is_relative: bool = False) -> None:
        """Take over what is known of the rounds before."""
        so_far = standing.spent
        self.budget, self.round, self.trials = standing.budget, so_far.n_rounds, so_far.trials
        self.seconds, self.latency_s = so_far.seconds, so_far.latency_s
        self.failures, self._since = Counter(so_far.failures), time.monotonic()
        self.is_relative = is_relative
        for subgraph_id, reason in standing.exhausted:
            if subgraph_id not in self._exhausted:
                self._exhausted.add(subgraph_id)
                self.note(f"no more trials for subgraph {subgraph_id}: {reason}")
        if not standing.ended and self._begun != self.round and not self.stream.isatty():
            self.doing, self._begun = "begins", self.round
            self._write()

    def measured(self, measurement: Measurement) -> None:
        """Count a measurement of the round in flight."""
        self.trials += 1
        if measurement.status != Status.OK:
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
        elif time.monotonic() >= self._last + _EACH_S:
            self._write()
        return line

    def _write(self) -> None:
        """Leave the line, with the time of day, for who looks later."""
        self._last = time.monotonic()
        self.note(self.line())

    def note(self, text: str) -> None:
        """Print a line that stays; where nobody watches, with the time of day."""
        if self.stream.isatty():
            self.stream.write("\r" + text.ljust(self._width) + "\n")
            self._width = 0
        else:
            self.stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            self.stream.flush()

    def end(self) -> None:
        """Leave the line, so that what follows starts on one of its own."""
        if self._width:
            self.stream.write("\n")
            self._width = 0

    def line(self) -> str:
        """E.g. `round 7 · measuring conv2d · 420/1000 trials · 3 failed (2 timeout, 1 crash) · 24.1 ms · ETA 12:30`."""
        parts = [f"round {self.round}", self.doing]
        parts.append(f"{self.trials}/{self.budget.trials} trials" if self.budget.trials else f"{self.trials} trials")
        if self.failures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.failures.items()))
            parts.append(f"{self.failures.total()} failed ({kinds})")
        if self.latency_s < float("inf"):
            told = (
                f"{self.latency_s:.1%} of the first latencies" if self.is_relative else f"{self.latency_s * 1e3:.2f} ms"
            )
            parts.append(f"best {told}")
        eta = self.eta_s()
        if eta is not None:
            parts.append(f"ETA {int(eta) // 60}:{int(eta) % 60:02d}")
        return " · ".join(parts)

    def eta_s(self) -> float | None:
        """Seconds until a limit is reached at the pace so far; None if that cannot be told."""
        spent = self.seconds + time.monotonic() - self._since
        left = []
        if self.budget.seconds:
            left.append(max(0.0, self.budget.seconds - spent))
        if self.budget.trials and self.trials and spent > 1:
            left.append(max(0, self.budget.trials - self.trials) * spent / self.trials)
        return min(left) if left else None
