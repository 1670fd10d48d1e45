"""Whole models side by side: each a function that runs one inference, timed in turn in one process."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import tvm
from tvm import relax

from lib.numerics import random_values

Side = Callable[[], Any]

_TURN_S = 0.25  # of measuring, after as long a warm-up
_REST_S = 0.3  # in which the threads of the side that ran before go to sleep


def inputs(folder: Path) -> list[np.ndarray]:
    """Seeded values for the inputs that the manifest of a compiled model names."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return [
        random_values(tuple(value["shape"]), value["dtype"], value["bound"], seed=n)
        for n, value in enumerate(manifest["model_inputs"])
    ]


def compiled(folder: Path, arrays: Sequence[np.ndarray]) -> Side:
    """A model that was compiled by us, or by `stock.py`."""
    manifest = json.loads((folder / "manifest.json").read_text())
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(folder / manifest["library"])), tvm.cpu())
    params = np.load(folder / manifest["params"]).values()
    arguments = [tvm.runtime.tensor(array) for array in (*arrays, *params)]
    return lambda: machine["main"](*arguments)


def onnx_runtime(file: Path, arrays: Sequence[np.ndarray], threads: int) -> Side:
    """An ONNX file in ONNX Runtime, with its default optimisations."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options)
    feed = dict(zip([value.name for value in session.get_inputs()], arrays, strict=True))
    return lambda: session.run(None, feed)


def openvino(file: Path, arrays: Sequence[np.ndarray], threads: int) -> Side:
    """An ONNX file in OpenVINO, in float32; needs `pip install openvino`."""
    import openvino as ov

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    request = ov.Core().compile_model(str(file), "CPU", settings).create_infer_request()
    return lambda: list(request.infer(list(arrays)).values())


def outputs(result: Any) -> list[np.ndarray]:
    """The arrays of what a side returned."""
    if isinstance(result, (tvm.runtime.Tensor, np.ndarray)):
        result = [result]
    return [value.numpy() if isinstance(value, tvm.runtime.Tensor) else np.asarray(value) for value in result]


def in_turn(sides: Mapping[str, Side], turns: int) -> dict[str, list[float]]:
    """Median latency of each turn in seconds, A B C A B C ..."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, infer in sides.items():
            time.sleep(_REST_S)
            found[name].append(_turn(infer))
    return found


def _turn(infer: Side) -> float:
    for seconds in (_TURN_S, _TURN_S):
        latencies: list[float] = []
        end = time.perf_counter() + seconds
        while not latencies or time.perf_counter() < end:
            started = time.perf_counter()
            infer()
            latencies.append(time.perf_counter() - started)
    return median(latencies)
