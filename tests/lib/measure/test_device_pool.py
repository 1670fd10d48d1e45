"""What can happen to devices elsewhere; what can happen to candidates is in `test_runners.py`."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace

import psutil
import pytest

from lib.contracts.errors import DeviceError
from lib.machine import targets
from lib.measure.device_pool import DevicePool
from lib.measure.fleet import RpcFleet
from lib.measure.process import WorkerDied
from lib.measure.protocol import Begun
from lib.rpc_server import scratch_folder
from lib.search import evolution
from tests.conftest import QUICK
from tests.farm import KEY, Farm, kill, until
from tests.helpers import LOOPS_FOR_EVER, ROOT, SEGFAULTS, job, matmul

CONFIG = replace(QUICK, min_repeat_s=0.02, device_patience_s=60)


@pytest.fixture
def target():
    return targets.cpu_target(threads=1)


@pytest.fixture
def farm():
    farm = Farm(servers=2)
    yield farm
    farm.close()


@pytest.fixture
def pool(farm, target):
    pool = DevicePool(target, CONFIG, RpcFleet(farm.tracker, KEY, target))
    yield pool
    pool.close()


@pytest.fixture
def jobs(target):
    proposals = evolution.sample(matmul(), target.tvm(), 12, known=set(), seed=0)
    return [job(f"candidate {n}", matmul(), proposal.trace) for n, proposal in enumerate(proposals)]


def measured(pool, jobs, *, after=2, then=lambda: None):
    """Statuses of all rows; something happens after the first few."""
    found = []
    for measurement in pool.run(jobs):
        found.append(measurement)
        if len(found) == after:
            then()
    assert sorted(m.candidate_id for m in found) == sorted(j.candidate_id for j in jobs)
    return Counter(m.status for m in found)


def sessions(server):
    """Processes that a server started for its sessions."""
    return server.children(recursive=True)


def test_both_servers_measure(pool, jobs):
    found = list(pool.run(jobs))

    assert len({m.device for m in found}) == 2
    assert all(m.device.startswith(f"{KEY} at 127.0.0.1:") for m in found)


def test_a_killed_server_costs_no_candidate(farm, pool, jobs):
    assert measured(pool, jobs, then=lambda: kill(farm.servers[0])) == {"ok": 12}


@pytest.mark.parametrize("kind", ["compilers", "drivers"])
def test_a_process_that_ends_with_a_candidate_is_replaced_when_its_end_was_heard(pool, kind):
    """Else the pool would listen to what is closed."""
    processes = pool._processes
    start = getattr(processes, f"start_{kind}")
    start()
    dead, *others = getattr(processes, kind)
    dead._signal(signal.SIGKILL)
    until(lambda: not dead.alive())

    start(busy=[dead])
    assert [*getattr(processes, kind)] == [dead, *others]
    with pytest.raises(WorkerDied, match="SIGKILL"):
        dead.receive(Begun, 1)
    start()
    assert dead not in getattr(processes, kind)
    assert len(getattr(processes, kind)) == 1 + len(others)


def test_a_frozen_server_costs_no_candidate(farm, pool, jobs):
    server = farm.servers[0]

    def to_all(do):
        for process in [server, *sessions(server)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # a session that ended meanwhile
                do(process)

    try:
        assert measured(pool, jobs, then=lambda: to_all(psutil.Process.suspend)) == {"ok": 12}
    finally:
        to_all(psutil.Process.resume)


def test_servers_that_are_killed_and_started_again_go_on(farm, pool, jobs):
    def restart():
        for server in farm.servers:
            kill(server)
        threading.Timer(3, lambda: [farm.start_server() for _ in range(2)]).start()

    assert measured(pool, jobs, then=restart) == {"ok": 12}


def test_a_tracker_that_goes_and_comes_back_is_waited_for(farm, pool, jobs):
    def restart():
        farm.stop_tracker()
        threading.Timer(3, farm.start_tracker).start()

    assert measured(pool, jobs, then=restart) == {"ok": 12}


def kill_a_session(farm):
    """Kills a server's processes for its sessions, and tells whether there were any."""
    for server in farm.servers:
        if processes := sessions(server):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                    process.kill()
            return True
    return False


def test_a_session_killed_from_outside_is_not_the_candidates_fault(farm, pool, jobs):
    # As soon as there is one: a fast machine is through in two seconds.
    killer = threading.Thread(target=lambda: until(lambda: kill_a_session(farm)))
    killer.start()

    assert measured(pool, jobs) == {"ok": 12}
    killer.join()


def test_a_candidate_under_which_three_devices_die_is_given_up(farm, pool, jobs):
    """So that one that takes whole servers with it does not take them all."""
    stop = threading.Event()

    def kill_sessions():
        while not stop.is_set():
            kill_a_session(farm)
            time.sleep(0.05)

    killer = threading.Thread(target=kill_sessions)
    killer.start()
    try:
        [found] = pool.run([job("fatal", matmul(512, 2048, 2048))])
    finally:
        stop.set()
        killer.join()

    assert found.status == "crash"
    assert "its device was lost 3 times" in found.error
    assert measured(pool, jobs) == {"ok": 12}


def test_candidates_that_crash_and_hang_leave_the_servers_as_they_were(farm, pool, jobs):
    faulty = [job(f"crash {n}", SEGFAULTS) for n in range(3)] + [job("hang", LOOPS_FOR_EVER)]

    assert measured(pool, [*faulty, *jobs]) == {"ok": 12, "crash": 3, "timeout": 1}
    assert farm.registered() == 2
    assert all(server.is_running() for server in farm.servers)


@pytest.fixture
def impatient(farm, target):
    """A pool that soon gives up waiting for a device."""
    with closing(DevicePool(target, replace(CONFIG, device_patience_s=3), RpcFleet(farm.tracker, KEY, target))) as pool:
        yield pool


def test_without_any_device_the_run_stops_and_the_next_goes_on_when_one_is_back(farm, pool, impatient, jobs):
    found = []

    def measure_until_all_are_gone():
        for measurement in impatient.run(jobs):
            found.append(measurement)
            if len(found) == 2:
                for server in farm.servers:
                    kill(server)

    with pytest.raises(DeviceError, match="No server is registered under 'test'"):
        measure_until_all_are_gone()

    farm.start_server()
    left = [each for each in jobs if each.candidate_id not in {m.candidate_id for m in found}]
    assert measured(pool, left) == {"ok": 12 - len(found)}


def test_without_a_tracker_the_run_stops_and_says_so(farm, impatient, jobs):
    farm.stop_tracker()

    with pytest.raises(DeviceError, match="does not answer"):
        list(impatient.run(jobs))


def test_a_server_with_other_threads_than_the_target_is_refused(farm, jobs):
    """What is measured is what is deployed."""
    two = targets.cpu_target(threads=2)
    with (
        closing(DevicePool(two, CONFIG, RpcFleet(farm.tracker, KEY, two))) as pool,
        pytest.raises(DeviceError, match=r"runs kernels on 1 threads, but the target has 2.*--threads 2"),
    ):
        list(pool.run(jobs))


def test_a_server_that_comes_later_is_used(farm, pool, jobs):
    kill(farm.servers[0])
    farm.wait_for(1)
    devices: set[str] = set()
    for measurement in pool.run(
        [job(f"{n} {each.candidate_id}", matmul(), each.trace) for n in range(100) for each in jobs]
    ):
        if not devices:
            farm.start_server()
        devices.add(measurement.device)
        if len(devices) == 2:
            break

    assert len(devices) == 2


def test_sessions_end_with_their_server(farm, pool):
    list_of_runs = threading.Thread(target=lambda: list(pool.run([job("hang", LOOPS_FOR_EVER)])))
    list_of_runs.start()
    until(lambda: any(sessions(server) for server in farm.servers))
    [server] = [server for server in farm.servers if sessions(server)]
    [session] = sessions(server)

    kill(server)

    session.wait(timeout=5)
    list_of_runs.join()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = "import os; from lib.rpc_server import scratch_folder; scratch_folder(); os.kill(os.getpid(), 9)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, env=environment)
    [left] = tmp_path.iterdir()

    mine = scratch_folder()

    assert not left.exists()
    assert list(tmp_path.iterdir()) == [mine]


def test_closing_leaves_no_process_and_no_file(farm, pool, jobs):
    list(pool.run(jobs[:4]))
    folder = pool._processes.scratch()
    processes = [
        psutil.Process(worker._process.pid) for worker in (*pool._processes.compilers, *pool._processes.drivers)
    ]
    assert folder.is_dir()
    assert len(processes) > 2

    pool.close()

    assert not folder.exists()
    assert not [process for process in processes if process.is_running()]
