"""The process that runs foreign code: builds candidates, times them, checks and times whole libraries.

Started by `workers.Worker` as `python -m lib.worker FD`, and told what to do by JSON lines on that socket; so
neither side can make the other run code. It may crash or loop for ever: the parent keeps the limits. It dies
with its parent, whatever the parent dies of.
"""

import ctypes
import itertools
import json
import math
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock
from tvm.target import Target

from lib import backends, intrinsics, search, structure, workloads
from lib.numerics import random_values, relative_error
from lib.place import Device, Here

Reply = dict[str, Any]
Param = tuple[tuple[int, ...], str, int]  # shape, dtype, and for indices the exclusive upper bound (else 0)
Explain = Callable[[Exception], Reply]
Evaluate = Callable[[int, int], list[float]]  # from runs in a repeat, and repeats: the mean seconds of each repeat

# A kernel needs nothing but what the process that loads it has: linked in 5 ms, not 20.
_LINK = ["-nostdlib"] if sys.platform == "linux" else []
_LOOK_S = 0.002  # a candidate is not called slow on less than this
_MEMORY = 24 << 20  # numbers: 96 MiB, three times the last cache of most machines
_ALIGNED = 1024  # numbers: where tensors begin in it
_COLD_FROM = 1 << 18  # bytes: fewer come from memory in a few microseconds


class Kernels:
    """Candidates that were built and wait to be timed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._device = tvm.cpu()
        self._workloads: dict[str, tvm.IRModule] = {}
        self._built: dict[str, tuple[tvm.runtime.Module, list[Param]]] = {}
        self._arguments: dict[tuple[int, Param], tvm.runtime.Tensor] = {}  # of one workload, shared by candidates
        self._weights: list[int] = []  # positions among its parameters
        self._memory: Memory | None = None

    def define(self, workload_id: str, workload: str) -> Reply:
        """Make a workload known; forgets what belongs to others."""
        self._workloads = {workload_id: workloads.load(workload)}
        self._weights = structure.weights(self._workloads[workload_id]["main"])
        self._arguments = {}
        return {}

    def build(self, candidate_id: str, workload_id: str, trace: str) -> Reply:
        """Replay a trace and compile the program in this process; packing of weights is left out."""
        start = time.perf_counter()
        workload = self._workloads[workload_id]
        scheduled = search.program(workload, trace, self._target)
        # What MetaSchedule's default_build does: weights count as packed before.
        program = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(scheduled)
        self._built[candidate_id] = self._compile(program, structure.index_bounds(workload["main"]))
        return {"build_s": time.perf_counter() - start}

    def time(
        self,
        candidate_id: str,
        repeats: int,
        min_repeat_s: float,
        slow_above_s: float,
        number: int = 0,
        cold_weights: bool = False,
    ) -> Reply:
        """Time a built candidate; see `time_kernel`.

        Args:
            cold_weights: Each run reads its weights from memory, not from a cache, as in a model that is larger than
                the caches, if there are enough of them for that to matter.
        """
        start = time.perf_counter()
        kernel, params = self._built[candidate_id]
        arguments = self._arguments_of(params)
        turns = self._turns(params, arguments) if cold_weights else []
        evaluate = in_turn(kernel, turns) if turns else in_place(kernel, arguments, self._device)
        reply = time_kernel(evaluate, repeats, min_repeat_s, slow_above_s, number)
        return {**reply, "run_s": time.perf_counter() - start}

    def drop(self) -> Reply:
        """Forget what was built."""
        self._built.clear()
        return {}

    def check(self, workload_id: str, trace: str) -> Reply:
        """Largest difference to `backends.reference` on equal inputs, over the largest output of that.

        The weights' packing is compiled into the candidate here, so that both take the same arguments.
        """
        workload = self._workloads[workload_id]
        bounds = structure.index_bounds(workload["main"])
        outputs = []
        for program in (backends.reference(workload, self._target), search.program(workload, trace, self._target)):
            kernel, params = self._compile(program, bounds)
            arguments = [tvm.runtime.tensor(array.numpy()) for array in self._arguments_of(params)]
            kernel["main"](*arguments)
            outputs.append([argument.numpy() for argument in arguments])
        return {"max_error": max(relative_error(new, old) for old, new in zip(*outputs, strict=True))}

    def compile(self, workload_id: str, trace: str, library: str, pack: bool = False) -> Reply:
        """Replay a trace and compile the program to a shared library, for another process to load.

        Args:
            pack: Leave the packing of weights in; else they count as packed before, as in `build`.

        Returns:
            `build_s`, and `params`, as `parameters` has them.
        """
        start = time.perf_counter()
        workload = self._workloads[workload_id]
        program = search.program(workload, trace, self._target)
        if not pack:
            program = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(program)
        with self._target:  # nvcc looks there for the architecture
            backends.build(program, self._target).export_library(library, options=_LINK)
        bounds = structure.index_bounds(workload["main"])
        return {"build_s": time.perf_counter() - start, "params": parameters(program, bounds)}

    def _compile(self, program: tvm.IRModule, bounds: dict[int, int]) -> tuple[tvm.runtime.Module, list[Param]]:
        kernel = backends.build(program, self._target)
        kernel.get_function("main")  # machine code is made here, not in the timing
        return kernel, parameters(program, bounds)

    def _arguments_of(self, params: list[Param]) -> list[tvm.runtime.Tensor]:
        for position, param in enumerate(params):
            if (position, param) not in self._arguments:
                self._arguments[position, param] = tvm.runtime.tensor(random_values(*param, seed=position))
        return [self._arguments[key] for key in enumerate(params)]

    def _turns(self, params: list[Param], arguments: list[tvm.runtime.Tensor]) -> list[list[tvm.runtime.Tensor]]:
        """The same arguments, with the weights in ever other places; none if there is no need, or no room for two."""
        weights = [n for n in self._weights if params[n][1] == "float32"]
        shapes = [params[n][0] for n in weights]
        if 4 * sum(map(math.prod, shapes)) < _COLD_FROM:
            return []
        self._memory = self._memory or Memory()
        turns = []
        for places in self._memory.places(shapes):
            turn = arguments.copy()
            for n, tensor in zip(weights, places, strict=True):
                turn[n] = tensor
            turns.append(turn)
        return turns if len(turns) > 1 else []


class Memory:
    """More numbers than caches hold, to be taken for weights: until all were read, none is read again."""

    def __init__(self) -> None:
        numbers = random_values((_MEMORY + _ALIGNED,), "float32", 0, seed=0)
        first = -numbers.ctypes.data // numbers.itemsize % _ALIGNED
        self._numbers = numbers[first : first + _MEMORY]

    def places(self, shapes: Sequence[tuple[int, ...]]) -> list[list[tvm.runtime.Tensor]]:
        """Tensors of these shapes, as often as there is room for all of them."""
        found: list[list[tvm.runtime.Tensor]] = []
        begin = 0
        while True:
            tensors = []
            for shape in shapes:
                end = begin + math.prod(shape)
                if end > len(self._numbers):
                    return found
                tensors.append(tvm.runtime.from_dlpack(self._numbers[begin:end].reshape(shape)))
                begin = -(-end // _ALIGNED) * _ALIGNED
            found.append(tensors)


def parameters(program: tvm.IRModule, bounds: Mapping[int, int]) -> list[Param]:
    """Shape, dtype and bound of each parameter of `main`; see `structure.index_bounds`."""
    return [
        (tuple(int(extent) for extent in param.ty.shape), str(param.ty.dtype), bounds.get(n, 0))
        for n, param in enumerate(program["main"].params)
    ]


def in_place(kernel: tvm.runtime.Module, arguments: list[Any], device: Any) -> Evaluate:
    """Run `main` of a module on the same arguments, on any device."""

    def evaluate(number: int, repeat: int) -> list[float]:
        evaluator = kernel.time_evaluator("main", device, number=number, repeat=repeat)
        return [float(second) for second in evaluator(*arguments).results]

    return evaluate


def in_turn(kernel: tvm.runtime.Module, turns: Sequence[Sequence[Any]]) -> Evaluate:
    """Run `main` of a module on other arguments each time, in this process; a call takes about a microsecond more."""
    function, upcoming = kernel["main"], itertools.cycle(turns)

    def mean(number: int) -> float:
        several = list(itertools.islice(upcoming, number))
        start = time.perf_counter()
        for arguments in several:
            function(*arguments)
        return (time.perf_counter() - start) / number

    def evaluate(number: int, repeat: int) -> list[float]:
        mean(1)  # wakes the threads up, as TVM's evaluator does
        return [mean(number) for _ in range(repeat)]

    return evaluate


def time_kernel(evaluate: Evaluate, repeats: int, min_repeat_s: float, slow_above_s: float, number: int = 0) -> Reply:
    """Time a kernel: `repeats` means, each over at least about `min_repeat_s`.

    Args:
        slow_above_s: A kernel that looks slower than this is not timed further.
        number: Runs in a repeat; 0 to find it from the first run.
    """
    if not number:
        first = evaluate(1, 1)[0]
        if slow_above_s < first < _LOOK_S:  # one run of a short kernel may be all waking up of threads
            first = evaluate(math.ceil(_LOOK_S / first), 1)[0]
        if first > slow_above_s:
            return {"latencies": [first], "number": 1}
        number = max(1, math.ceil(min_repeat_s / max(first, 1e-9)))
    return {"latencies": evaluate(number, repeats), "number": number}


class Libraries:
    """Whole compiled models, loaded the way a user loads them, on a device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._loaded: dict[str, relax.VirtualMachine] = {}

    def open(self, name: str, library: str, params: str, inputs: str) -> Reply:
        """Load a library with its parameters, and the inputs it will be run on (both .npz)."""
        machine = relax.VirtualMachine(self._device.load(Path(library)), self._device.device)
        arrays = [*np.load(inputs).values(), *np.load(params).values()]
        machine.set_input("main", *map(self._device.tensor, arrays))
        self._loaded[name] = machine
        return {}

    def pack(self, library: str, weights: str, out: str) -> Reply:
        """Bring the weights (.npz, in parameter order) into the layouts that the tuned kernels read."""
        machine = relax.VirtualMachine(self._device.load(Path(library)), self._device.device)
        packed = machine["main_transform_params"]([self._device.tensor(w) for w in np.load(weights).values()])
        np.savez(out, *flatten(packed))
        return {}

    def infer(self, name: str, out: str) -> Reply:
        """Run one inference and write its outputs, in order, to an .npz file; tells the seconds that it took."""
        machine = self._loaded[name]
        started = time.perf_counter()
        machine.invoke_stateful("main")
        self._device.device.sync()
        seconds = time.perf_counter() - started
        np.savez(out, *flatten(machine.get_outputs("main")))
        return {"latency_s": seconds}

    def time(self, name: str, seconds: float) -> Reply:
        """Median latency of an inference, over about `seconds` after as long a warm-up, or over one inference.

        Another model may have run before: the warm-up brings the weights and the threads back.
        """
        machine = self._loaded[name]

        def evaluate(number: int, repeat: int) -> list[float]:
            evaluator = machine.time_evaluator("invoke_stateful", self._device.device, number=number, repeat=repeat)
            return [float(second) for second in evaluator("main").results]

        [once] = evaluate(1, 1)
        if once > seconds:
            return {"latency_s": once}
        number = math.ceil(0.005 / once)  # of inferences timed as one: single short ones drown in the clock
        repeat = math.ceil(seconds / (number * once))
        evaluate(number, repeat)
        return {"latency_s": statistics.median(evaluate(number, repeat))}


def flatten(value: Any) -> list[np.ndarray]:
    """The tensors of a model's result, in order."""
    if isinstance(value, tvm.runtime.Tensor):
        return [value.numpy()]
    return [array for item in value for array in flatten(item)]


class Connection:
    """The socket to the parent: requests come as JSON lines, replies go back so."""

    def __init__(self, descriptor: int) -> None:
        _die_with_parent(os.getppid())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
        self._stream = socket.socket(fileno=descriptor).makefile("rw", encoding="utf-8")

    def send(self, reply: Reply) -> None:
        """Tell the parent something."""
        self._stream.write(json.dumps(reply) + "\n")
        self._stream.flush()

    def serve(self, operations: Mapping[str, Callable[..., Reply]], explain: Explain = lambda _error: {}) -> None:
        """Answer requests until the parent closes the socket; `explain` adds to the reply of one that failed."""
        self.send({"ready": True})
        for line in self._stream:
            request = json.loads(line)
            try:
                reply = operations[request.pop("do")](**request)
            except Exception as error:  # a candidate's failure is an answer
                reply = {"error": _first_lines(error), **explain(error)}
            self.send(reply)


def main(descriptor: int, target_text: str) -> None:
    """Answer requests until the parent closes the socket."""
    connection = Connection(descriptor)
    target = Target(target_text)
    intrinsics.load(kind=target.kind.name, triple=str(target.attrs.get("mtriple", "")))
    kernels, libraries = Kernels(target), Libraries(Here(target.kind.name))
    connection.serve(
        {
            "define": kernels.define,
            "build": kernels.build,
            "time": kernels.time,
            "drop": kernels.drop,
            "check": kernels.check,
            "compile": kernels.compile,
            "open_library": libraries.open,
            "pack": libraries.pack,
            "infer": libraries.infer,
            "time_library": libraries.time,
        }
    )


def _first_lines(error: Exception) -> str:
    """What failed, without TVM's C++ stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("File ", "[bt]", "Stack trace", "at "))]
    return f"{type(error).__name__}: {' '.join(told[:3]) or 'no message'}"[:500]


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":  # the kernel does it, even while C code holds the GIL
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
