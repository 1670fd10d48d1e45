"""The process that uses a device that is elsewhere: compiled files go there, latencies and outputs come back.

`device_processes` starts it. Before the answer to a request that needs the device comes `Begun`, when the device is
ours.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm.target import Target

from lib.measure import device_source, devices, timing
from lib.measure.connection import Connection
from lib.measure.device_source import DeviceSource, LocalDevice, RpcDevices
from lib.measure.libraries import Libraries
from lib.measure.protocol import (
    BeginSession,
    Begun,
    Checked,
    CheckLibraries,
    Compare,
    Compared,
    Done,
    Infer,
    Measure,
    OpenLibrary,
    Param,
    Timed,
    TimeLibrary,
)
from lib.tir.numerics import largest_error, random_values


class Programs:
    """Compiled candidates, timed and run on a device that is asked for each time."""

    def __init__(self, source: DeviceSource) -> None:
        self._source = source

    def measure(self, request: Measure) -> Timed:
        """See `Measure`."""
        inputs = _inputs(request.params)
        with self._source.session(request.limit_s) as device:
            start = time.perf_counter()
            kernel, arguments = device.load(request.library), [device.tensor(array) for array in inputs]
            evaluate = timing.on_equal_arguments(kernel, arguments, device.device)
            latencies, number = timing.time_kernel(
                evaluate, request.repeats, request.min_repeat_s, request.slow_above_s
            )
            return Timed(tuple(latencies), number, time.perf_counter() - start, device.name)

    def compare(self, request: Compare) -> Compared:
        """See `Compare`."""
        inputs = _inputs(request.params)
        with self._source.session(request.limit_s) as device:
            arguments = [device.tensor(array) for array in inputs]
            kernels = [device.load(library) for library in request.libraries]
            latencies: list[list[float]] = [[] for _ in kernels]
            numbers = [0] * len(kernels)
            for n in request.order:
                evaluate = timing.on_equal_arguments(kernels[n], arguments, device.device)
                found, numbers[n] = timing.time_kernel(evaluate, 1, request.min_repeat_s, number=numbers[n])
                latencies[n] += found
            return Compared(tuple(map(tuple, latencies)))

    def check(self, request: CheckLibraries) -> Checked:
        """See `CheckLibraries`."""
        with self._source.session(request.limit_s) as device:
            kernels = [device.load(library) for library in request.libraries]

            def run(inputs: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
                results = []
                for kernel in kernels:
                    arguments = [device.tensor(array) for array in inputs]
                    kernel["main"](*arguments)
                    results.append([argument.numpy() for argument in arguments])
                return results

            return Checked(largest_error(run, _inputs(request.params)))


class Models(Libraries):
    """Whole compiled models on a device that is ours from `begin` on."""

    def __init__(self, source: DeviceSource, kind: str) -> None:
        super().__init__(LocalDevice(kind))
        self._source = source
        self._session: Any = None  # kept, lest it ends

    def begin(self, request: BeginSession) -> Done:
        """Wait for the device; see `BeginSession`."""
        self._session = self._source.session(request.limit_s)
        self._device = self._session.__enter__()
        return Done()


def _inputs(params: Sequence[Param]) -> list[np.ndarray]:
    return [random_values(param.shape, param.dtype, param.bound, seed=n) for n, param in enumerate(params)]


def main(descriptor: int, target_text: str, devices_text: str) -> None:
    """Answer requests until the parent closes the socket.

    Args:
        devices_text: As `--devices` has them.
    """
    target = Target(target_text)
    connection = Connection(descriptor)
    source = _source(devices_text, target, on_grant=lambda: connection.send(Begun()))
    kind = str(target.kind.name)
    programs, models = Programs(source), Models(source, kind)
    connection.serve(
        {
            Measure: programs.measure,
            Compare: programs.compare,
            CheckLibraries: programs.check,
            BeginSession: models.begin,
            OpenLibrary: models.open,
            Infer: models.infer,
            TimeLibrary: models.time,
        },
        explain=device_source.explain,
    )


def _source(devices_text: str, target: Target, on_grant: Callable[[], None]) -> DeviceSource:
    found = devices.parse(devices_text)
    if isinstance(found, devices.Rpc):
        return RpcDevices(found.tracker, found.key, target, on_grant)
    return LocalDevice(str(target.kind.name), on_grant)
