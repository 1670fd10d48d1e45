"""The process that runs an ONNX file as ONNX itself means it.

Started by `file_peer`. It has ONNX Runtime if that is installed, else
the reference evaluator of the `onnx` package, which is exact and slow.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import onnx

from lib.measure.connection import Connection
from lib.measure.protocol import FileOpened, Infer, Inferred, OpenFile, TimeLibrary
from lib.runtime.family_tuner_runtime import cpu

_VNNI = ("avx512vnni", "avxvnni")
_OF_BYTES = ("Quant", "Integer", "QLinear", "QGemm", "QAttention")  # in names of operators
_PRODUCTS, _INT8 = ("MatMulInteger", "ConvInteger"), onnx.TensorProto.INT8
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

    def open(self, request: OpenFile) -> FileOpened:
        """See `OpenFile`. The file that was opened last is not loaded again for other inputs."""
        wanted = request.file, request.compared, request.threads, request.as_written
        if self._opened is None or self._opened[0] != wanted:
            self._opened = wanted, _load(*wanted)
        opened, arrays = self._opened[1], list(np.load(request.inputs).values())
        self._loaded[request.name] = partial(opened.run, arrays), partial(opened.compute, arrays)
        return FileOpened(opened.by, opened.is_timed)

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

    def session(model: Path | bytes, n: int, *, exactly: bool = False) -> _Infer:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = n
        if as_written:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if exactly:
            options.add_session_config_entry("session.x64quantprecision", "1")
        given = model if isinstance(model, bytes) else str(model)
        made = onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        names = [value.name for value in made.get_inputs()]

        def run(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
            found: Sequence[np.ndarray] = made.run(None, dict(zip(names, arrays, strict=True)))
            return found

        return run

    try:
        run = session(file, threads)
    except onnxruntime.capi.onnxruntime_pybind11_state.InvalidGraph:
        # Its own optimisations may make it so: 1.31 has products of floats of eight bits be such of integers.
        if as_written:
            raise
        opened = _load(file, compared, threads, as_written=True)
        return replace(opened, by=f"{opened.by} without its optimisations", is_timed=False)
    may_saturate = adds_in_16_bits()
    model = onnx.load(compared, load_external_data=False) if threads > 1 or may_saturate else onnx.ModelProto()
    is_alone = threads > 1 and loses_sums(model)
    exact = with_zero_points(compared, model) if may_saturate and multiplies_bytes(model) else None
    if exact is not None:
        compute = session(exact, 1 if is_alone else threads, exactly=True)
    else:
        compute = session(compared, 1 if is_alone else threads) if is_alone or compared != file else run
    return Opened(run, compute, f"ONNX Runtime {onnxruntime.__version__}", True)


def loses_sums(model: onnx.ModelProto) -> bool:
    """Whether there is a ScatterND that combines values: where several go to one place, ONNX Runtime loses some of them
    if it has several threads, other ones each time."""
    scatters = (node for node in _nodes(model) if node.op_type == "ScatterND")
    return any(each.name == "reduction" and each.s != b"none" for node in scatters for each in node.attribute)


def adds_in_16_bits() -> bool:
    """Whether ONNX Runtime may compute products of bytes wrongly on this CPU: without VNNI it adds two in 16 bits, and
    these hold 32,767 at most. It says so of itself, and has an option for such CPUs
    (`onnxruntime_session_options_config_keys.h`, `session.x64quantprecision`)."""
    return cpu.architecture() == "x86_64" and all(cpu.missing([name]) for name in _VNNI)


def multiplies_bytes(model: onnx.ModelProto) -> bool:
    """Whether a file may have such products, by the names of its operators."""
    return any(word in node.op_type for node in _nodes(model) for word in _OF_BYTES)


def with_zero_points(file: Path, model: onnx.ModelProto) -> Path | bytes | None:
    """A file as ONNX Runtime can load it with that option: where a product of integers has no zero point of its weight,
    it ends the process (1.23), so it gets one of zero. None if that cannot be said: of weights in other files."""
    weights = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    lacking = [node for node in model.graph.node if node.op_type in _PRODUCTS and not (*node.input, "", "")[3]]
    if not lacking:
        return file
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer):
        return None
    for node in lacking:
        zero = onnx.helper.make_tensor(f"{node.input[1]}_zero_point", weights.get(node.input[1], _INT8), (), [0])
        if zero.name not in weights:
            weights[zero.name] = zero.data_type
            model.graph.initializer.append(zero)
        given = [*node.input, ""][:3]
        del node.input[:]
        node.input.extend([*given, zero.name])
    return model.SerializeToString()


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All of a file, those of graphs within nodes, and of functions, as well."""
    graphs: list[onnx.GraphProto | onnx.FunctionProto] = [model.graph, *model.functions]
    while graphs:
        for node in graphs.pop().node:
            yield node
            graphs += [graph for each in node.attribute for graph in (each.g, *each.graphs)]


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
    connection.serve({OpenFile: files.open, Infer: files.infer, TimeLibrary: files.time})
