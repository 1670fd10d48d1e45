"""Fixtures shared by all tests: one target, one pool of workers, locks of their own."""

import os
from collections.abc import Iterator
from pathlib import Path

# XGBoost's threads wait for each other asleep: two test runs share the cores. Before anything loads OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from lib.machine import targets
from lib.measure import launcher
from lib.measure.local_pool import LocalPool
from lib.measure.runner import MeasureConfig
from tests.cuda import stand_ins
from tests.cuda.stand_ins import StandIns
from tests.helpers import ROOT

QUICK = MeasureConfig(repeats=2, min_repeat_s=0.001, build_timeout_s=10, run_timeout_s=2, builds_ahead=8)


# Files below tests/ that are left out unless `-m acceptance` asks for them; names may be cut short.
_BY_THE_MINUTE = (
    "benchmarks/test_duel", "benchmarks/test_equal", "benchmarks/test_gpus", "benchmarks/test_sides",
    "benchmarks/test_stock", "benchmarks/test_versus", "cuda/test_all", "lib/measure/test_device_pool",
    "lib/measure/test_gpus", "lib/models/test_onnx_backend", "lib/models/test_torch_", "lib/test_torch_",
    "stages/test_databases", "stages/test_pages", "test_against_onnxruntime", "test_pipeline_arm",
    "test_pipeline_devices", "test_pipeline_gpus", "test_pipeline_models", "test_pipeline_ranges", "test_wall",
)  # fmt: skip
# Those that take longest, half a minute and more: begun first, so that no worker has one left when the others are done.
_LONGEST = (
    "test_pipeline_devices", "test_pipeline_gpus", "cuda/test_all", "test_pipeline_arm", "test_pipeline_models",
    "test_pipeline_ranges", "test_pipeline", "lib/measure/test_runners", "stages/test_compile",
    "test_against_onnxruntime", "test_wall", "lib/search/spaces/test_attention", "lib/models/test_onnx_quantized",
    "lib/search/spaces/test_contraction", "lib/models/test_zoo",
)  # fmt: skip
_ORDER = {"": len(_LONGEST), "stages": len(_LONGEST) + 1}  # of the other folders' files; the rest follows


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes minutes; and order files for pytest-xdist, which hands them out so."""
    for item in items:
        if _name(item).startswith(_BY_THE_MINUTE):
            item.add_marker("acceptance")
    items.sort(key=_turn)


def _name(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT / "tests").as_posix()


def _turn(item: pytest.Item) -> int:
    name = _name(item)
    long = next((n for n, each in enumerate(_LONGEST) if name.startswith(each)), None)
    return _ORDER.get(name.rpartition("/")[0], len(_LONGEST) + 2) if long is None else long


@pytest.fixture(scope="session", autouse=True)
def locks_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes of tests (pytest-xdist has several) wait neither for each other nor for a tuning beside them: no test
    asserts a latency."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNER_LOCKS", os.fspath(tmp_path_factory.mktemp("locks")))
        yield


@pytest.fixture
def fresh_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The next worker process is forked from another one than those before, started as things are then."""
    monkeypatch.setattr(launcher, "_running", [])
    yield
    while launcher._running:
        launcher._running.pop().bury()


@pytest.fixture(scope="session")
def stand_ins_built(request: pytest.FixtureRequest) -> Path:
    """What stand-in GPUs are made of; skips where they cannot be."""
    if reason := stand_ins.why_not():
        pytest.skip(reason)
    return stand_ins.build(Path(request.config.cache.mkdir("cuda")))


@pytest.fixture(scope="module")
def gpus(stand_ins_built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIns]:
    """Two stand-in GPUs, for what is started while they are there; this process itself has none."""
    found = StandIns(stand_ins_built, tmp_path_factory.mktemp("gpus"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.environment().items():
            patch.setenv(name, value)
        patch.setattr(launcher, "_running", [])  # what forks workers is started with them
        yield found
        while launcher._running:
            launcher._running.pop().bury()


@pytest.fixture(scope="session")
def cpu() -> targets.CpuTarget:
    return targets.cpu_target()


@pytest.fixture(scope="session")
def pool(cpu: targets.CpuTarget) -> Iterator[LocalPool]:
    pool = LocalPool(cpu, QUICK)
    yield pool
    pool.close()
