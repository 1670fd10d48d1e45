import socket
import threading

import pytest

from lib.measure.tracker import Grant, Tracker
from tests.farm import KEY, Farm


@pytest.fixture(scope="module")
def farm():
    farm = Farm(servers=1)
    yield farm
    farm.close()


def test_the_servers_of_a_key_are_listed_and_no_others(farm):
    [(host, port)] = farm.tracker.servers(KEY)

    assert host == "127.0.0.1"
    assert socket.create_connection((host, port)).close() is None
    assert farm.tracker.servers("other") == []


def test_a_grant_names_the_server(farm):
    granted = farm.tracker.request(KEY)

    assert isinstance(granted, Grant)
    assert (granted.host, granted.port) == farm.tracker.servers(KEY)[0]
    assert granted.match_key.startswith(KEY)


def test_no_tracker_is_an_error():
    with pytest.raises(OSError, match="refused"):
        Tracker("127.0.0.1", 1).servers(KEY)


def test_what_is_no_tracker_is_told_so():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
                connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="is no TVM RPC tracker"):
            Tracker(*listener.getsockname()).servers(KEY)
        thread.join()
