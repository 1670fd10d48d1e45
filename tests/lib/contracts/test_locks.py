import os
import stat
import subprocess
import sys
import threading

import pytest

from lib.contracts import locks
from tests.helpers import ROOT

HOLD = """
import sys
from pathlib import Path
from lib.contracts import locks

with locks.exclusive(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def holder(lock):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == "in\n"
    return process


def test_who_comes_second_waits_and_is_told_so(tmp_path):
    first, told = holder(tmp_path / "lock"), []
    entered = threading.Event()

    def enter():
        with locks.exclusive(tmp_path / "lock", on_wait=lambda: told.append("waits")):
            entered.set()

    second = threading.Thread(target=enter)
    second.start()

    assert not entered.wait(0.5)
    assert told == ["waits"]
    first.communicate("")
    assert entered.wait(10)
    second.join()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    first = holder(tmp_path / "lock")
    first.kill()
    first.communicate()

    with locks.exclusive(tmp_path / "lock", on_wait=lambda: pytest.fail("it is not free")):
        pass


def test_who_comes_alone_is_told_nothing(tmp_path):
    with locks.exclusive(tmp_path / "folder" / "lock", on_wait=lambda: pytest.fail("nobody is there")):
        pass


def test_all_users_and_sessions_wait_for_the_same_cpu(monkeypatch, tmp_path):
    monkeypatch.delenv("TUNER_LOCKS")
    before = locks.of_this_machine("llvm")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # in no list of users, as under `docker run --user`

    assert locks.of_this_machine("llvm") == before
    assert locks.of_this_machine("cuda") != before


def test_others_may_wait_for_a_lock_whatever_the_umask(tmp_path):
    umask = os.umask(0o077)
    try:
        with locks.exclusive(tmp_path / "lock"):
            pass
    finally:
        os.umask(umask)

    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o644


def test_a_lock_of_somebody_else_is_waited_for_without_writing_to_it(tmp_path):
    lock = tmp_path / "lock"
    lock.touch(mode=0o444)
    os.utime(lock, ns=(0, 0))

    with locks.exclusive(lock, on_wait=lambda: pytest.fail("it is free")):
        pass

    assert lock.stat().st_mtime_ns == 0
