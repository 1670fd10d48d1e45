"""The process that runs foreign code: builds candidates, times them, checks and times whole libraries.

Started by `workers.Worker` as `python -m lib.worker FD`, and told what to do by JSON lines on that socket; so
neither side can make the other run code. It may crash or loop for ever: the parent keeps the limits. It dies
with its parent, whatever the parent dies of.
"""

import ctypes
import json
import math
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock
from tvm.target import Target

from lib import intrinsics, search, structure, workloads
from lib.numerics import random_values, relative_error

Reply = dict[str, Any]

_LOOK_S = 0.002  # a candidate is not called slow on less than this


class Kernels:
    """Candidates that were built and wait to be timed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._device = tvm.cpu()
        self._workloads: dict[str, tvm.IRModule] = {}
        self._built: dict[str, tuple[tvm.runtime.Module, list[Any]]] = {}
        self._arguments: dict[tuple[Any, ...], tvm.runtime.Tensor] = {}  # of one workload, shared by candidates

    def define(self, workload_id: str, workload: str) -> Reply:
        """Make a workload known; forgets what belongs to others."""
        self._workloads = {workload_id: workloads.load(workload)}
        self._arguments = {}
        return {}

    def build(self, candidate_id: str, workload_id: str, trace: str) -> Reply:
        """Replay a trace and compile the program in this process; packing of weights is left out."""
        start = time.perf_counter()
        workload = self._workloads[workload_id]
        scheduled = search.apply(workload, trace).mod
        # What MetaSchedule's default_build does: weights count as packed before.
        program = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(scheduled)
        self._built[candidate_id] = self._compile(program, structure.index_bounds(workload["main"]))
        return {"build_s": time.perf_counter() - start}

    def time(self, candidate_id: str, repeats: int, min_repeat_s: float, slow_above_s: float, number: int = 0) -> Reply:
        """Time a built candidate: `repeats` means, each over at least about `min_repeat_s`.

        Args:
            slow_above_s: A candidate that looks slower than this is not timed further.
            number: Runs in a repeat; 0 to find it from the first run.
        """
        start = time.perf_counter()
        kernel, arguments = self._built[candidate_id]
        if not number:
            first = self._evaluate(kernel, arguments, 1, 1)[0]
            if slow_above_s < first < _LOOK_S:  # one run of a short kernel may be all waking up of threads
                first = self._evaluate(kernel, arguments, math.ceil(_LOOK_S / first), 1)[0]
            if first > slow_above_s:
                return {"latencies": [first], "number": 1, "run_s": time.perf_counter() - start}
            number = max(1, math.ceil(min_repeat_s / max(first, 1e-9)))
        latencies = self._evaluate(kernel, arguments, number, repeats)
        return {"latencies": latencies, "number": number, "run_s": time.perf_counter() - start}

    def drop(self) -> Reply:
        """Forget what was built."""
        self._built.clear()
        return {}

    def check(self, workload_id: str, trace: str) -> Reply:
        """Largest difference to the untuned program on equal inputs, over the largest output of that.

        The weights' packing is compiled into the candidate here, so that both take the same arguments.
        """
        workload = self._workloads[workload_id]
        bounds = structure.index_bounds(workload["main"])
        outputs = []
        for program in (workload, search.apply(workload, trace).mod):
            kernel, shared = self._compile(program, bounds)
            arguments = [tvm.runtime.tensor(array.numpy()) for array in shared]
            kernel["main"](*arguments)
            outputs.append([argument.numpy() for argument in arguments])
        return {"max_error": max(relative_error(new, old) for old, new in zip(*outputs, strict=True))}

    def _compile(self, program: tvm.IRModule, bounds: dict[int, int]) -> tuple[tvm.runtime.Module, list[Any]]:
        kernel = tvm.tirx.build(program, self._target)
        kernel.get_function("main")  # machine code is made here, not in the timing
        params = [(tuple(int(e) for e in p.ty.shape), str(p.ty.dtype)) for p in program["main"].params]
        return kernel, [self._argument(*param, bounds.get(n, 0), n) for n, param in enumerate(params)]

    def _argument(self, shape: tuple[int, ...], dtype: str, bound: int, position: int) -> tvm.runtime.Tensor:
        key = (shape, dtype, bound, position)
        if key not in self._arguments:
            self._arguments[key] = tvm.runtime.tensor(random_values(shape, dtype, bound, seed=position))
        return self._arguments[key]

    def _evaluate(self, kernel: tvm.runtime.Module, arguments: list[Any], number: int, repeat: int) -> list[float]:
        evaluate = kernel.time_evaluator("main", self._device, number=number, repeat=repeat)
        return [float(second) for second in evaluate(*arguments).results]


class Libraries:
    """Whole compiled models, loaded the way a user loads them."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[relax.VirtualMachine, list[Any]]] = {}

    def open(self, name: str, library: str, params: str, inputs: str) -> Reply:
        """Load a library with its parameters, and the inputs it will be run on (both .npz)."""
        machine = relax.VirtualMachine(tvm.runtime.load_module(library), tvm.cpu())
        arrays = [*np.load(inputs).values(), *np.load(params).values()]
        self._loaded[name] = (machine, [tvm.runtime.tensor(array) for array in arrays])
        return {}

    def pack(self, library: str, weights: str, out: str) -> Reply:
        """Bring the weights (.npz, in parameter order) into the layouts that the tuned kernels read."""
        machine = relax.VirtualMachine(tvm.runtime.load_module(library), tvm.cpu())
        packed = machine["main_transform_params"]([tvm.runtime.tensor(w) for w in np.load(weights).values()])
        np.savez(out, *flatten(packed))
        return {}

    def infer(self, name: str, out: str) -> Reply:
        """Run one inference and write its outputs, in order, to an .npz file; tells the seconds that it took."""
        machine, arguments = self._loaded[name]
        started = time.perf_counter()
        outputs = machine["main"](*arguments)
        seconds = time.perf_counter() - started
        np.savez(out, *flatten(outputs))
        return {"latency_s": seconds}

    def time(self, name: str, seconds: float) -> Reply:
        """Median latency of an inference, over about `seconds` after as long a warm-up, or over one inference.

        Another model may have run before: the warm-up brings the weights and the threads back.
        """
        machine, arguments = self._loaded[name]

        def evaluate(number: int, repeat: int) -> list[float]:
            evaluator = machine.time_evaluator("main", tvm.cpu(), number=number, repeat=repeat)
            return [float(second) for second in evaluator(*arguments).results]

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


def main(descriptor: int, target_text: str) -> None:
    """Answer requests until the parent closes the socket."""
    _die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    target = Target(target_text)
    intrinsics.load(kind=target.kind.name, triple=str(target.attrs.get("mtriple", "")))
    kernels, libraries = Kernels(target), Libraries()
    operations: dict[str, Callable[..., Reply]] = {
        "define": kernels.define,
        "build": kernels.build,
        "time": kernels.time,
        "drop": kernels.drop,
        "check": kernels.check,
        "open_library": libraries.open,
        "pack": libraries.pack,
        "infer": libraries.infer,
        "time_library": libraries.time,
    }
    with (
        socket.socket(fileno=descriptor) as connection,
        connection.makefile("rw", encoding="utf-8") as stream,
    ):
        _send(stream, {"ready": True})
        for line in stream:
            request = json.loads(line)
            try:
                reply = operations[request.pop("do")](**request)
            except Exception as error:  # a candidate's failure is an answer
                reply = {"error": _first_lines(error)}
            _send(stream, reply)


def _send(stream: Any, reply: Reply) -> None:
    stream.write(json.dumps(reply) + "\n")
    stream.flush()


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
