"""Names to processes that try them one after the other, under a deadline for each: rows come back, whatever happens."""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

import pandas as pd
import psutil

ROOT = Path(__file__).parent.parent
Row = dict[str, Any]


def serve(attempt: Callable[[str], Row]) -> None:
    """The process: names come in, rows go out, as lines."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    for line in sys.stdin:
        name, started = line.strip(), time.perf_counter()
        try:
            row = attempt(name)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            row = {"verdict": "traceback", "told": told[-500:]}
        print(json.dumps({"name": name, "seconds": time.perf_counter() - started, **row}), file=answers, flush=True)


def rows(command: Sequence[str], names: Sequence[str], jobs: int, deadline_s: float, out: Path) -> pd.DataFrame:
    """A row of each name, from processes that serve.

    Args:
        command: Starts such a process.
        out: Where the table goes. Until all are tried, rows stand beside it as lines of JSON: the next call tries the
            others only.
    """
    kept = out.with_suffix(".jsonl")
    known = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    queue: SimpleQueue[str] = SimpleQueue()
    for name in sorted(set(names) - {row["name"] for row in known}):
        queue.put(name)
    with ThreadPoolExecutor(jobs) as executor, kept.open("a") as lines:
        for work in [executor.submit(_work, command, queue, deadline_s, lines) for _ in range(jobs)]:
            work.result()
    found = [json.loads(line) for line in kept.read_text().splitlines()]
    table = pd.DataFrame(found).sort_values("name", ignore_index=True)
    table.to_parquet(out)
    kept.unlink()
    return table


def _work(command: Sequence[str], names: "SimpleQueue[str]", deadline_s: float, lines: TextIO) -> None:
    process = _Process(command)
    while True:
        try:
            name = names.get_nowait()
        except Empty:
            process.kill()
            return
        started = time.perf_counter()
        row = process.row(name, deadline_s)
        if row is None:
            seconds = time.perf_counter() - started
            row = {"name": name, "verdict": "hang" if seconds >= deadline_s else "crash", "seconds": seconds}
            process.kill()
            process = _Process(command)
        told = str(row.get("told", "")).replace("\n", " ")
        print(f"{row['name']:48} {row['verdict']:11} {row['seconds']:5.1f} s  {told[:300]}", flush=True)
        print(json.dumps(row), file=lines, flush=True)


class _Process:
    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "TUNER_LOCKS": tempfile.mkdtemp()},
            start_new_session=True,
        )  # fmt: skip

    def row(self, name: str, deadline_s: float) -> Row | None:
        """What it says of a name; none if it says nothing in time, or ends."""
        assert self._process.stdin
        assert self._process.stdout
        with ThreadPoolExecutor(1) as reader:
            try:
                self._process.stdin.write(f"{name}\n")
                self._process.stdin.flush()
                line = reader.submit(self._process.stdout.readline).result(deadline_s)
            except (TimeoutError, OSError):
                self.kill()
                return None
        return json.loads(line) if line else None

    def kill(self) -> None:
        """End it and all it started."""
        if self._process.poll() is None:
            for process in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
                process.kill()
            self._process.wait()
