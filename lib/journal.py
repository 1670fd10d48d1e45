"""Measurements on disk one by one, so that a round in flight loses nothing, whatever ends the process."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

from lib.runner import Measurement


def read(path: Path) -> list[Measurement]:
    """What was written so far; a last line that a power cut tore is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().split("\n")[:-1]:
        try:
            rows.append(Measurement(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return rows


@contextmanager
def appending(path: Path) -> Iterator["Journal"]:
    """Open a journal to add to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if file.tell() and not path.read_text().endswith("\n"):
            file.write("\n")  # what a power cut tore stays a line of its own, which `read` leaves out
        yield Journal(file)


class Journal:
    """Lines that are on disk when `add` returns."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def add(self, measurement: Measurement) -> None:
        """Append one measurement."""
        self._file.write(json.dumps(asdict(measurement)) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
