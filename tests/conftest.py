"""Fixtures shared by all tests: one target, one pool of workers."""

from collections.abc import Iterator

import pytest

from lib import host
from lib.runner import MeasureConfig
from lib.workers import LocalPool

QUICK = MeasureConfig(repeats=2, min_repeat_s=0.001, build_timeout_s=10, run_timeout_s=2, builds_ahead=8)


@pytest.fixture(scope="session")
def cpu() -> host.CpuTarget:
    return host.cpu_target()


@pytest.fixture(scope="session")
def pool(cpu: host.CpuTarget) -> Iterator[LocalPool]:
    pool = LocalPool(cpu, QUICK)
    yield pool
    pool.close()
