"""The process that runs foreign code on this CPU: builds candidates, times and checks them, loads whole libraries.

`process.Worker` starts it, and tells it what to do by the messages of `lib.measure.protocol` on a socket; so neither
side can make the other run code. It may crash or loop for ever: the parent keeps the limits.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
import tvm
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock
from tvm.target import Target

from lib.machine import linking
from lib.measure import timing
from lib.measure.connection import Connection
from lib.measure.device_source import LocalDevice
from lib.measure.libraries import Libraries
from lib.measure.protocol import (
    Build,
    Built,
    Check,
    Checked,
    Compile,
    Compiled,
    Define,
    Done,
    Drop,
    Infer,
    OpenLibrary,
    Param,
    Time,
    Timed,
    TimeLibrary,
)
from lib.measure.timing import ColdMemory
from lib.tir import analysis, lowering, traces
from lib.tir.lowering import Lowering
from lib.tir.numerics import largest_error, random_values
from lib.tir.parameters import value_bounds, weight_positions
from lib.tir.workload import load_module

# A kernel needs nothing but what the process that loads it has: linked in 5 ms, not 20.
_LINK = ["-nostdlib"] if sys.platform == "linux" else []
_COLD_FROM = 1 << 18  # bytes: fewer come from memory in a few microseconds


class Kernels:
    """Candidates of one workload at a time that were built and wait to be timed."""

    def __init__(self, target: Target, how: Lowering | None = None) -> None:
        """Lowers programs as libraries are, or in another way for comparisons."""
        self._target, self._lowering = target, how or lowering.standard(target.kind.name)
        self._device = tvm.cpu()
        self._text = ""  # of the workload
        self._workload: tvm.IRModule | None = None  # once it is needed
        self._built: dict[str, tuple[tvm.runtime.Module, tuple[Param, ...]]] = {}
        self._arguments: dict[tuple[int, Param], tvm.runtime.Tensor] = {}  # of the workload, shared by candidates
        self._weights: list[int] = []  # positions among its parameters
        self._memory: dict[str, ColdMemory] = {}  # by element type

    def define(self, request: Define) -> Done:
        """See `Define`. It is loaded by the first request that needs it, which fails if it does not load."""
        self._text, self._workload, self._arguments = request.workload, None, {}
        return Done()

    def build(self, request: Build) -> Built:
        """See `Build`; packing of weights is left out."""
        workload, start = self._loaded(), time.perf_counter()
        scheduled = traces.program(workload, request.trace, self._target)
        # What MetaSchedule's default_build does: weights count as packed before.
        program = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(scheduled)
        is_apart = request.trace == traces.EMPTY_TRACE and not request.as_shipped
        target = lowering.for_untuned(self._target) if is_apart else self._target
        self._built[request.candidate_id] = self._compiled(program, target, value_bounds(workload["main"]))
        return Built(time.perf_counter() - start)

    def time(self, request: Time) -> Timed:
        """See `Time`. Weights are read from memory, as in a model that is larger than the caches, only if there are
        enough of them for that to matter."""
        start = time.perf_counter()
        kernel, params = self._built[request.candidate_id]
        arguments = self._arguments_of(params)
        rotating = self._with_cold_weights(params, arguments) if request.cold_weights else []
        evaluate = (
            timing.on_rotating_arguments(kernel, rotating)
            if rotating
            else timing.on_equal_arguments(kernel, arguments, self._device)
        )
        began_s, had_s = time.perf_counter(), time.thread_time()
        latencies, number = timing.time_kernel(
            evaluate, request.repeats, request.min_repeat_s, request.slow_above_s, request.number
        )
        end_s = time.perf_counter()
        waited_s = max(0.0, end_s - began_s - (time.thread_time() - had_s))
        return Timed(tuple(latencies), number, end_s - start, waited_s=waited_s)

    def drop(self, _request: Drop) -> Done:
        """See `Drop`."""
        self._built.clear()
        return Done()

    def check(self, request: Check) -> Checked:
        """Largest difference to `lowering.reference` on equal inputs, over the largest output of that.

        The weights' packing is compiled into the candidate here, so that both take the same arguments.
        """
        workload = self._loaded()
        reference, program = (
            self._compiled(program, self._target, value_bounds(workload["main"]))
            for program in (
                lowering.reference(workload, self._target),
                traces.program(workload, request.trace, self._target),
            )
        )

        def run(inputs: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
            results = []
            for kernel, _ in (reference, program):
                arguments = [tvm.runtime.tensor(array) for array in inputs]
                kernel["main"](*arguments)
                results.append([argument.numpy() for argument in arguments])
            return results

        inputs = [tensor.numpy() for tensor in self._arguments_of(reference[1])]
        return Checked(largest_error(run, inputs, has_bytes_within=analysis.rounds_to_bytes(workload["main"])))

    def compile(self, request: Compile) -> Compiled:
        """See `Compile`."""
        workload, start = self._loaded(), time.perf_counter()
        program = traces.program(workload, request.trace, self._target)
        if not request.pack:
            program = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(program)
        with self._target:  # nvcc looks there for the architecture
            built = lowering.build(program, self._target, self._lowering)
            built.export_library(str(request.library), options=_LINK, **linking.for_export(self._target))
        return Compiled(time.perf_counter() - start, parameters(program, value_bounds(workload["main"])))

    def _loaded(self) -> tvm.IRModule:
        if self._workload is None:
            self._workload = load_module(self._text)
            self._weights = weight_positions(self._workload["main"])
        return self._workload

    def _compiled(
        self, program: tvm.IRModule, target: Target, bounds: Mapping[int, int]
    ) -> tuple[tvm.runtime.Module, tuple[Param, ...]]:
        kernel = lowering.build(program, target, self._lowering)
        kernel.get_function("main")  # machine code is made here, not in the timing
        return kernel, parameters(program, bounds)

    def _arguments_of(self, params: tuple[Param, ...]) -> list[tvm.runtime.Tensor]:
        for position, param in enumerate(params):
            if (position, param) not in self._arguments:
                values = random_values(param.shape, param.dtype, param.bound, seed=position)
                self._arguments[position, param] = tvm.runtime.tensor(values)
        return [self._arguments[key] for key in enumerate(params)]

    def _with_cold_weights(
        self, params: tuple[Param, ...], arguments: list[tvm.runtime.Tensor]
    ) -> list[list[tvm.runtime.Tensor]]:
        """The same arguments with the weights at other addresses in each list; no lists if there is no need, or no
        room for two."""
        of_types = [[n for n in self._weights if params[n].dtype == dtype] for dtype in timing.COLD]
        weights = max(of_types, key=lambda some: _bytes([params[n] for n in some]))
        if _bytes([params[n] for n in weights]) < _COLD_FROM:
            return []
        dtype = params[weights[0]].dtype
        if dtype not in self._memory:
            self._memory[dtype] = ColdMemory(dtype)
        lists = []
        for copies in self._memory[dtype].copies([params[n].shape for n in weights]):
            lists.append(arguments.copy())
            for n, tensor in zip(weights, copies, strict=True):
                lists[-1][n] = tensor
        return lists if len(lists) > 1 else []


def _bytes(params: Sequence[Param]) -> int:
    return sum(math.prod(param.shape) * analysis.itemsize(param.dtype) for param in params)


def parameters(program: tvm.IRModule, bounds: Mapping[int, int]) -> tuple[Param, ...]:
    """The parameters of `main`; for bounds see `value_bounds`."""
    return tuple(
        Param(tuple(int(extent) for extent in param.ty.shape), str(param.ty.dtype), bounds.get(n, 0))
        for n, param in enumerate(program["main"].params)
    )


def main(descriptor: int, target_text: str) -> None:
    """Answer requests until the parent closes the socket."""
    connection = Connection(descriptor)
    target = Target(target_text)
    kernels, libraries = Kernels(target), Libraries(LocalDevice(target.kind.name))
    connection.serve(
        {
            Define: kernels.define,
            Build: kernels.build,
            Time: kernels.time,
            Drop: kernels.drop,
            Check: kernels.check,
            Compile: kernels.compile,
            OpenLibrary: libraries.open,
            Infer: libraries.infer,
            TimeLibrary: libraries.time,
        }
    )
