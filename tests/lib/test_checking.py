from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from lib import checking
from lib.contracts.errors import VerificationError
from lib.measure.runner import ModelFailed


def built(name):
    return SimpleNamespace(library=lambda _kind: (name, name), inputs=name)


class FakePool:
    """Sessions in which a library takes made-up seconds, and how often they were asked for."""

    def __init__(self, seconds):
        self.seconds, self.timed = seconds, []

    @contextmanager
    def models(self, _timeout_s):
        opened = {}

        def time(name, seconds):
            if seconds:  # else it is only run, for its weights to be there
                self.timed.append(opened[name])
            if opened[name] not in self.seconds:
                raise ModelFailed("time", "it crashed")
            return self.seconds[opened[name]]

        yield SimpleNamespace(open_library=lambda name, library, *_: opened.update({name: library}), time=time)


def shapes(**latencies):
    """Of so many tokens each, the largest first."""
    return [({"sequence": int(name[1:])}, built(name), [seconds]) for name, seconds in latencies.items()]


def test_a_shape_that_is_slower_than_the_next_larger_one_is_left_out_and_the_next_is_held_against_that_one():
    pool = FakePool({"s32": 3.0, "s24": 3.5, "s16": 3.2, "s8": 1.0})

    found = checking.slower(shapes(s32=3.0, s24=3.5, s16=3.2, s8=1.0), pool, 1.0)

    assert found == {
        1: {"taken": {"sequence": 32}, "latency_s": 3.5, "taken_s": 3.0},
        2: {"taken": {"sequence": 32}, "latency_s": 3.2, "taken_s": 3.0},
    }
    assert set(pool.timed) == {"s32", "s24", "s16"}


def test_a_shape_that_only_looked_slower_when_it_was_timed_alone_stays():
    pool = FakePool({"s32": 3.0, "s24": 2.0})

    assert checking.slower(shapes(s32=3.0, s24=3.5), pool, 1.0) == {}
    assert pool.timed == ["s24", "s32"] * 2


def test_a_shape_is_held_against_the_smallest_that_holds_it():
    pool = FakePool({"a": 1.0, "b": 2.0, "c": 3.0})
    found = [({"batch": 2, "sequence": 8}, built("a"), [1.0]), ({"batch": 1, "sequence": 12}, built("b"), [2.0]),
             ({"batch": 1, "sequence": 8}, built("c"), [3.0])]  # fmt: skip

    assert checking.slower(found, pool, 1.0) == {
        2: {"taken": {"batch": 1, "sequence": 12}, "latency_s": 3.0, "taken_s": 2.0}
    }


def test_a_library_that_does_not_run_any_more_is_told():
    with pytest.raises(VerificationError, match="it crashed"):
        checking.slower(shapes(s32=3.0, s24=3.5), FakePool({"s32": 3.0}), 1.0)
