import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import psutil
import pytest

from lib.contracts.errors import DeviceError
from lib.measure import launcher
from lib.measure.local_pool import LocalPool
from lib.measure.runner import ModelFailed
from lib.search import evolution
from lib.tir import traces
from tests.conftest import QUICK
from tests.helpers import LOOPS_FOR_EVER, SEGFAULTS, job, matmul


def statuses(measurements):
    return {m.candidate_id: m.status for m in measurements}


def worker_processes():
    return [p for p in psutil.Process().children(recursive=True) if p.name() == "worker"]


def test_a_good_candidate_has_latencies_and_times(pool, cpu):
    [found] = pool.run([job("good", matmul())])

    assert found.status == "ok"
    assert len(found.latencies) == QUICK.repeats
    assert all(0 < latency < 1e-2 for latency in found.latencies)
    assert found.build_s > 0
    assert found.run_s > 0
    assert (found.error, found.conditions.threads) == (None, cpu.threads)


def test_time_in_which_candidates_wait_for_other_work_is_told(cpu):
    spin = [sys.executable, "-c", "while True: pass"]
    # Each in a session of its own: Linux shares cores out between sessions first, and all in one would hardly be heard.
    company = [subprocess.Popen(spin, start_new_session=True) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        with closing(LocalPool(cpu, replace(QUICK, min_repeat_s=0.1))) as pool:
            [found] = pool.run([job("good", matmul())])
    finally:
        for process in company:
            process.kill()
            process.wait()

    assert found.status == "ok"
    assert 0.05 * pool.clock["run"] < pool.clock["waited"] < pool.clock["run"]


def test_a_crash_does_not_lose_what_its_worker_had_built(pool, cpu):
    proposals = evolution.sample(matmul(), cpu.tvm(), 6, known=set(), seed=0)
    good = [job(f"good {n}", matmul(), p.trace) for n, p in enumerate(proposals)]

    found = list(pool.run([job("bad 1", SEGFAULTS), *good, job("bad 2", SEGFAULTS)]))

    assert statuses(found) == {**{j.candidate_id: "ok" for j in good}, "bad 1": "crash", "bad 2": "crash"}
    assert len(found) == 8


def test_a_worker_killed_from_outside_is_replaced(pool):
    list(pool.run([job("first", matmul())]))
    for process in worker_processes():
        os.kill(process.pid, signal.SIGKILL)

    found = list(pool.run([job("second", matmul()), job("third", matmul(n=8))]))

    assert sorted(m.candidate_id for m in found if m.status == "ok") == ["second", "third"]


def test_a_check_that_fails_for_want_of_memory_is_made_in_a_new_worker(pool):
    list(pool.run([job("first", matmul()), job("second", matmul(n=8))]))
    for process in worker_processes():
        process.rlimit(psutil.RLIMIT_DATA, (1 << 20, 1 << 20))
    large = job("", matmul(512, 512, 512))

    assert pool.check(large.workload, traces.EMPTY_TRACE, timeout_s=30) < 1e-5


def test_a_clearly_slow_candidate_is_timed_once(cpu, pool):
    proposals = evolution.sample(matmul(64, 256, 256), cpu.tvm(), 4, known=set(), seed=0)
    jobs = [job(f"sampled {n}", matmul(64, 256, 256), p.trace) for n, p in enumerate(proposals)]

    found = list(pool.run([*jobs, job("untuned", matmul(64, 256, 256))]))

    times = {m.candidate_id: m.latencies for m in found}
    assert max(len(latencies) for latencies in times.values()) == QUICK.repeats
    best = min(min(latencies) for latencies in times.values())
    assert len(times["untuned"]) == (1 if times["untuned"][0] > QUICK.slow_factor * best else QUICK.repeats)


def test_a_baseline_that_takes_too_long_costs_the_others_nothing(pool, cpu):
    [proposal] = evolution.sample(matmul(), cpu.tvm(), 1, known=set(), seed=0)
    workload = job("", LOOPS_FOR_EVER).workload

    found, base = pool.compare(workload, [], 2, baseline=traces.EMPTY_TRACE)

    assert (found, base) == ([], [])
    assert len(pool.compare(job("", matmul()).workload, [proposal.trace], 2, baseline=traces.EMPTY_TRACE)[0][0]) == 2


def test_threads_have_a_worker_each_and_time_one_at_a_time(cpu):
    pool = LocalPool(cpu, QUICK)
    proposals = evolution.sample(matmul(), cpu.tvm(), 4, known=set(), seed=0)
    workload, programs = job("", matmul()).workload, [proposal.trace for proposal in proposals]
    seen, timing = set(), []
    in_turn = pool._time_in_turn

    def watched(worker, count, repeats):
        seen.add(worker)
        timing.append("begin")
        try:
            return in_turn(worker, count, repeats)
        finally:
            timing.append("end")

    pool._time_in_turn = watched
    with ThreadPoolExecutor(pool.width) as executor:
        asked = [executor.submit(pool.compare, workload, programs, 3, baseline=None) for _ in range(4)]
        asked.append(executor.submit(pool.compare, job("", SEGFAULTS).workload, [traces.EMPTY_TRACE], 3, baseline=None))
        checks = [executor.submit(pool.check, workload, trace, 60) for trace in programs]
        *found, crashed = [each.result()[0] for each in asked]
        errors = [check.result() for check in checks]
    pool.close()

    assert all(len(latencies) == 3 for each in found for latencies in each)
    assert crashed == [[]]
    assert all(error is not None and error < 1e-4 for error in errors)
    assert timing == ["begin", "end"] * (len(timing) // 2)
    assert len(seen) >= min(pool.width, 2)


def test_closing_the_pool_ends_its_processes(cpu):
    before = set(worker_processes())
    pool = LocalPool(cpu, QUICK)
    list(pool.run([job("good", matmul())]))
    assert set(worker_processes()) - before

    pool.close()

    assert not set(worker_processes()) - before


def test_closing_the_pool_removes_what_killed_compilers_left(cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started, start = [], launcher.start
    monkeypatch.setattr(launcher, "start", lambda *a, **of: started.append(of["environment"]) or start(*a, **of))
    pool = LocalPool(cpu, QUICK)
    list(pool.run([job("first", matmul())]))
    [scratch] = tmp_path.iterdir()
    assert {environment["TMPDIR"] for environment in started} == {str(scratch)}
    (scratch / "lib0.o").touch()

    pool.close()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fresh_launcher")
def test_workers_that_do_not_start_stop_the_run_with_a_message(cpu, monkeypatch):
    monkeypatch.setattr("lib.measure.launcher.sys.executable", "/bin/false")
    pool = LocalPool(cpu, QUICK)

    with pytest.raises(DeviceError, match="No worker process could be started: the process `launch` ended"):
        list(pool.run([job("good", matmul())]))


def test_an_operation_with_a_model_that_takes_too_long_fails_and_the_pool_goes_on(pool, tmp_path):
    with pool.models(timeout_s=0.2) as session:
        [process] = worker_processes()
        process.suspend()
        with pytest.raises(ModelFailed, match="infer: killed for taking too long"):
            session.infer("model", tmp_path / "out.npz")

    assert statuses(pool.run([job("after", matmul())])) == {"after": "ok"}
