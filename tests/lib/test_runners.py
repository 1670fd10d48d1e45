"""What every runner with devices promises, whatever it measures on."""

import re
from dataclasses import replace

import pytest

from lib import search, targets
from lib.device_pool import DevicePool
from lib.fleet import RpcFleet
from lib.search import EMPTY_TRACE
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


@pytest.fixture(params=["local", "rpc"])
def runner(request):
    return request.getfixturevalue({"local": "pool", "rpc": "over_rpc"}[request.param])


def traces_of(workload, cpu, n):
    return [proposal.trace for proposal in search.sample(workload, cpu.tvm(), n, known=set(), seed=0)]


def test_each_candidate_is_measured_once(runner, cpu):
    jobs = [job(f"candidate {n}", matmul(), trace) for n, trace in enumerate(traces_of(matmul(), cpu, 6))]
    jobs += [job(f"other {n}", matmul(n=8), trace) for n, trace in enumerate(traces_of(matmul(n=8), cpu, 4))]

    found = list(runner.run(jobs))

    assert sorted(m.candidate_id for m in found) == sorted(j.candidate_id for j in jobs)
    assert {m.subgraph_id for m in found} == {j.subgraph_id for j in jobs}
    assert all((m.status, m.error) == ("ok", None) for m in found)
    assert all(0 < latency < 1e-2 for m in found for latency in m.latencies)
    assert all(m.build_s > 0 and m.run_s > 0 and m.device and m.host and m.versions for m in found)


def test_the_clock_says_what_the_last_run_took(runner):
    list(runner.run([job("good", matmul())]))

    assert runner.clock.keys() <= {"start", "build", "run"}
    assert runner.clock["run"] > 0


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
def test_each_failure_has_its_status_and_costs_one_candidate(runner, workload, trace, status, told):
    jobs = [job("before", matmul()), job("faulty", workload, trace), job("after", matmul(n=8))]

    found = {m.candidate_id: m for m in runner.run(jobs)}

    assert {name: m.status for name, m in found.items()} == {"before": "ok", "faulty": status, "after": "ok"}
    assert found["faulty"].latencies == []
    assert re.search(told, found["faulty"].error)


def test_a_kernel_that_calls_the_c_library_runs(runner):
    [found] = runner.run([job("power", power())])

    assert (found.status, found.error) == ("ok", None)


def test_token_ids_are_valid_so_that_a_gather_runs(runner):
    [found] = runner.run([job("gather", gather(rows=3))])

    assert found.status == "ok"


def test_programs_are_compared_in_turn_with_the_baseline_before_and_after(runner, cpu):
    found, base = runner.compare(job("", matmul()).workload, traces_of(matmul(), cpu, 2), 3, baseline=EMPTY_TRACE)

    assert [len(latencies) for latencies in found] == [3, 3]
    assert len(base) == 2


def test_one_program_that_fails_spoils_no_other(runner, cpu):
    traces = [*traces_of(matmul(), cpu, 1), '[["nonsense"]]']

    found, base = runner.compare(job("", matmul()).workload, traces, 2, baseline=EMPTY_TRACE)

    assert [len(latencies) for latencies in found] == [2, 0]
    assert len(base) == 2


def test_a_baseline_that_takes_too_long_is_no_failure(runner):
    assert runner.compare(job("", LOOPS_FOR_EVER).workload, [], 2, baseline=EMPTY_TRACE) == ([], [])


def test_a_right_program_checks_against_the_untuned_one(runner, cpu):
    [trace] = traces_of(matmul(), cpu, 1)

    assert runner.check(job("", matmul()).workload, trace, timeout_s=10) < 1e-5


def test_a_check_that_crashes_says_nothing(runner):
    assert runner.check(job("", SEGFAULTS).workload, EMPTY_TRACE, timeout_s=10) is None


def test_it_measures_again_after_it_was_closed(runner):
    list(runner.run([job("first", matmul())]))

    runner.close()

    assert [m.status for m in runner.run([job("second", matmul())])] == ["ok"]
