"""A CPU of another architecture without a device: what can be done, and what is said of the rest."""

import numpy as np
import pytest
import tvm

from lib.contracts.errors import ConfigError, DeviceError
from lib.machine import targets
from lib.measure import devices, emulator, factory
from lib.measure.absent import AbsentDevice
from lib.measure.local_pool import LocalPool
from lib.search import evolution
from tests.conftest import QUICK
from tests.helpers import job, matmul

PI = targets.cpu_target("raspberry-pi/5")


@pytest.fixture(scope="module")
def absent():
    pool = factory.open_runner(devices.parse("local"), PI, QUICK)
    yield pool
    pool.close()


def test_it_stands_in_for_a_device_of_another_architecture_alone(cpu, absent):
    here = factory.open_runner(devices.parse("local"), cpu, QUICK)

    assert isinstance(absent, AbsentDevice)
    assert isinstance(here, LocalPool)
    assert here.runs == cpu
    assert absent.runs == targets.stand_in(PI)
    assert absent.conditions.target == PI.text
    assert absent.conditions.id != here.conditions.id


def test_nothing_is_measured_and_the_message_says_where_it_could_be(absent):
    with pytest.raises(DeviceError, match=r"--devices rpc://HOST:PORT/KEY.*--trials 0"):
        absent.run([job("a", matmul())])
    assert absent.compare(tvm.ir.save_json(matmul()), ["[]"], 1, baseline="[]") == ([[]], [])


def test_who_wants_to_measure_is_told_before_anything_begins(cpu):
    with pytest.raises(ConfigError, match=r"aarch64-linux-gnu.*--devices rpc://"):
        factory.require_device(devices.parse("local"), PI)
    factory.require_device(devices.parse("rpc://127.0.0.1:9190/pi"), PI)
    factory.require_device(devices.parse("local"), cpu)


def test_programs_of_its_spaces_are_checked_on_this_machine(absent):
    workload = matmul(8, 16, 32)
    [proposal] = evolution.sample(workload, PI.tvm(), 1, known=set(), seed=0)

    assert absent.check(tvm.ir.save_json(workload), proposal.trace, 60) < 1e-5


def test_an_emulator_is_for_another_architecture_and_must_have_been_made(cpu, tmp_path):
    assert emulator.emulator("", PI) is None
    assert emulator.emulator(str(tmp_path), cpu) is None
    with pytest.raises(ConfigError, match=r"python -m lib\.measure\.emulator"):
        emulator.emulator(str(tmp_path), PI)


def test_an_emulator_gets_the_pinned_wheels_of_a_device_with_their_hashes():
    found = emulator._pinned(emulator._PINNED.read_text(), emulator._WHEELS)

    assert [each.partition("==")[0] for each in found] == list(emulator._WHEELS)
    assert all("--hash=sha256:" in each and not each.endswith("\\") for each in found)
    assert np.all([each.count("==") == 1 for each in found])
