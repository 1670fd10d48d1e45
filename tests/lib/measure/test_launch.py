"""What holds of worker processes whatever they run: how they begin, what they may have, and when they end."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import tvm

from lib.contracts.errors import DeviceError
from lib.measure import launch, launcher
from lib.measure.process import Worker, start_all
from lib.measure.protocol import Build, Built, Failed, Time
from lib.tir.traces import EMPTY_TRACE
from tests.farm import until
from tests.helpers import ROOT, matmul, reads
from tests.launched import SIZES_MIB

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limits")


class Launched:
    """A process that does something of `tests.launched`."""

    def __init__(self, folder, what, n_bytes=0, afresh=False):
        self.connection, theirs = socket.socketpair()
        self._output = folder / "output"
        with theirs, self._output.open("wb") as output:
            self.process = launcher.start(
                "tests.launched", what, connection=theirs, output=output, environment={"MARK": "set"},
                memory_bytes=n_bytes, afresh=afresh,
            )  # fmt: skip

    def said(self):
        with self.connection:
            return self.connection.recv(1000)

    def printed(self):
        return self._output.read_text()


def server():
    return launcher._server()._process


def test_a_process_has_its_socket_arguments_environment_and_session_and_no_thread_of_tvm(tmp_path):
    told = Launched(tmp_path, "tell")

    assert told.said() == b"['set', True, '', 1]"
    assert told.process.wait() == 0


@LINUX  # where a process's command can be read
def test_a_process_that_begins_afresh_is_a_program_of_its_own_with_all_that_others_have(tmp_path):
    told = Launched(tmp_path, "tell", afresh=True)
    sleeping, forked = Launched(tmp_path, "sleep", afresh=True), Launched(tmp_path, "sleep")
    for each in (sleeping, forked):
        assert each.connection.recv(10) == b"asleep"
    commands = [psutil.Process(each.process.pid).cmdline() for each in (sleeping, forked)]
    for each in (sleeping, forked):
        os.kill(each.process.pid, signal.SIGKILL)
        each.connection.close()

    assert told.said() == b"['set', True, '', 1]"
    assert told.process.wait() == 0
    assert commands[0][2:4] == ["lib.measure.launch", "tests.launched"]
    assert commands[1] == server_command()


def server_command():
    return psutil.Process(server().pid).cmdline()


@pytest.mark.parametrize("afresh", [False, True])
def test_processes_end_with_the_one_that_started_them_and_others_can_be_started(tmp_path, afresh):
    sleeping = Launched(tmp_path, "sleep", afresh=afresh)
    assert sleeping.connection.recv(10) == b"asleep"

    server().kill()

    assert sleeping.said() == b""
    assert sleeping.process.wait() == -signal.SIGKILL
    assert Launched(tmp_path, "tell").said()


def test_processes_begin_without_loading_tvm_again(tmp_path):
    Launched(tmp_path, "tell").said()  # the process that they are forked from is there now
    before = time.monotonic()

    Launched(tmp_path, "tell").said()

    assert time.monotonic() - before < 1


@pytest.mark.usefixtures("fresh_launcher")
def test_what_is_made_ready_is_what_the_first_process_is_forked_from(tmp_path):
    launcher.prepare()
    [prepared] = [running._process for running in launcher._running]
    launcher.prepare()

    told = Launched(tmp_path, "tell")

    assert told.said()
    assert server() is prepared


@pytest.mark.parametrize("afresh", [False, True])
def test_what_a_process_dies_of_is_its_exit_code_and_printed(tmp_path, afresh):
    failed = Launched(tmp_path, "fail", afresh=afresh)

    assert failed.said() == b""
    assert failed.process.wait() == 1
    assert failed.printed().rstrip().endswith("ValueError: on purpose")


def test_a_process_lives_until_it_is_killed_and_its_exit_code_names_the_signal(tmp_path):
    sleeping = Launched(tmp_path, "sleep")
    assert sleeping.connection.recv(10) == b"asleep"
    assert sleeping.process.poll() is None

    os.kill(sleeping.process.pid, signal.SIGKILL)

    assert sleeping.process.wait() == sleeping.process.poll() == -signal.SIGKILL
    sleeping.connection.close()


@pytest.mark.usefixtures("fresh_launcher")
@pytest.mark.parametrize(
    ("tvm_does", "told"),
    [("raise ImportError('no TVM today')", "no TVM today"), ("import time; time.sleep(600)", "exit code -9")],
)
def test_no_process_is_started_where_tvm_cannot_be_loaded(cpu, tmp_path, monkeypatch, tvm_does, told):
    (tmp_path / "tvm.py").write_text(tvm_does)
    (tmp_path / "lib").symlink_to(ROOT / "lib")
    monkeypatch.setattr(launcher, "_ROOT", tmp_path)
    monkeypatch.setattr(launcher, "_PATIENCE_S", 5.0)

    with pytest.raises(DeviceError, match=rf"No worker process could be started: .*{told}.*the same command"):
        Worker(cpu)


def test_where_the_system_lets_no_process_begin_those_that_live_go_on(tmp_path, monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "output").open("wb") as output:
        monkeypatch.setattr(os, "fork", refuse)
        serving = threading.Thread(target=launch.serve, args=(theirs,))
        serving.start()
        socket.send_fds(ours, [launch.Start("tests.launched", ["tell"], {}, 0).line()], [output.fileno()] * 2)

        assert ours.recv(1000) == b'"[Errno 11] no more processes"\n'
        ours.shutdown(socket.SHUT_RDWR)
        serving.join(10)
        assert not serving.is_alive()


def refuse():
    raise BlockingIOError(11, "no more processes")


def test_a_fork_of_this_process_starts_processes_of_its_own(tmp_path):
    Launched(tmp_path, "tell").said()
    answers = multiprocessing.get_context("fork").SimpleQueue()

    def in_the_fork():
        answers.put((Launched(tmp_path, "tell").said(), server().pid))

    fork = multiprocessing.get_context("fork").Process(target=in_the_fork)
    fork.start()
    said, pid = answers.get()
    fork.join()

    assert said == b"['set', True, '', 1]"
    assert pid != server().pid
    assert Launched(tmp_path, "tell").said() == said


@pytest.mark.parametrize("moment", ["loading", "serving"])
def test_all_processes_end_with_the_one_that_started_them(tmp_path, moment):
    code = """
        import sys, time
        from pathlib import Path
        from lib.measure import launcher
        from tests.lib.measure.test_launch import Launched
        if sys.argv[2] == "serving":
            Launched(Path(sys.argv[1]), "sleep").connection.recv(10)
        launcher._server()
        print("there", flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), os.fspath(tmp_path), moment], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert parent.stdout.readline() == b"there\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) == {"loading": 1, "serving": 2}[moment]

    parent.kill()
    parent.communicate()

    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))


@LINUX
def test_memory_beyond_the_limit_is_refused_to_the_process_and_to_what_it_starts(tmp_path):
    taking = Launched(tmp_path, "take memory", n_bytes=700 << 20)

    assert taking.process.wait() == 0
    assert taking.printed().split("\n") == [f"{SIZES_MIB[0]} MiB", f"no {SIZES_MIB[1]} MiB"] * 2 + [""]
    taking.connection.close()


@LINUX
def test_a_candidate_that_needs_more_memory_than_it_may_have_fails_and_its_worker_goes_on(cpu):
    [worker] = start_all([lambda: Worker(cpu, memory_bytes=1 << 30)])

    worker.define(tvm.ir.save_json(reads(1 << 29)), 10)  # 2 GiB of float32
    assert isinstance(worker.ask(Build("large", EMPTY_TRACE), 60), Built)
    found = worker.ask(Time("large", 1, 0.001), 60)
    worker.define(tvm.ir.save_json(matmul()), 10)
    worker.ask(Build("small", EMPTY_TRACE), 60)
    others = worker.ask(Time("small", 1, 0.001), 60)
    worker.kill()

    assert isinstance(found, Failed)
    assert "emory" in found.error
    assert not isinstance(others, Failed)
