import subprocess
import sys
import threading

import pytest

from lib import locks
from tests.helpers import ROOT

HOLD = """
import sys
from pathlib import Path
from lib import locks

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
