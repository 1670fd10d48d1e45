"""Fixtures shared by all tests: one target, one pool of workers."""

from collections.abc import Iterator

import pytest

from lib import targets
from lib.runner import MeasureConfig
from lib.workers import LocalPool

QUICK = MeasureConfig(repeats=2, min_repeat_s=0.001, build_timeout_s=10, run_timeout_s=2, builds_ahead=8)


@pytest.fixture(scope="session")
def cpu() -> targets.CpuTarget:
    return targets.cpu_target()


@pytest.fixture(scope="session")
def pool(cpu: targets.CpuTarget) -> Iterator[LocalPool]:
    pool = LocalPool(cpu, QUICK)
    yield pool
    pool.close()
