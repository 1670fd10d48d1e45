"""Whole models side by side: a process for each, all stopped but the one whose turn it is.

Nothing here imports TVM, torch or ONNX Runtime, whose pools of threads would be company to the side that is timed.
"""

import json
import math
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import cores
import numpy as np
import psutil

from lib.tir.numerics import random_values

_SCRIPT = Path(__file__).parent / "side.py"
_LOAD_LIMIT_S = 1800.0  # inductor compiles some models for minutes
_STOP_LIMIT_S = 10.0


class SideFailed(Exception):
    """A side cannot run its model; the message is for its row."""


@dataclass(frozen=True)
class Turn:
    """One side's turn."""

    side: str
    number: int
    latency_s: float  # median of its inferences; NaN if it failed
    n_inferences: int
    failure: str = ""
    between_cores: float = math.nan  # bytes/s, the lower of before and after: see `cores.between`


class Side:
    """A process of `side.py`, stopped unless it has something to do."""

    def __init__(self, kind: str, model: Path, inputs: Path, outputs: Path, threads: int) -> None:
        self.kind, self.version = kind, ""
        self._outputs, self._log = outputs, outputs.with_suffix(".log")
        command = [sys.executable, str(_SCRIPT), kind, str(model), "--inputs", str(inputs)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--outputs", str(outputs), "--threads", str(threads)],
                env={**os.environ, "TVM_NUM_THREADS": str(threads)},  # read at TVM's import; others have a setting
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a group of its own, to be stopped with all that it starts
            )

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def load(self) -> list[np.ndarray]:
        """Load the model and infer once; the outputs, in order.

        Raises:
            SideFailed: It could not, or took too long.
        """
        self.version = self._ask(_LOAD_LIMIT_S, do="load")["version"]
        return list(np.load(self._outputs).values())

    def turn(self, number: int, name: str, warm_s: float, seconds: float) -> Turn:
        """Warm up and time.

        Raises:
            SideFailed: It could not, or took too long.
        """
        reply = self._ask(_LOAD_LIMIT_S, do="turn", warm_s=warm_s, seconds=seconds)
        return Turn(name, number, reply["latency_s"], reply["n_inferences"])

    def close(self) -> None:
        """End it and all that it started, stopped or not."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with suppress(BrokenPipeError):  # of what a side that died did not read
                    pipe.close()

    def _ask(self, limit_s: float, **request: Any) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], limit_s)
            if not ready:
                raise SideFailed(f"no answer for {limit_s:.0f} s")
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            self._stop()
        if not line:
            told = self._log.read_text(errors="replace").strip().splitlines()
            raise SideFailed(f"exit status {self.process.wait()}: {' '.join(told[-2:])}"[:500])
        reply: dict[str, Any] = json.loads(line)
        if "failure" in reply:
            raise SideFailed(reply["failure"])
        return reply

    def _stop(self) -> None:
        """Returns when it no longer runs: the next side's turn must not begin before."""
        self._signal(signal.SIGSTOP)
        end = time.monotonic() + _STOP_LIMIT_S
        while psutil.Process(self.process.pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            if time.monotonic() > end:
                raise RuntimeError(f"process {self.process.pid} does not stop")
            time.sleep(0.0005)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:  # else its id may be another's
            os.killpg(self.process.pid, number)


def inputs(folder: Path) -> list[np.ndarray]:
    """Seeded values for the inputs that the manifest of a compiled model names."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return [_values(value, seed=n) for n, value in enumerate(manifest["model_inputs"])]


def _values(value: Mapping[str, Any], seed: int) -> np.ndarray:
    # A manifest of before masks were told apart bounds them by 0.
    bound = 2 if "values" not in value and "mask" in value["name"] else value["bound"]
    return random_values(tuple(value["shape"]), value["dtype"], bound, seed=seed)


def in_turn(
    sides: Mapping[str, Side],
    turns: int,
    *,
    warm_s: float = 0.25,
    seconds: float = 0.5,
    seed: int = 0,
    at_most: int | None = None,
) -> Iterator[Turn]:
    """Each side's turns, in an order that is shuffled each time; a side that fails has no turns after that one.

    Args:
        at_most: So many turns, if it takes them to have `turns` in which the cores shared a cache all the time.
    """
    order, alive = random.Random(seed), dict(sides)
    fastest, speeds = 0.0, list[float]()  # of all; in each turn the lowest
    for number in range(at_most or turns):
        if sum(cores.are_near(speed, fastest) for speed in speeds) >= turns:
            return
        found = [cores.between()]
        for name in order.sample(list(alive), len(alive)):
            try:
                turn = alive[name].turn(number, name, warm_s, seconds)
            except SideFailed as error:
                del alive[name]
                yield Turn(name, number, float("nan"), 0, str(error))
            else:
                found.append(cores.between())
                yield replace(turn, between_cores=min(found[-2:]))
        fastest = max(fastest, *found)
        speeds.append(min(found))
