import io
import re
from collections import Counter

from lib.report.progress import Progress
from lib.tuning.budget import Budget, Spent, Standing
from tests.lib.measure.test_journal import ONE, TWO


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def begun(stream):
    progress = Progress(stream=stream)
    progress.begin_round(
        Standing(Spent(7, 40, 300.0, 0.0241, Counter(timeout=1)), Budget(trials=100, seconds=600), "", [])
    )
    return progress


def test_the_line_tells_round_trials_failures_latency_and_time_left():
    progress = begun(Terminal())
    progress.measured(ONE)
    progress.measured(TWO)

    line = progress.say("measuring")

    assert line.startswith("round 7 · measuring · 42/100 trials · 2 failed (2 timeout) · best 24.10 ms · ETA ")
    assert progress.stream.getvalue().startswith("\rround 7")


def test_the_time_left_is_that_of_the_limit_reached_first():
    assert begun(Terminal()).eta_s() < 301  # 60 trials at 7.5 s each would take longer than the 300 s left


def test_where_nobody_watches_each_round_and_each_minute_has_a_line_with_the_time_of_day(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("lib.report.progress.time.monotonic", lambda: now[0])
    progress = begun(io.StringIO())
    begin_again = Standing(Spent(7, 40, 300.0, 0.0241, Counter(timeout=1)), progress.budget, "", [])

    for second in (1, 59, 61, 90, 130):  # the lines at 61 and 130 are written
        now[0] = 1000.0 + second
        progress.begin_round(begin_again)  # as Luigi does after each stage of the round
        progress.say("measuring")
    progress.note("ended")
    progress.end()

    lines = progress.stream.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    told = [line[9:].partition(" · ") for line in lines]
    assert [(first, rest.split(" · ")[0]) for first, _, rest in told] == [
        ("round 7", "begins"), ("round 7", "measuring"), ("round 7", "measuring"), ("ended", ""),
    ]  # fmt: skip
