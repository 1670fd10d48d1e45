"""Whether two cores share a cache at the moment."""

import math
import os

import cores
import numpy as np
import pytest


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_one_core_reads_what_another_has_written_at_a_speed_that_is_possible():
    assert 1e8 < cores.between() < 1e12


def test_a_process_with_one_core_has_nothing_to_ask(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {3})

    assert math.isnan(cores.between())


def test_cores_are_near_unless_they_were_seen_to_be_much_faster():
    assert list(cores.are_near([75e9, 70e9, 25e9, math.nan], 78e9)) == [True, True, False, True]
    assert cores.are_near(math.nan, 0.0)
    assert cores.are_near(np.float64(25e9), 26e9)
