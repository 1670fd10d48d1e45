"""How long a kernel takes: repeats over a minimal time each, with weights from caches or from memory."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm

from lib.tir.numerics import random_values

Evaluate = Callable[[int, int], list[float]]  # from runs in a repeat, and repeats: the mean seconds of each repeat

_LOOK_S = 0.002  # a candidate is not called slow on less than this
_MEMORY = 96 << 20  # bytes: three times the last-level cache of most machines
COLD = ("float32", "bfloat16", "int8", "int16")  # element types of weights that can be read from memory
_DRAWN = (1 << 18) + 1031  # elements, which then repeat; odd, so that weights that follow each other differ
_ALIGNED = 1024  # elements: where tensors begin in it


def time_kernel(
    evaluate: Evaluate, repeats: int, min_repeat_s: float, slow_above_s: float | None = None, number: int = 0
) -> tuple[list[float], int]:
    """Time a kernel: `repeats` means, each over at least about `min_repeat_s`.

    Args:
        slow_above_s: A kernel that looks slower than this is not timed further; None for no such limit.
        number: Runs in a repeat; 0 to find it from the first run.

    Returns:
        Latencies in seconds, and the number of runs in a repeat.
    """
    if not number:
        slow_above_s = math.inf if slow_above_s is None else slow_above_s
        first = evaluate(1, 1)[0]
        if slow_above_s < first < _LOOK_S:  # one run of a short kernel may be all waking up of threads
            first = evaluate(math.ceil(_LOOK_S / first), 1)[0]
        if first > slow_above_s:
            return [first], 1
        number = max(1, math.ceil(min_repeat_s / max(first, 1e-9)))
    return evaluate(number, repeats), number


def on_equal_arguments(kernel: tvm.runtime.Module, arguments: Sequence[Any], device: Any) -> Evaluate:
    """Run `main` of a module on the same arguments each time, on any device."""

    def evaluate(number: int, repeat: int) -> list[float]:
        evaluator = kernel.time_evaluator("main", device, number=number, repeat=repeat)
        return [float(second) for second in evaluator(*arguments).results]

    return evaluate


def on_rotating_arguments(kernel: tvm.runtime.Module, argument_lists: Sequence[Sequence[Any]]) -> Evaluate:
    """Run `main` of a module on the next arguments each time, in this process; a call takes about 1 us more."""
    function, upcoming = kernel["main"], itertools.cycle(argument_lists)

    def mean(number: int) -> float:
        several = list(itertools.islice(upcoming, number))
        start = time.perf_counter()
        for arguments in several:
            function(*arguments)
        return (time.perf_counter() - start) / number

    def evaluate(number: int, repeat: int) -> list[float]:
        first = mean(1)  # wakes the threads up, as TVM's evaluator does
        if number == repeat == 1 and first > _LOOK_S:
            return [first]  # of which waking up is nothing: an untuned convolution takes a second
        return [mean(number) for _ in range(repeat)]

    return evaluate


class ColdMemory:
    """More elements than caches hold, to be taken for weights: until all were read, none is read again."""

    def __init__(self, dtype: str = "float32") -> None:
        """Of elements of one type, see `COLD`."""
        self._dtype = dtype
        # Which values is no matter, as long as they are small: drawing all of them anew takes half a second.
        elements = np.resize(random_values((_DRAWN,), "float32", 0, seed=0), _MEMORY // 4 + _ALIGNED)
        if dtype == "bfloat16":  # which DLPack in NumPy does not know; the upper half of a float is one
            elements = np.tile(elements.view(np.uint16)[1::2], 2)
        elif dtype in ("int8", "int16"):
            elements = elements.view(dtype)
        first = -elements.ctypes.data // elements.itemsize % _ALIGNED
        self._elements = elements[first : first + _MEMORY // elements.itemsize]

    def copies(self, shapes: Sequence[tuple[int, ...]]) -> list[list[tvm.runtime.Tensor]]:
        """Tensors of these shapes, as often as there is room for all of them; none overlaps another."""
        found: list[list[tvm.runtime.Tensor]] = []
        begin = 0
        while True:
            tensors = []
            for shape in shapes:
                end = begin + math.prod(shape)
                if end > len(self._elements):
                    return found
                tensor = tvm.runtime.from_dlpack(self._elements[begin:end].reshape(shape))
                tensors.append(tensor if self._dtype != "bfloat16" else tensor._create_view(shape, self._dtype))
                begin = -(-end // _ALIGNED) * _ALIGNED
            found.append(tensors)
