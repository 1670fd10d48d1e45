"""The process of one side of `serve.py`: sessions of one model that infer at the same time, as a server's do.

    python benchmarks/serve_side.py KIND MODEL --inputs FILE.npz --sessions N --threads N --warm-s S --seconds S

KIND is `runtime` (MODEL is a bundle), `onnxruntime`, `openvino`, or `openvino_cached` (an ONNX file; the last one keeps
what it compiled beside the file). Writes a line of JSON after the first result, and one at the end. `--others` are
further bundles to load then.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Infer = Callable[[], Any]
Arrays = Sequence[np.ndarray]


def runtime(model: Path, inputs: Arrays, sessions: int, threads: int) -> list[Infer]:
    """This project's: sessions that share library and weights."""
    from family_tuner_runtime import Model  # of lib/runtime

    first = Model(model, threads=threads)
    made = [first, *(first.session(threads=threads) for _ in range(sessions - 1))]
    given = [_filled(first, inputs) for _ in made]
    return [partial(session, *own) for session, own in zip(made, given, strict=True)]


def _filled(model: Any, inputs: Arrays) -> list[np.ndarray]:
    arrays = [model.empty(value.name) for value in model.inputs]
    for array, value in zip(arrays, inputs, strict=True):
        array[...] = value
    return arrays


def onnxruntime(model: Path, inputs: Arrays, sessions: int, threads: int) -> list[Infer]:
    """Sessions with threads of their own."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    found = [ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]) for _ in range(sessions)]
    feed = dict(zip([value.name for value in found[0].get_inputs()], inputs, strict=True))
    return [partial(session.run, None, feed) for session in found]


def openvino(model: Path, inputs: Arrays, sessions: int, threads: int, cache: Path | None = None) -> list[Infer]:
    """Requests to one model with as many streams, in float32; of more streams than threads nothing is to be had."""
    import openvino as ov

    core = ov.Core()
    if cache:
        core.set_property({"CACHE_DIR": str(cache)})
    total = threads * min(sessions, len(os.sched_getaffinity(0)) // threads)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": total, "NUM_STREAMS": min(sessions, total)}
    compiled = core.compile_model(str(model), "CPU", settings)
    requests = [compiled.create_infer_request() for _ in range(sessions)]
    for request in requests:
        for n, array in enumerate(inputs):
            request.set_input_tensor(n, ov.Tensor(array.copy()))
    return [partial(request.infer, share_outputs=True) for request in requests]


def openvino_cached(model: Path, inputs: Arrays, sessions: int, threads: int) -> list[Infer]:
    """The same, from what it compiled before."""
    return openvino(model, inputs, sessions, threads, model.with_suffix(".openvino"))


KINDS = {"runtime": runtime, "onnxruntime": onnxruntime, "openvino": openvino, "openvino_cached": openvino_cached}


def inferences(calls: Sequence[Infer], seconds: float) -> tuple[int, float]:
    """How many are made by threads that call one session each, and in how many seconds."""
    counts = [0] * len(calls)
    begin = threading.Barrier(len(calls) + 1)
    end = [0.0]

    def repeat(n: int) -> None:
        begin.wait()
        while time.perf_counter() < end[0]:
            calls[n]()
            counts[n] += 1

    callers = [threading.Thread(target=repeat, args=(n,)) for n in range(len(calls))]
    for caller in callers:
        caller.start()
    started = time.perf_counter()
    end[0] = started + seconds
    begin.wait()
    for caller in callers:
        caller.join()
    return sum(counts), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--warm-s", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--others", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    arrays = list(np.load(options.inputs).values())
    calls = KINDS[options.kind](options.model, arrays, options.sessions, options.threads)
    calls[0]()
    print("{}", flush=True)
    result: dict[str, float] = {}
    if options.seconds:
        inferences(calls, options.warm_s)
        count, seconds = inferences(calls, options.seconds)
        result["inferences_per_s"] = count / seconds
    if options.others:
        from family_tuner_runtime import Model

        started = time.perf_counter()
        others = [Model(folder) for folder in options.others]
        result |= {"others": len(others), "others_s": time.perf_counter() - started}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
