"""The process that uses a device that is elsewhere: compiled files go there, latencies and outputs come back.

Started by `device_pool` as `python -m lib.driver FD TARGET PLACE`, with the protocol of `lib.worker`. Before the
answer to a request that needs the device comes `{"begun": true}`, when the device is ours.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tvm.target import Target

from lib import place, worker
from lib.numerics import random_values, relative_error
from lib.place import Here, Place, There
from lib.tracker import Tracker
from lib.worker import Libraries, Reply

Param = Sequence[Any]  # of `worker.parameters`, as JSON gives it back


class Programs:
    """Compiled candidates, timed and run on a device that is asked for each time."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def measure(
        self, library: str, params: list[Param], repeats: int, min_repeat_s: float, slow_above_s: float, limit_s: float
    ) -> Reply:
        """Time a program; see `worker.time_kernel`."""
        inputs = _inputs(params)
        with self._place.session(limit_s) as device:
            start = time.perf_counter()
            kernel, arguments = device.load(Path(library)), [device.tensor(array) for array in inputs]
            evaluate = worker.in_place(kernel, arguments, device.device)
            reply = worker.time_kernel(evaluate, repeats, min_repeat_s, slow_above_s)
            return {**reply, "run_s": time.perf_counter() - start, "device": device.name}

    def compare(
        self, libraries: list[str], order: list[int], params: list[Param], min_repeat_s: float, limit_s: float
    ) -> Reply:
        """Time programs of equal parameters in turn, in this order: for each its latencies."""
        inputs, infinity = _inputs(params), float("inf")
        with self._place.session(limit_s) as device:
            arguments = [device.tensor(array) for array in inputs]
            kernels = [device.load(Path(library)) for library in libraries]
            latencies: list[list[float]] = [[] for _ in kernels]
            numbers = [0] * len(kernels)
            for n in order:
                evaluate = worker.in_place(kernels[n], arguments, device.device)
                reply = worker.time_kernel(evaluate, 1, min_repeat_s, infinity, number=numbers[n])
                numbers[n] = reply["number"]
                latencies[n] += reply["latencies"]
            return {"latencies": latencies}

    def check(self, libraries: list[str], params: list[Param], limit_s: float) -> Reply:
        """Largest difference of the second program's results to the first one's; see `Kernels.check`."""
        inputs, results = _inputs(params), []
        with self._place.session(limit_s) as device:
            for library in libraries:
                arguments = [device.tensor(array) for array in inputs]
                device.load(Path(library))["main"](*arguments)
                results.append([argument.numpy() for argument in arguments])
        return {"max_error": max(relative_error(new, old) for old, new in zip(*results, strict=True))}


class Models(Libraries):
    """Whole compiled models on a device that is ours from `begin` on."""

    def __init__(self, place: Place, kind: str) -> None:
        super().__init__(Here(kind))
        self._place = place
        self._session: Any = None  # kept, lest it ends

    def begin(self, limit_s: float) -> Reply:
        """Wait for the device; it is given back when this process ends, or after so long."""
        self._session = self._place.session(limit_s)
        self._device = self._session.__enter__()
        return {}


def _inputs(params: list[Param]) -> list[np.ndarray]:
    return [random_values(tuple(shape), dtype, bound, seed=n) for n, (shape, dtype, bound) in enumerate(params)]


def main(descriptor: int, target_text: str, where: str) -> None:
    """Answer requests until the parent closes the socket."""
    target = Target(target_text)
    connection = worker.Connection(descriptor)
    begun: Callable[[], None] = lambda: connection.send({"begun": True})  # noqa: E731
    somewhere: Place = _place(where, target, begun)
    kind = str(target.kind.name)
    programs, models = Programs(somewhere), Models(somewhere, kind)
    connection.serve(
        {
            "measure": programs.measure,
            "compare": programs.compare,
            "check": programs.check,
            "begin": models.begin,
            "open_library": models.open,
            "pack": Libraries(Here(kind)).pack,  # in this process: RPC hands no list of tensors to a function
            "infer": models.infer,
            "time_library": models.time,
        },
        explain=place.explain,
    )


def _place(where: str, target: Target, begun: Callable[[], None]) -> Place:
    if not where:
        return Here(str(target.kind.name), begun)
    address, _, key = where.partition("/")
    host, _, port = address.rpartition(":")
    return There(Tracker(host, int(port)), key, target, begun)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
