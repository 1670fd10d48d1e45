"""What a client asks of a TVM RPC tracker, with time limits: who is there, and the next free server of a key.

The protocol is that of `tvm.rpc.tracker`: JSON after its length. TVM's own client waits for ever, for a tracker that
froze as for a server that never comes, and does not say which server it was given.
"""

import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from tvm.rpc.base import RPC_TRACKER_MAGIC, TrackerCode

_ANSWER_S = 5.0  # in which a tracker that is there answers
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Grant:
    """A server that is ours until the session with it ends."""

    host: str
    port: int
    match_key: str


@dataclass(frozen=True, slots=True)
class Tracker:
    """The address of a tracker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def servers(self, key: str) -> list[tuple[str, int]]:
        """Host and port of each server that is registered under a key, whether it is free or not.

        Raises:
            OSError: There is no tracker, or it does not answer.
        """
        with self._connected() as connection:
            _send(connection, [TrackerCode.SUMMARY])
            code, summary = _receive(connection)
        if code != TrackerCode.SUCCESS:
            raise OSError(f"the tracker {self} answered {code} to a request for its summary")
        found = [info["addr"] for info in summary["server_info"] if info["key"] == f"server:{key}"]
        return sorted((host, int(port)) for host, port in found)

    def request(self, key: str) -> Grant:
        """Wait for a free server, however long that takes; outlives a tracker that goes and comes back."""
        while True:
            try:
                with self._connected() as connection:
                    connection.settimeout(None)
                    _send(connection, [TrackerCode.REQUEST, key, "", 1])
                    code, granted = _receive(connection)
                    if code == TrackerCode.SUCCESS:
                        return Grant(str(granted[0]), int(granted[1]), str(granted[2]))
            except OSError:
                pass
            time.sleep(_RETRY_S)

    def _connected(self) -> socket.socket:
        connection = socket.create_connection((self.host, self.port), timeout=_ANSWER_S)
        try:
            # A tracker whose host lost power never closes the connection: the kernel asks after it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.sendall(struct.pack("<i", RPC_TRACKER_MAGIC))
            [magic] = struct.unpack("<i", _receive_exactly(connection, 4))
            if magic != RPC_TRACKER_MAGIC:
                raise OSError(f"{self} is no TVM RPC tracker")
        except BaseException:
            connection.close()
            raise
        return connection


def _send(connection: socket.socket, message: list[Any]) -> None:
    text = json.dumps(message).encode()
    connection.sendall(struct.pack("<i", len(text)) + text)  # at once: two small packets would wait for each other


def _receive(connection: socket.socket) -> Any:
    if hasattr(socket, "TCP_QUICKACK"):  # the tracker writes two small packets, the second after our ack: 40 ms
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    [size] = struct.unpack("<i", _receive_exactly(connection, 4))
    try:
        return json.loads(_receive_exactly(connection, size))
    except ValueError as error:
        raise OSError(f"the tracker sent no JSON: {error}") from error


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise OSError("the tracker closed the connection")
        data += more
    return data
