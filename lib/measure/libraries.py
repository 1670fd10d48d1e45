"""Whole compiled models in a worker process: loaded, fed, run and timed the way a user would."""

import math
import statistics
import time
from typing import Any

import numpy as np
import tvm
from tvm import relax

from lib.contracts import arrays
from lib.measure.device_source import Device
from lib.measure.protocol import Done, Infer, Inferred, OpenLibrary, PackWeights, TimeLibrary


class Libraries:
    """The models that were loaded on a device, by name."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._loaded: dict[str, relax.VirtualMachine] = {}

    def pack(self, request: PackWeights) -> Done:
        """See `PackWeights`."""
        machine = relax.VirtualMachine(self._device.load(request.library), self._device.device)
        weights = [self._device.tensor(array) for array in arrays.values(request.weights)]
        np.savez(request.out, *flatten(machine["main_transform_params"](weights)))
        return Done()

    def open(self, request: OpenLibrary) -> Done:
        """See `OpenLibrary`."""
        machine = relax.VirtualMachine(self._device.load(request.library), self._device.device)
        given = [*arrays.values(request.inputs), *arrays.values(request.params)]
        machine.set_input("main", *map(self._device.tensor, given))
        self._loaded[request.name] = machine
        return Done()

    def infer(self, request: Infer) -> Inferred:
        """See `Infer`."""
        machine = self._loaded[request.name]
        started = time.perf_counter()
        machine.invoke_stateful("main")
        self._device.device.sync()
        latency_s = time.perf_counter() - started
        np.savez(request.out, *flatten(machine.get_outputs("main")))
        return Inferred(latency_s)

    def time(self, request: TimeLibrary) -> Inferred:
        """Median latency of an inference, over about `seconds` after as long a warm-up, or over one inference.

        Another model may have run before: the warm-up brings the weights and the threads back.
        """
        machine = self._loaded[request.name]

        def evaluate(number: int, repeat: int) -> list[float]:
            evaluator = machine.time_evaluator("invoke_stateful", self._device.device, number=number, repeat=repeat)
            return [float(second) for second in evaluator("main").results]

        [once] = evaluate(1, 1)
        if once > request.seconds:
            return Inferred(once)
        number = math.ceil(0.005 / once)  # of inferences timed as one: single short ones drown in the clock
        repeat = math.ceil(request.seconds / (number * once))
        evaluate(number, repeat)
        return Inferred(statistics.median(evaluate(number, repeat)))


def flatten(value: Any) -> list[np.ndarray]:
    """The tensors of a model's result, in order."""
    if isinstance(value, tvm.runtime.Tensor):
        return [value.numpy()]
    return [array for item in value for array in flatten(item)]
