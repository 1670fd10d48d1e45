"""A worker process, asked what it may be asked and what it may not."""

import os
import signal
import time

import pytest
import tvm

from lib.contracts.errors import DeviceError, ProtocolError
from lib.contracts.statuses import Status
from lib.measure.process import Worker, WorkerDied, WorkerTimeout, answered_or_late, start_all
from lib.measure.protocol import (
    Begun,
    Build,
    Built,
    Compile,
    Compiled,
    Define,
    Done,
    Drop,
    Failed,
    Measure,
    Param,
    Time,
    Timed,
)
from lib.tir.traces import EMPTY_TRACE
from tests.farm import until
from tests.helpers import LOOPS_FOR_EVER, SEGFAULTS, matmul


@pytest.fixture
def worker(cpu):
    [worker] = start_all([lambda: Worker(cpu)])
    yield worker
    worker.kill()


def text(workload):
    return tvm.ir.save_json(workload)


def test_an_answer_is_of_the_type_that_the_request_names(worker):
    worker.define(text(matmul()), 10)

    assert isinstance(worker.ask(Build("a", EMPTY_TRACE), 10), Built)
    timed = worker.ask(Time("a", 2, 0.001), 10)
    assert isinstance(timed, Timed)
    assert len(timed.latencies) == 2
    assert timed.run_s > 0
    assert worker.ask(Drop(), 10) == Done()


@pytest.mark.parametrize(
    ("request_", "status"),
    [(Build("a", '[["nonsense"]]'), Status.BUILD_ERROR), (Time("never built", 2, 0.001), Status.RUN_ERROR)],
)
def test_a_request_that_raises_fails_with_the_status_of_its_kind(worker, request_, status):
    worker.define(text(matmul()), 10)

    reply = worker.ask(request_, 10)

    assert isinstance(reply, Failed)
    assert reply.status is status
    assert "Error: " in reply.error


def test_a_workload_is_sent_when_it_is_another_one_only(worker, monkeypatch, tmp_path):
    sent = []
    send = worker.send
    monkeypatch.setattr(worker, "send", lambda request: sent.append(type(request)) or send(request))
    params = []
    for n, workload in enumerate([matmul(), matmul(), matmul(n=8), matmul()]):
        worker.define(text(workload), 10)
        params.append(worker.ask(Compile(EMPTY_TRACE, tmp_path / f"{n}.so"), 10).params)

    assert sent == [Define, Compile, Compile, Define, Compile, Define, Compile]
    assert params[0] == params[1] == params[3] != params[2]


def test_a_workload_that_does_not_load_fails_what_is_built_from_it(worker):
    worker.define(text(matmul()), 10)
    worker.define("no workload", 10)

    reply = worker.ask(Build("a", EMPTY_TRACE), 10)

    assert isinstance(reply, Failed)
    assert reply.status is Status.BUILD_ERROR


def test_a_request_of_another_kind_of_process_is_refused_and_the_worker_goes_on(worker, tmp_path):
    measure = Measure(tmp_path / "a.so", (Param((1,), "float32", 0),), 1, 0.001, None, 1.0)

    with pytest.raises(ProtocolError, match=r"this process serves no Measure.*start the command again"):
        worker.ask(measure, 10)

    assert worker.ask(Drop(), 10) == Done()


def test_a_line_that_is_no_message_is_refused_and_the_worker_goes_on(worker):
    worker._socket.sendall(b'{"do": "drop"}\n')

    with pytest.raises(ProtocolError, match="refused a request: not one of Define"):
        worker.receive(Done, 10)

    assert worker.ask(Drop(), 10) == Done()


def test_an_answer_of_another_type_than_was_due_is_an_error(worker):
    worker.send(Drop())

    with pytest.raises(ProtocolError, match=r"sent Done\(\) where Begun was due"):
        worker.receive(Begun, 10)


@pytest.mark.parametrize(
    ("workload", "error", "status"),
    [(SEGFAULTS, WorkerDied, Status.CRASH), (LOOPS_FOR_EVER, WorkerTimeout, Status.TIMEOUT)],
)
def test_a_worker_that_is_gone_says_what_that_is_of_its_candidate(worker, workload, error, status):
    worker.define(text(workload), 10)
    worker.ask(Build("a", EMPTY_TRACE), 10)

    with pytest.raises(error) as raised:
        worker.ask(Time("a", 1, 0.001), 1)

    assert raised.value.status is status
    assert not raised.value.from_outside
    assert not worker.alive()


def test_answers_that_came_together_are_both_heard_at_once(worker):
    """A driver may say that it has its device, and what it measured there, before anybody listens."""
    worker.send(Drop())
    worker.send(Drop())
    time.sleep(0.5)
    worker.receive(Done, 10)
    assert worker.answered()
    start = time.monotonic()

    heard = answered_or_late({worker: start + 60})

    assert heard == [worker]
    assert worker.receive(Done, 0) == Done()
    assert time.monotonic() - start < 5


def test_waiting_ends_with_a_deadline_or_with_the_next_look(worker):
    start = time.monotonic()

    assert answered_or_late({worker: start + 60}, look_again=start + 0.2) == []
    assert answered_or_late({worker: start + 0.4}) == [worker]
    assert 0.4 <= time.monotonic() - start < 5


def test_builds_are_counted(worker, tmp_path):
    worker.define(text(matmul()), 10)
    worker.ask(Build("a", EMPTY_TRACE), 10)
    assert isinstance(worker.ask(Compile(EMPTY_TRACE, tmp_path / "a.so"), 10), Compiled)
    worker.ask(Drop(), 10)

    assert worker.builds == 2


def test_a_worker_ends_soon_after_its_socket_closes(worker):
    worker._socket.close()

    until(lambda: worker._process.poll() == 0)


def test_a_worker_that_is_killed_while_it_starts_is_started_again(cpu):
    started = []

    def start():
        if started:
            started.append(Worker(cpu))
        else:
            started.append(Worker(cpu, module="tests.lib.measure.asleep"))
            os.kill(started[0]._process.pid, signal.SIGKILL)
        return started[-1]

    [worker] = start_all([start])

    assert (len(started), worker) == (2, started[1])
    assert worker.alive()
    worker.kill()


def test_workers_that_end_by_themselves_are_not_started_for_ever(cpu):
    started = []

    def start():
        started.append(Worker(cpu, module="lib.measure.no_such_module"))
        return started[-1]

    with pytest.raises(DeviceError, match="No worker process could be started: worker ended with exit code 1"):
        start_all([start])

    assert len(started) == 1
    assert not started[0].alive()
