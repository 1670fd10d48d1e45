"""What a model's latency has beyond its kernels: both timed in one process, at one moment, in turn.

    python benchmarks/in_place.py COMPILED ... [--seconds 8] [--kernels]

Of bundles, as `TuneModel` leaves them in `compiled/` of their runs. An inference is repeated as it is shipped, and by
calling its kernels in their order, each timed, from a library of the same programs that calls each by itself
(`apart.py`). So what a kernel takes has what the kernels before it left in caches, and the handing over of work to the
other threads, which the shipped library does once for many of them: its share may exceed 100 %. `alone` is the sum of
the kernels repeated one by one, as a search measures them.
All of it with the threads that a library was tuned for, with one, and with one while another session infers on another
core. `call` is what a caller of `family_tuner_runtime` waits, who has the work done by a session's own thread.

A line says how busy the machine was with other things: that should be none.
"""

import argparse
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from apart import twin
from intervals import estimate, median_of

from lib.runtime.family_tuner_runtime import Model

_ALONE = 8  # repeats of a kernel
_WARM_UP, _TURNS = 5, 7  # inferences before those that count, and these
_HEAVIEST = 12  # kernels that are listed
_clock = time.perf_counter_ns
_shuffled = np.random.default_rng(0)


@dataclass
class Session:
    """A session of a model with what was timed of it, in ns."""

    label: str
    model: Model
    arrays: list[np.ndarray]
    kernels: list[tuple[str, Any, Sequence[Any]]]  # in their order: name, function, arguments
    beside: Model | None = None  # infers at the same time
    times: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def turn(self) -> None:
        """Time all of it a few times."""
        tensors = [tvm_ffi.from_dlpack(array) for array in self.arrays]
        infer, run = self.model._infer_of(0), self.model._driver.run
        kinds: dict[str, Callable[[], Any]] = {
            "vm": lambda: run(lambda: _timed(lambda: infer(*tensors))),
            "kernels": lambda: run(self._in_order),
            "call": lambda: _timed(lambda: self.model(*self.arrays)),
        }
        for kind in _shuffled.permutation(list(kinds)):  # each has activations of its own, to be in caches as usual
            found = [kinds[kind]() for _ in range(_WARM_UP + _TURNS)]
            self.times[kind] += found[_WARM_UP:]
        self.times["alone"].append(run(self._one_by_one))

    def _in_order(self) -> list[int]:
        found, before = [], _clock()
        for _, function, arguments in self.kernels:
            function(*arguments)
            now = _clock()
            found.append(now - before)
            before = now
        return found

    def _one_by_one(self) -> list[float]:
        found = []
        for _, function, arguments in self.kernels:
            function(*arguments)
            found.append(_timed(lambda: [function(*arguments) for _ in range(_ALONE)]) / _ALONE)  # noqa: B023
        return found

    def row(self) -> str:
        """Of the table; medians, with intervals of the share."""
        of_kernels = np.array(self.times["kernels"], float)
        vm, sums = np.array(self.times["vm"], float), of_kernels.sum(1)
        cells = [f"{np.median(values) / 1e6:.4g}" for values in (self.times["call"], vm, sums)]
        alone = np.median(self.times["alone"], 0).sum() / 1e6
        share = estimate(median_of(sums / vm), len(vm)).text(100, 4)
        return f"| {self.label} | {len(self.kernels)} | {' | '.join(cells)} | {share} | {alone:.4g} |"

    def listing(self) -> list[str]:
        """The kernels that lose most by not being alone."""
        here, alone = np.median(self.times["kernels"], 0) / 1e3, np.median(self.times["alone"], 0) / 1e3
        worst = np.argsort(alone - here)[:_HEAVIEST]
        return [f"| {self.label} | {self.kernels[n][0]} | {here[n]:.1f} | {alone[n]:.1f} |" for n in worst]


def inputs_of(model: Model) -> list[np.ndarray]:
    """Random numbers where floats are asked for, else ones: ids and masks."""
    arrays = []
    for value in model.inputs:
        array = model.empty(value.name)
        array[...] = np.random.default_rng(0).random(array.shape) if "float" in value.dtype else 1
        arrays.append(array)
    return arrays


def sessions_of(folder: Path, apart: Model) -> list[Session]:
    """The three sessions of a bundle that are timed.

    Args:
        apart: Its twin.
    """
    model = Model(folder)
    arrays = inputs_of(model)
    name = folder.resolve().parents[2].name

    def session(label: str, threads: int, core: int | None = None, beside: Model | None = None) -> Session:
        cores = None if core is None else [core]
        kernels = kernels_of(apart, apart.session(threads=threads, cores=cores), arrays)
        return Session(f"{name} | {label}", model.session(threads=threads, cores=cores), arrays, kernels, beside)

    first, second = sorted(os.sched_getaffinity(0))[:2]
    other = model.session(threads=1, cores=[second])
    return [
        session(f"{model.threads} threads", model.threads),
        session("1 thread", 1),
        session("1 thread, another session beside", 1, first, other),
    ]


def kernels_of(model: Model, probe: Model, arrays: Sequence[np.ndarray]) -> list[tuple[str, Any, Sequence[Any]]]:
    """What an inference calls: kernels of the library with their arguments."""
    calls: list[tuple[str, Sequence[Any]]] = []

    def instrument(_function: Any, name: str, is_before: bool, _result: Any, *arguments: Any) -> int:
        if is_before and not str(name).startswith("vm.builtin"):
            calls.append((str(name), arguments))
        return 0

    def infer() -> None:
        probe._machines[0][0]["set_instrument"](tvm_ffi.convert(instrument))
        probe._infer_of(0)(*[tvm_ffi.from_dlpack(array) for array in arrays])

    probe._driver.run(infer)
    executable, _ = model._loaded.executable(0)
    [library, *_] = executable.imports
    return [(name, library.get_function(name, query_imports=True), arguments) for name, arguments in calls]


def _timed(call: Callable[[], Any]) -> int:
    before = _clock()
    call()
    return _clock() - before


def measure(sessions: Sequence[Session], seconds: float) -> None:
    """Turns of all sessions, one after the other, for so long each."""
    arrays = sessions[0].arrays
    until = time.monotonic() + seconds * len(sessions)
    while time.monotonic() < until:
        for session in sessions:
            time.sleep(0.35)  # helpers of the session before spin for some 0.3 s
            is_over = threading.Event()
            busy = threading.Thread(target=_keep_busy, args=(session.beside, arrays, is_over))
            busy.start()
            session.turn()
            is_over.set()
            busy.join()


def _keep_busy(model: Model | None, arrays: Sequence[np.ndarray], is_over: threading.Event) -> None:
    while model is not None and not is_over.is_set():
        model(*arrays)


def _ticks() -> tuple[float, float]:
    """Of all processors so far: those that were busy, and those of them for this process."""
    first, *_ = Path("/proc/stat").read_text().splitlines()
    found = [int(n) for n in first.split()[1:]]
    return sum(found) - found[3] - found[4], sum(os.times()[:2]) * os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the table, and if asked the kernels that lose most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="COMPILED")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    print("| model | session | kernels | call, ms | model, ms | kernels in place, ms | share, % | alone, ms |")
    print("|---" * 8 + "|")
    listed = []
    for folder in options.bundles:
        with twin(folder) as apart:
            sessions = sessions_of(folder, apart)
            before = _ticks()
            measure(sessions, options.seconds)
        (busy, own), (busy_before, own_before) = _ticks(), before
        for session in sessions:
            print(session.row(), flush=True)
            listed += session.listing()
        others = 1 - (own - own_before) / max(busy - busy_before, 1.0)
        print(f"<!-- {others:.1%} of the processors' time was for other processes -->")
    if options.kernels:
        print("\n| model | session | kernel | in place, us | alone, us |\n" + "|---" * 5 + "|")
        print("\n".join(listed))


if __name__ == "__main__":
    main()
