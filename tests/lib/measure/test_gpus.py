"""What can happen to GPUs, and to candidates on them, with stand-ins for two."""

import itertools
import os
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import psutil
import pytest
from tvm import te
from tvm.script import tirx as T

from lib.contracts.errors import DeviceError
from lib.machine import targets
from lib.measure.device_pool import DevicePool
from lib.measure.fleet import GpuFleet
from lib.search import evolution
from lib.tir.traces import EMPTY_TRACE
from lib.tir.workload import as_workload
from tests.conftest import QUICK
from tests.cuda.stand_ins import TARGET, UUIDS
from tests.helpers import job, matmul, reads

WORKLOAD = matmul(64, 64, 64)
CONFIG = replace(QUICK, build_timeout_s=60, run_timeout_s=5)


@pytest.fixture
def all_there(gpus):
    gpus.set(UUIDS)
    return gpus


@pytest.fixture
def pool(all_there):
    with closing(DevicePool(targets.target("cuda"), CONFIG, GpuFleet())) as pool:
        yield pool


@cache
def traces():
    return [each.trace for each in evolution.sample(WORKLOAD, targets.target(TARGET).tvm(), 3, known=set(), seed=0)]


def jobs(count=12):
    return [job(f"candidate {n}", WORKLOAD, traces()[n % len(traces())]) for n in range(count)]


def measured(pool, some, *, after=2, then=lambda: None):
    """All rows; something happens after the first few."""
    found = []
    for measurement in pool.run(some):
        found.append(measurement)
        if len(found) == after:
            then()
    assert sorted(m.candidate_id for m in found) == sorted(j.candidate_id for j in some)
    return found


def out_of_bounds():
    x = te.placeholder((64,), name="x")
    return as_workload(te.create_prim_func([x, te.compute((64,), lambda i: x[i + 5000])]))


@T.prim_func(s_tir=True)
def _loops_for_ever(a: T.Buffer((1,), "float32")) -> None:
    for i in T.thread_binding(1, thread="threadIdx.x"):
        with T.sblock("loop"):
            T.axis.spatial(1, i)
            while a[0] < T.float32(3e38):
                a[0] = T.float32(0)


LOOPS_FOR_EVER = as_workload(_loops_for_ever.with_attr("tirx.is_scheduled", True))


def test_both_gpus_measure(all_there):
    slow = replace(CONFIG, min_repeat_s=0.2)  # so that candidates wait
    with closing(DevicePool(targets.target("cuda"), slow, GpuFleet())) as pool:
        found = measured(pool, jobs())

    assert {m.status for m in found} == {"ok"}
    assert {m.device for m in found} == {f"Stand-in GPU {uuid}" for uuid in UUIDS}
    assert {m.conditions.device for m in found} == {"Stand-in GPU"}


@pytest.mark.parametrize(
    ("workload", "trace", "status", "told"),
    [
        (out_of_bounds(), EMPTY_TRACE, "run_error", "behind the end of an array of 256 bytes of device memory"),
        (LOOPS_FOR_EVER, EMPTY_TRACE, "timeout", "while running: killed for taking too long"),
        (reads(1 << 20), EMPTY_TRACE, "run_error", "out of memory"),
        (WORKLOAD, '[["nonsense"]]', "build_error", "Error"),
    ],
    ids=["out of bounds", "loop", "out of memory", "foreign trace"],
)
def test_each_failure_has_its_status_and_costs_one_candidate(all_there, monkeypatch, workload, trace, status, told):
    monkeypatch.setenv("STANDIN_MEMORY_MIB", "6")
    before, *after = jobs(3)
    with closing(DevicePool(targets.target("cuda"), CONFIG, GpuFleet())) as pool:
        found = {m.candidate_id: m for m in measured(pool, [before, job("faulty", workload, trace), *after])}

    faulty = found.pop("faulty")
    assert (faulty.status, faulty.latencies) == (status, [])
    assert told in faulty.error
    assert {m.status for m in found.values()} == {"ok"}


def test_a_gpu_that_goes_away_costs_no_candidate(all_there, pool):
    found = measured(pool, jobs(), then=lambda: all_there.set(UUIDS[1:]))

    assert {m.status for m in found} == {"ok"}
    assert {m.device for m in found[-4:]} == {f"Stand-in GPU {UUIDS[1]}"}


def test_a_gpu_that_breaks_but_is_still_listed_is_left_alone(all_there, pool):
    found = measured(pool, jobs(), then=lambda: all_there.set([f"{UUIDS[0]} broken", UUIDS[1]]))

    assert Counter(m.status for m in found)["ok"] >= 11  # one candidate may have met it three times
    assert {m.device for m in found[-4:] if m.status == "ok"} == {f"Stand-in GPU {UUIDS[1]}"}


def test_where_all_gpus_break_the_run_stops_and_says_of_what(all_there, pool):
    all_there.set([f"{uuid} broken" for uuid in UUIDS])

    with pytest.raises(DeviceError, match=r"was lost 3 times.*The last time: the GPU failed: .*CUDA|unknown error"):
        measured(pool, jobs())


def test_without_any_gpu_left_the_run_stops_and_the_next_goes_on(all_there, pool):
    found = []

    def measure_until_all_are_gone():
        for measurement in pool.run(jobs()):
            found.append(measurement)
            all_there.set([])

    with pytest.raises(DeviceError, match=r"No GPU is there.*\n.*the same command continues"):
        measure_until_all_are_gone()
    all_there.set(UUIDS[:1])

    assert {m.status for m in found} == {"ok"}
    with closing(DevicePool(targets.target("cuda"), CONFIG, GpuFleet())) as again:
        assert {m.status for m in measured(again, jobs()[len(found) :])} == {"ok"}


def test_a_killed_process_of_a_gpu_costs_no_candidate(pool):
    killed = itertools.count()

    def kill():
        for driver in pool._processes.drivers:
            psutil.Process(driver._process.pid).kill()
            next(killed)

    assert {m.status for m in measured(pool, jobs(), then=kill)} == {"ok"}
    assert next(killed) == 2


def test_gpus_that_are_there_but_take_nothing_are_not_said_to_be_absent(all_there):
    fleet = GpuFleet()
    assert len(fleet.slots()) == 2

    assert (
        f"None of the GPUs here takes a candidate, though nvidia-smi lists them: {', '.join(UUIDS)}" in fleet.missing()
    )


def test_gpus_stay_where_nvidia_smi_fails_until_they_are_lost_again_and_again(all_there, monkeypatch, tmp_path):
    """As it does for all when one fell off its bus."""
    fleet = GpuFleet()
    both = fleet.slots()
    monkeypatch.setenv("PATH", os.fspath(tmp_path), prepend=os.pathsep)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 15\n")
    (tmp_path / "nvidia-smi").chmod(0o755)

    for slot in both:
        fleet.report(slot, "its process was killed")
    assert fleet.slots() == both

    for _ in range(2):
        fleet.report(both[0], "it fell off its bus")
    assert fleet.slots() == both[1:]


def test_a_machine_whose_tvm_finds_no_cuda_says_what_it_needs(all_there, fresh_launcher, monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH")
    with (
        closing(DevicePool(targets.target("cuda"), CONFIG, GpuFleet())) as pool,
        pytest.raises(DeviceError, match=r"needs libcuda.so.1.* and libcudart.so.13"),
    ):
        list(pool.run(jobs(1)))


def test_a_machine_without_nvcc_says_so(all_there, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    (tmp_path / "nvidia-smi").symlink_to(Path(os.environ["STANDIN_DEVICES"]).parent / "bin" / "nvidia-smi")
    with (
        closing(DevicePool(targets.target("cuda"), CONFIG, GpuFleet())) as pool,
        pytest.raises(DeviceError, match="no nvcc on PATH"),
    ):
        list(pool.run(jobs(1)))
