import os
import signal

import psutil
import pytest

from lib import search
from lib.errors import DeviceError
from lib.workers import LocalPool, Worker
from tests.conftest import QUICK
from tests.helpers import DOES_NOT_COMPILE, LOOPS_FOR_EVER, SEGFAULTS, gather, job, matmul


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


@pytest.mark.parametrize(
    ("workload", "status", "told"),
    [
        (SEGFAULTS, "crash", "while running: worker ended with signal SIGSEGV"),
        (LOOPS_FOR_EVER, "timeout", "while running: killed for taking too long: 2 s"),
        (DOES_NOT_COMPILE, "build_error", "InternalError: not implemented"),
    ],
)
def test_each_failure_has_its_status_and_costs_one_candidate(pool, workload, status, told):
    jobs = [job("before", matmul()), job("faulty", workload), job("after", matmul(n=8))]

    found = {m.candidate_id: m for m in pool.run(jobs)}

    assert statuses(found.values()) == {"before": "ok", "faulty": status, "after": "ok"}
    assert told in found["faulty"].error
    assert found["faulty"].latencies == []


def test_a_trace_that_does_not_fit_is_a_build_error(pool, cpu):
    [proposal] = search.sample(matmul(), cpu.tvm(), 1, known=set(), seed=0)

    [found] = pool.run([job("foreign", gather(), proposal.trace)])

    assert found.status == "build_error"


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


def test_token_ids_are_valid_so_that_a_gather_runs(pool):
    [found] = pool.run([job("gather", gather(rows=3))])

    assert found.status == "ok"


def test_a_clearly_slow_candidate_is_timed_once(cpu, pool):
    proposals = search.sample(matmul(64, 256, 256), cpu.tvm(), 4, known=set(), seed=0)
    jobs = [job(f"sampled {n}", matmul(64, 256, 256), p.trace) for n, p in enumerate(proposals)]

    found = list(pool.run([*jobs, job("untuned", matmul(64, 256, 256))]))

    times = {m.candidate_id: m.latencies for m in found}
    assert max(len(latencies) for latencies in times.values()) == QUICK.repeats
    best = min(min(latencies) for latencies in times.values())
    assert len(times["untuned"]) == (1 if times["untuned"][0] > QUICK.slow_factor * best else QUICK.repeats)


def test_programs_are_compared_in_turn_with_the_baseline_before_and_after(pool, cpu):
    traces = [p.trace for p in search.sample(matmul(), cpu.tvm(), 2, known=set(), seed=0)]
    workload = job("", matmul()).workload

    found, base = pool.compare(workload, traces, 3, baseline=search.EMPTY_TRACE)

    assert [len(latencies) for latencies in found] == [3, 3]
    assert len(base) == 2


def test_a_right_program_checks_against_the_untuned_one(pool, cpu):
    [proposal] = search.sample(matmul(), cpu.tvm(), 1, known=set(), seed=0)

    assert pool.check(job("", matmul()).workload, proposal.trace, timeout_s=10) < 1e-5


def test_a_baseline_that_takes_too_long_costs_the_others_nothing(pool, cpu):
    [proposal] = search.sample(matmul(), cpu.tvm(), 1, known=set(), seed=0)
    workload = job("", LOOPS_FOR_EVER).workload

    found, base = pool.compare(workload, [], 2, baseline=search.EMPTY_TRACE)

    assert (found, base) == ([], [])
    assert len(pool.compare(job("", matmul()).workload, [proposal.trace], 2, baseline=search.EMPTY_TRACE)[0][0]) == 2


def test_one_program_that_fails_spoils_no_other(pool, cpu):
    [proposal] = search.sample(matmul(), cpu.tvm(), 1, known=set(), seed=0)
    workload = job("", matmul()).workload

    found, base = pool.compare(workload, [proposal.trace, '[["nonsense"]]'], 2, baseline=search.EMPTY_TRACE)

    assert [len(latencies) for latencies in found] == [2, 0]
    assert len(base) == 2


def test_a_check_that_crashes_says_nothing(pool):
    assert pool.check(job("", SEGFAULTS).workload, search.EMPTY_TRACE, timeout_s=10) is None


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
