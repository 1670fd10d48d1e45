"""Since when a queue of candidates waits for a device in vain."""

from collections import deque
from pathlib import Path

from lib.measure.batch import Batch, Measuring, ReadyToRun
from tests.helpers import job, matmul


def a_batch(*measuring: Measuring, seen: float) -> Batch:
    """At whose last look, at `seen`, a device was at work, or none was needed."""
    return Batch(deque(), measuring=dict(enumerate(measuring)), seen=seen)  # type: ignore[arg-type]


def given(sent: float, begun: float = 0.0) -> Measuring:
    return Measuring(ReadyToRun(job("a", matmul(8, 8, 8)), Path("1.so"), (), 0.1), sent, begun)


def test_who_has_a_device_or_needs_none_waits_for_none():
    assert a_batch(seen=10).waits_since() is None
    assert a_batch(given(sent=11), given(sent=12, begun=13), seen=10).waits_since() is None


def test_waiting_for_a_device_begins_when_one_is_asked_for_it_not_when_its_process_starts():
    assert a_batch(given(sent=75), given(sent=76), seen=10).waits_since() == 75


def test_a_device_that_was_at_work_meanwhile_ends_the_waiting():
    assert a_batch(given(sent=75), seen=80).waits_since() == 80
