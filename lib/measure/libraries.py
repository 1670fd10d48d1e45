"""Whole compiled models in a worker process: loaded, fed, run and timed the way a user would."""

import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from lib.contracts import arrays
from lib.measure.device_source import Device
from lib.measure.protocol import Done, Infer, Inferred, OpenLibrary, TimeLibrary
from lib.runtime.family_tuner_runtime.weights import Mapped


class Libraries:
    """The models that were loaded on a device, by name."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._loaded: dict[str, relax.VirtualMachine] = {}
        self._shared: tuple[Path, Mapped] | None = None

    def open(self, request: OpenLibrary) -> Done:
        """See `OpenLibrary`."""
        machine = relax.VirtualMachine(self._device.load(request.library), self._device.device)
        inputs = map(self._device.tensor, arrays.values(request.inputs))
        machine.set_input("main", *inputs, *self._weights(request.params))
        self._loaded[request.name] = machine
        return Done()

    def _weights(self, path: Path) -> list[tvm.runtime.Tensor]:
        """Packed ones are mapped, as they are where the library is deployed; see `sharing.list_weights`."""
        if path.suffix == ".npz":
            return [self._device.tensor(array) for array in arrays.values(path)]
        if path.suffix == ".json":
            listing = json.loads(path.read_text())
            shared = self._mapped(path.parent / listing["file"])
            return [self._device.placed(shared.view(name, shape)) for name, shape in listing["weights"]]
        return [self._device.placed(tensor) for tensor in Mapped(path).tensors]

    def _mapped(self, path: Path) -> Mapped:
        """A file of weights that several libraries share; mapped again only when it is another one."""
        if self._shared is None or self._shared[0] != path:
            self._shared = path, Mapped(path)
        return self._shared[1]

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
        """See `TimeLibrary`; one that takes longer than that is run once."""
        machine = self._loaded[request.name]

        def evaluate(number: int, repeat: int) -> list[float]:
            evaluator = machine.time_evaluator("invoke_stateful", self._device.device, number=number, repeat=repeat)
            return [float(second) for second in evaluator("main").results]

        [once] = evaluate(1, 1)
        if once > request.seconds:
            return Inferred(once)
        number = math.ceil(0.005 / once)  # of inferences timed as one: single short ones drown in the clock
        repeat = math.ceil(request.seconds / (number * once))
        evaluate(number, math.ceil(request.WARM_UP * repeat))
        return Inferred(statistics.median(evaluate(number, repeat)))


def flatten(value: Any) -> list[np.ndarray]:
    """The tensors of a model's result, in order."""
    if isinstance(value, tvm.runtime.Tensor):
        return [value.numpy()]
    return [array for item in value for array in flatten(item)]
