"""Measurements on disk one by one, so that a round in flight loses nothing, whatever ends the process.

A line has a measurement as JSON and a checksum of just these bytes, so that a damaged line is one measurement less and
never another one.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from lib.measure.runner import Measurement

_LINE = re.compile(rb'\{"crc32": "([0-9a-f]{8})", "row": (.*)\}')


@dataclass(frozen=True, slots=True)
class Found:
    """What a journal has."""

    rows: list[Measurement]
    damaged: int  # lines that are left out; one that a power cut tore is none of them while it is the last


def read(path: Path) -> Found:
    """What was written so far."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = [row for line in lines if (row := _measurement(line)) is not None]
    return Found(rows, len(lines) - len(rows))


def _measurement(line: bytes) -> Measurement | None:
    """What a line says, or nothing if it is damaged or of other code."""
    found = _LINE.fullmatch(line)
    if not found or int(found[1], 16) != zlib.crc32(found[2]):
        return None
    try:
        return Measurement.of(json.loads(found[2]))
    except (ValueError, TypeError, KeyError):
        return None


@contextmanager
def appending(path: Path) -> Iterator["Journal"]:
    """Open a journal to add to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")  # what a power cut tore stays a line of its own, which `read` leaves out
        yield Journal(file)


class Journal:
    """Lines that are on disk when `add` returns."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def add(self, measurement: Measurement) -> None:
        """Append one measurement."""
        row = json.dumps(asdict(measurement)).encode()
        self._file.write(b'{"crc32": "%08x", "row": %s}\n' % (zlib.crc32(row), row))
        self._file.flush()
        os.fsync(self._file.fileno())
