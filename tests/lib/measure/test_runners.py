"""What every runner promises, whatever it measures on; those with devices promise more."""

import re
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pytest

from lib import deploy, packing
from lib.contracts import tables
from lib.contracts.schemas import MEASUREMENTS
from lib.contracts.tables import Provenance
from lib.graph import fusion
from lib.machine import host, targets
from lib.measure.device_pool import DevicePool
from lib.measure.devices import Local
from lib.measure.fleet import GpuFleet, RpcFleet, Slot
from lib.measure.replay import ReplayRunner
from lib.measure.runner import ModelFailed
from lib.models.zoo import catalogue
from lib.search import evolution
from lib.tir.numerics import random_values, relative_error
from lib.tir.traces import EMPTY_TRACE
from tests.conftest import QUICK
from tests.farm import KEY, Farm
from tests.helpers import (
    DOES_NOT_COMPILE,
    LOOPS_FOR_EVER,
    NEEDS_TOO_MUCH,
    SEGFAULTS,
    TAKES_LONG_TO_COMPILE,
    gather,
    job,
    matmul,
    power,
)

CONFIG = replace(QUICK, build_timeout_s=5)


@pytest.fixture(scope="module")
def over_rpc():
    farm, target = Farm(servers=2), targets.cpu_target(threads=1)
    pool = DevicePool(target, CONFIG, RpcFleet(farm.tracker, KEY, target))
    yield pool
    pool.close()
    farm.close()


class Processes:
    """As a `GpuFleet`, one process a device; but each on this CPU."""

    keeps_limits = False

    kind = "test devices"

    def slots(self):
        return [Slot(Local(), (("CUDA_VISIBLE_DEVICES", name),)) for name in ("a", "b")]

    def shares_cpu(self):
        return True

    def report(self, slot, lost): ...


@pytest.fixture(scope="module")
def in_processes():
    pool = DevicePool(targets.cpu_target(threads=1), CONFIG, Processes())
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def on_gpus(request):
    """Those of this machine, or stand-ins."""
    if not host.gpus():
        request.getfixturevalue("gpus")
    pool = DevicePool(targets.target("cuda"), replace(CONFIG, build_timeout_s=60, run_timeout_s=20), GpuFleet())
    yield pool
    pool.close()


class Replayed:
    """Measures on this CPU and writes that down, then answers from what it wrote."""

    def __init__(self, pool, folder):
        self._pool, self._folder, self._n = pool, folder, 0

    def run(self, jobs):
        rows = [asdict(measurement) for measurement in self._pool.run(jobs)]
        self._n += 1
        table = pa.Table.from_pylist(rows, schema=MEASUREMENTS)
        tables.write(table, self._folder / str(self._n) / "measurements.parquet", MEASUREMENTS, Provenance("", ""))
        return ReplayRunner(self._folder, self._pool.conditions).run(jobs)


@pytest.fixture
def replayed(pool, tmp_path):
    return Replayed(pool, tmp_path)


NAMES = {"local": "pool", "rpc": "over_rpc", "processes": "in_processes", "gpu": "on_gpus", "replay": "replayed"}


@pytest.fixture(params=["local", "rpc", "processes", "gpu", "replay"])
def runner(request):
    return request.getfixturevalue(NAMES[request.param])


@pytest.fixture(params=["local", "rpc", "processes", "replay"])
def runner_of_cpu_code(request):
    """Programs that fail on a CPU are other ones than those that fail on a GPU."""
    return request.getfixturevalue(NAMES[request.param])


@pytest.fixture(params=["local", "rpc", "processes", "gpu"])
def pool_of_devices(request):
    return request.getfixturevalue(NAMES[request.param])


@pytest.fixture(params=["local", "rpc", "processes"])
def pool_of_cpus(request):
    return request.getfixturevalue(NAMES[request.param])


@pytest.fixture
def model_files(pool_of_devices, tmp_path):
    """A small model, compiled with packed weights and without, its weights and an input."""
    target = pool_of_devices._target.tvm()
    model = catalogue.load("tiny_cnn")
    module = fusion.fuse(model.module, target)
    deploy.build(module, {}, target, tmp_path / "tuned.so", tmp_path / "packing.json")
    deploy.build(module, {}, target, tmp_path / "untuned.so")
    weights = tmp_path / "weights.npz"
    np.savez(weights, **model.weights)
    packing.write(
        tmp_path / "packed.safetensors", [tmp_path / "packing.json"], [weights], targets.cpu_target().tvm(), None
    )
    [given] = deploy.interface(module)
    np.savez(tmp_path / "inputs.npz", random_values(tuple(given["shape"]), given["dtype"], given["bound"], seed=0))
    return tmp_path


def traces_of(workload, runner, n):
    target = getattr(runner, "_target", None) or runner._pool._target
    return [proposal.trace for proposal in evolution.sample(workload, target.tvm(), n, known=set(), seed=0)]


def test_each_candidate_is_measured_once(runner):
    jobs = [job(f"candidate {n}", matmul(), trace) for n, trace in enumerate(traces_of(matmul(), runner, 6))]
    jobs += [job(f"other {n}", matmul(n=8), trace) for n, trace in enumerate(traces_of(matmul(n=8), runner, 4))]

    found = list(runner.run(jobs))

    assert sorted(m.candidate_id for m in found) == sorted(j.candidate_id for j in jobs)
    assert {m.subgraph_id for m in found} == {j.subgraph_id for j in jobs}
    assert all((m.status, m.error) == ("ok", None) for m in found)
    assert all(0 < latency < 1 for m in found for latency in m.latencies)
    assert all(m.build_s > 0 and m.run_s > 0 and m.device and m.host and m.conditions.versions for m in found)


def test_the_clock_says_what_the_last_run_took(pool_of_devices):
    list(pool_of_devices.run([job("good", matmul())]))

    assert pool_of_devices.clock.keys() <= {"start", "build", "run", "waited"}
    assert pool_of_devices.clock["run"] > 0


def test_nothing_to_measure_is_no_failure(runner):
    assert list(runner.run([])) == []


@pytest.mark.parametrize(
    ("workload", "trace", "status", "told"),
    [
        (SEGFAULTS, EMPTY_TRACE, "crash", "while running: .*SIGSEGV"),
        (LOOPS_FOR_EVER, EMPTY_TRACE, "timeout", "while running: "),
        (DOES_NOT_COMPILE, EMPTY_TRACE, "build_error", "InternalError: not implemented"),
        (TAKES_LONG_TO_COMPILE, EMPTY_TRACE, "timeout", "while compiling: killed for taking too long"),
        (NEEDS_TOO_MUCH, EMPTY_TRACE, "run_error", "while running: .*[Mm]emory|allocat"),
        (gather(), '[["nonsense"]]', "build_error", "Error"),
    ],
    ids=["segfault", "loop", "compiler error", "compiler hang", "out of memory", "foreign trace"],
)
def test_each_failure_has_its_status_and_costs_one_candidate(runner_of_cpu_code, workload, trace, status, told):
    jobs = [job("before", matmul()), job("faulty", workload, trace), job("after", matmul(n=8))]

    found = {m.candidate_id: m for m in runner_of_cpu_code.run(jobs)}

    assert {name: m.status for name, m in found.items()} == {"before": "ok", "faulty": status, "after": "ok"}
    assert found["faulty"].latencies == []
    assert re.search(told, found["faulty"].error)


def test_a_kernel_that_calls_the_c_library_runs(runner_of_cpu_code):
    [found] = runner_of_cpu_code.run([job("power", power())])

    assert (found.status, found.error) == ("ok", None)


def test_token_ids_are_valid_so_that_a_gather_runs(runner):
    [found] = runner.run([job("gather", gather(rows=3))])

    assert found.status == "ok"


def test_programs_are_compared_in_turn_with_the_baseline_before_and_after(pool_of_devices):
    found, base = pool_of_devices.compare(
        job("", matmul()).workload, traces_of(matmul(), pool_of_devices, 2), 3, baseline=EMPTY_TRACE
    )

    assert [len(latencies) for latencies in found] == [3, 3]
    assert len(base) == 2


def test_programs_are_compared_without_a_baseline(pool_of_devices):
    traces = traces_of(matmul(), pool_of_devices, 2)

    found, base = pool_of_devices.compare(job("", matmul()).workload, traces, 2, baseline=None)

    assert [len(latencies) for latencies in found] == [2, 2]
    assert base == []


def test_one_program_that_fails_spoils_no_other(pool_of_devices):
    traces = [*traces_of(matmul(), pool_of_devices, 1), '[["nonsense"]]']

    found, base = pool_of_devices.compare(job("", matmul()).workload, traces, 2, baseline=EMPTY_TRACE)

    assert [len(latencies) for latencies in found] == [2, 0]
    assert len(base) == 2


def test_a_baseline_that_takes_too_long_is_no_failure(pool_of_cpus):
    assert pool_of_cpus.compare(job("", LOOPS_FOR_EVER).workload, [], 2, baseline=EMPTY_TRACE) == ([], [])


def test_a_right_program_checks_against_the_untuned_one(pool_of_devices):
    [trace] = traces_of(matmul(), pool_of_devices, 1)

    assert pool_of_devices.check(job("", matmul()).workload, trace, timeout_s=10) < 1e-5


def test_a_check_that_crashes_says_nothing(pool_of_cpus):
    assert pool_of_cpus.check(job("", SEGFAULTS).workload, EMPTY_TRACE, timeout_s=10) is None


def test_whole_models_are_loaded_run_and_timed(pool_of_devices, model_files):
    with pool_of_devices.models(timeout_s=60) as session:
        for name, params in (("tuned", "packed.safetensors"), ("untuned", "weights.npz")):
            session.open_library(name, model_files / f"{name}.so", model_files / params, model_files / "inputs.npz")
            assert 0 < session.infer(name, model_files / f"{name}.npz") < 1
            assert 0 < session.time(name, 0.01) < 1

    tuned, untuned = (np.load(model_files / f"{name}.npz")["arr_0"] for name in ("tuned", "untuned"))
    assert np.abs(untuned).max() > 0.1
    assert relative_error(tuned, untuned) < 1e-5


def test_an_operation_with_a_model_that_fails_says_which_and_why(pool_of_cpus, tmp_path):
    with pool_of_cpus.models(timeout_s=60) as session:
        with pytest.raises(ModelFailed, match="infer: KeyError"):
            session.infer("never opened", tmp_path / "out.npz")
        with pytest.raises(ModelFailed, match=r"open_library: .*missing"):
            session.open_library("lost", tmp_path / "missing.so", tmp_path / "missing.npz", tmp_path / "missing.npz")


def test_it_measures_again_after_it_was_closed(pool_of_devices):
    list(pool_of_devices.run([job("first", matmul())]))

    pool_of_devices.close()

    assert [m.status for m in pool_of_devices.run([job("second", matmul())])] == ["ok"]
