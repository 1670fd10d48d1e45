"""The end of a worker process's socket: requests come as lines, each is served, and its reply goes back."""

import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

from lib.contracts.errors import ProtocolError
from lib.measure import wire
from lib.measure.protocol import Failed, Ready, Refused, Reply, Request

Handlers = Mapping[type[Request[Any]], Callable[[Any], Reply]]
Explain = Callable[[Exception], Failed | None]


class Connection:
    """The socket to the parent."""

    def __init__(self, descriptor: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
        self._socket = socket.socket(fileno=descriptor)

    def send(self, reply: Reply) -> None:
        """Tell the parent something."""
        self._socket.sendall(wire.encode(reply))

    def serve(self, handlers: Handlers, explain: Explain = lambda _error: None) -> None:
        """Answer requests until the parent closes the socket.

        Args:
            handlers: What serves each type of request; must return the answer that the request names.
            explain: Knows what some errors mean; others mean `Request.failure`.
        """
        self.send(Ready())
        with self._socket.makefile("rb") as lines:
            for line in lines:
                self.send(_served(line, handlers, explain))


def _served(line: bytes, handlers: Handlers, explain: Explain) -> Reply:
    try:
        request = wire.decode_request(line)
        if type(request) not in handlers:
            raise ProtocolError(f"this process serves no {type(request).__name__}")
    except ProtocolError as error:
        return Refused(str(error))
    try:
        return handlers[type(request)](request)
    except Exception as error:  # a candidate's failure is an answer
        return explain(error) or Failed(request.failure, first_lines(error))


def first_lines(error: Exception) -> str:
    """What failed, without TVM's C++ stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("File ", "[bt]", "Stack trace", "at "))]
    return f"{type(error).__name__}: {' '.join(said[:3]) or 'no message'}"[:500]
