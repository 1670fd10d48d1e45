import pytest

from lib.contracts.errors import ConfigError
from lib.measure import devices, factory
from lib.measure.devices import Local, Replay, Rpc
from lib.measure.tracker import Tracker
from tests.farm import Farm


def test_local_is_this_machine():
    assert devices.parse("local") == Local()


@pytest.mark.parametrize(
    ("text", "host", "port", "key"),
    [
        ("rpc://127.0.0.1:9190/zen5", "127.0.0.1", 9190, "zen5"),
        ("rpc://farm.example:80/a-b", "farm.example", 80, "a-b"),
    ],
)
def test_rpc_names_a_tracker_and_a_key(text, host, port, key):
    assert devices.parse(text) == Rpc(Tracker(host, port), key)


NONSENSE = [
    "", "gpu", "rpc://", "rpc://host/key", "rpc://host:9190", "rpc://host:x/key", "rpc://:9190/key", "rpc://host:9190/",
    "rpc://host:9190/a/b", "host:9190/key", "rpc://host:9²/key", "rpc://host:123456/key",
]  # fmt: skip


@pytest.mark.parametrize("text", NONSENSE)
def test_other_texts_are_refused_with_the_forms_there_are(text):
    with pytest.raises(ConfigError, match="rpc://HOST:PORT/KEY"):
        devices.parse(text)


def test_a_replay_names_a_folder(tmp_path):
    assert devices.parse(f"replay:{tmp_path}") == Replay(tmp_path)


def test_a_replay_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        devices.parse(f"replay:{tmp_path / 'missing'}")


def test_measurements_of_one_kind_of_device_are_told_from_those_of_others(tmp_path):
    texts = ["local", "rpc://a:1/x", "rpc://a:1/y", f"replay:{tmp_path}"]

    assert len({devices.parse(text).identity for text in texts}) == len(texts)
    assert devices.parse("rpc://a:1/x").identity == devices.parse("rpc://b:2/x").identity


def test_what_was_read_is_written_as_it_was(tmp_path):
    for text in ("local", "rpc://farm.example:80/a-b", f"replay:{tmp_path}"):
        assert str(devices.parse(text)) == text


def test_whether_a_device_is_there_is_known_before_anything_is_measured(cpu, tmp_path):
    farm = Farm(servers=1)
    there, another = (devices.parse(text) for text in (farm.address, f"rpc://{farm.tracker}/another"))

    assert factory.absence(there, cpu) == ""
    assert "No server is registered under 'another'" in factory.absence(another, cpu)
    farm.close()
    assert f"The tracker {farm.tracker} does not answer" in factory.absence(there, cpu)
    for text in ("local", f"replay:{tmp_path}"):
        assert factory.absence(devices.parse(text), cpu) == ""
