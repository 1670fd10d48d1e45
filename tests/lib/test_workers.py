import os
import signal

import psutil
import pytest

from lib import search
from lib.errors import DeviceError
from lib.workers import LocalPool, Worker
from tests.conftest import QUICK
from tests.helpers import LOOPS_FOR_EVER, SEGFAULTS, job, matmul


def statuses(measurements):
    return {m.candidate_id: m.status for m in measurements}


def worker_processes():
    return [p for p in psutil.Process().children(recursive=True) if "lib.worker" in " ".join(p.cmdline())]


def test_a_good_candidate_has_latencies_and_times(pool, cpu):
    [found] = pool.run([job("good", matmul())])

    assert found.status == "ok"
    assert len(found.latencies) == QUICK.repeats
    assert all(0 < latency < 1e-2 for latency in found.latencies)
    assert found.build_s > 0
    assert found.run_s > 0
    assert (found.error, found.threads) == (None, cpu.threads)


def test_a_crash_does_not_lose_what_its_worker_had_built(pool, cpu):
    proposals = search.sample(matmul(), cpu.tvm(), 6, known=set(), seed=0)
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


def test_a_clearly_slow_candidate_is_timed_once(cpu, pool):
    proposals = search.sample(matmul(64, 256, 256), cpu.tvm(), 4, known=set(), seed=0)
    jobs = [job(f"sampled {n}", matmul(64, 256, 256), p.trace) for n, p in enumerate(proposals)]

    found = list(pool.run([*jobs, job("untuned", matmul(64, 256, 256))]))

    times = {m.candidate_id: m.latencies for m in found}
    assert max(len(latencies) for latencies in times.values()) == QUICK.repeats
    best = min(min(latencies) for latencies in times.values())
    assert len(times["untuned"]) == (1 if times["untuned"][0] > QUICK.slow_factor * best else QUICK.repeats)


def test_a_baseline_that_takes_too_long_costs_the_others_nothing(pool, cpu):
    [proposal] = search.sample(matmul(), cpu.tvm(), 1, known=set(), seed=0)
    workload = job("", LOOPS_FOR_EVER).workload

    found, base = pool.compare(workload, [], 2, baseline=search.EMPTY_TRACE)

    assert (found, base) == ([], [])
    assert len(pool.compare(job("", matmul()).workload, [proposal.trace], 2, baseline=search.EMPTY_TRACE)[0][0]) == 2


def test_closing_the_pool_ends_its_processes(cpu):
    before = set(worker_processes())
    pool = LocalPool(cpu, QUICK)
    list(pool.run([job("good", matmul())]))
    assert set(worker_processes()) - before

    pool.close()

    assert not set(worker_processes()) - before


def test_a_worker_ends_soon_after_its_socket_closes(cpu):
    worker = Worker(cpu)
    worker.wait_until_ready()
    process = worker._process

    worker._socket.close()

    assert process.wait(timeout=5) == 0
    worker._output.close()


def test_workers_that_do_not_start_stop_the_run_with_a_message(cpu, monkeypatch):
    monkeypatch.setattr("lib.workers.sys.executable", "/bin/false")
    pool = LocalPool(cpu, QUICK)

    with pytest.raises(DeviceError, match="No worker process could be started: worker ended with exit code 1"):
        list(pool.run([job("good", matmul())]))
