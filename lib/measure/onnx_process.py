"""The process that runs an ONNX file as ONNX itself means it.

Started by `onnx_peer`. It has ONNX Runtime if that is installed, else
the reference evaluator of the `onnx` package, which is exact and slow.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import onnx

from lib.measure.connection import Connection
from lib.measure.protocol import Infer, Inferred, OnnxOpened, OpenOnnx, TimeLibrary

Run = Callable[[], Sequence[np.ndarray]]
_Infer = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]  # of inputs in order


@dataclass(frozen=True, slots=True)
class Opened:
    """A file that was loaded."""

    run: _Infer  # as it is timed
    compute: _Infer  # what others are compared with
    by: str  # name and version of what runs it
    is_timed: bool  # whether its latency says anything


class OnnxFiles:
    """The files that were opened, by name."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[Run, Run]] = {}  # as it is timed, as it is compared with
        self._opened: tuple[tuple[Path, Path, int, bool], Opened] | None = None

    def open(self, request: OpenOnnx) -> OnnxOpened:
        """See `OpenOnnx`. The file that was opened last is not loaded again for other inputs."""
        wanted = request.file, request.compared, request.threads, request.as_written
        if self._opened is None or self._opened[0] != wanted:
            self._opened = wanted, _load(*wanted)
        opened, arrays = self._opened[1], list(np.load(request.inputs).values())
        self._loaded[request.name] = partial(opened.run, arrays), partial(opened.compute, arrays)
        return OnnxOpened(opened.by, opened.is_timed)

    def infer(self, request: Infer) -> Inferred:
        """See `Infer`."""
        started = time.perf_counter()
        _, compute = self._loaded[request.name]
        outputs = compute()
        latency_s = time.perf_counter() - started
        np.savez(request.out, *map(np.asarray, outputs))
        return Inferred(latency_s)

    def time(self, request: TimeLibrary) -> Inferred:
        """See `TimeLibrary`."""
        run, _ = self._loaded[request.name]
        _latencies(run, request.WARM_UP * request.seconds)
        return Inferred(median(_latencies(run, request.seconds)))


def _latencies(run: Run, seconds: float) -> list[float]:
    """Of inferences for about so long, of one at the least."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return found


def _load(file: Path, compared: Path, threads: int, as_written: bool) -> Opened:
    try:
        import onnxruntime
    except ImportError:
        return _reference(compared)

    def session(file: Path, n: int) -> _Infer:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = n
        if as_written:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        made = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        names = [value.name for value in made.get_inputs()]

        def run(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
            found: Sequence[np.ndarray] = made.run(None, dict(zip(names, arrays, strict=True)))
            return found

        return run

    run = session(file, threads)
    is_alone = threads > 1 and loses_sums(compared)
    compute = session(compared, 1 if is_alone else threads) if is_alone or compared != file else run
    return Opened(run, compute, f"ONNX Runtime {onnxruntime.__version__}", True)


def loses_sums(file: Path) -> bool:
    """Whether there is a ScatterND that combines values: where several go to one place, ONNX Runtime loses some of them
    if it has several threads, other ones each time."""

    def scatters(graph: onnx.GraphProto | onnx.FunctionProto) -> bool:
        for node in graph.node:
            given = {each.name: each for each in node.attribute}
            if node.op_type == "ScatterND" and "reduction" in given and given["reduction"].s != b"none":
                return True
            if any(map(scatters, (graph for each in node.attribute for graph in (each.g, *each.graphs)))):
                return True
        return False

    model = onnx.load(file, load_external_data=False)
    return any(map(scatters, (model.graph, *model.functions)))


def _reference(file: Path) -> Opened:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(file))
    weights = {tensor.name for tensor in evaluator.proto_.graph.initializer}
    names = [name for name in evaluator.input_names if name not in weights]

    def run(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        found: Sequence[np.ndarray] = evaluator.run(None, dict(zip(names, arrays, strict=True)))
        return found

    return Opened(run, run, f"the reference evaluator of onnx {onnx.__version__}", False)


def main(descriptor: int, _target_text: str) -> None:
    """Answer requests until the parent closes the socket."""
    connection, files = Connection(descriptor), OnnxFiles()
    connection.serve({OpenOnnx: files.open, Infer: files.infer, TimeLibrary: files.time})
