import io
from collections import Counter

from lib.progress import Goal, Progress
from tests.lib.test_journal import ONE, TWO


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def begun(stream):
    progress = Progress(stream=stream, goal=Goal(trials=100, seconds=600))
    progress.begin_round(7, 40, 300.0, 0.0241, Counter(timeout=1))
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


def test_nothing_is_written_unless_somebody_watches():
    progress = begun(io.StringIO())

    progress.say("measuring")
    progress.note("ended")
    progress.end()

    assert progress.stream.getvalue() == ""
