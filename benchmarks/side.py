"""The process of one side of `versus.py`: a model that infers when it is told to.

    python benchmarks/side.py KIND MODEL --inputs FILE.npz --outputs FILE.npz --threads N

KIND is `library` (MODEL is a folder with a manifest, as `TuneModel` leaves it in `compiled/` and `stock.py` in its
folder), `onnxruntime` or `openvino` (an ONNX file), or `torch` (a `.pt2` file for torch.compile). Each binds inputs
and outputs once, so that no inference copies them, computes in float32 and is otherwise used as it comes. A library for
GPUs runs on the first one, as the kinds `torch_cuda...` do; an inference ends when the GPU has done all of it. The
parent writes a line of JSON for a request and gets one back: `load` writes the outputs of one inference, `turn` warms
up and times. What a library prints goes to the standard error.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

_CACHE_LINE = 64  # bytes


@dataclass(frozen=True)
class Loaded:
    """A model that is ready."""

    infer: Callable[[], Any]
    outputs: Callable[[], list[np.ndarray]]  # of the last inference
    version: str  # of what runs it, and what of its settings decides the time


def library(folder: Path, arrays: Sequence[np.ndarray], _threads: int) -> Loaded:
    """A library that was compiled by TVM, with its packed weights."""
    import tvm

    from lib.contracts import arrays as arrays_of
    from lib.runtime.family_tuner_runtime.weights import Mapped

    manifest = json.loads((folder / "manifest.json").read_text())
    on_gpu = manifest.get("target", {}).get("kind") == "cuda"
    device = tvm.cuda() if on_gpu else tvm.cpu()
    machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(folder / manifest["library"])), device)
    weights, entry = folder / manifest["params"], manifest["entry"]
    is_old = weights.suffix == ".npz"  # of a run of before weights were mapped
    params = map(tvm.runtime.tensor, arrays_of.values(weights)) if is_old else Mapped(weights).tensors
    machine.set_input(entry, *map(tvm.runtime.tensor, arrays), *params)  # copies to a GPU what is not there

    def infer() -> None:
        machine.invoke_stateful(entry)
        if on_gpu:
            device.sync()

    return Loaded(infer, lambda: _flat(machine.get_outputs(entry)), f"TVM {tvm.__version__}")


def bundle(folder: Path, arrays: Sequence[np.ndarray], threads: int) -> Loaded:
    """A bundle as users call it: what has open dimensions is padded and cut within the time."""
    from lib.runtime.family_tuner_runtime import Model

    model = Model(folder, threads=threads)
    last: list[Any] = []

    def infer() -> None:
        last[:] = [model(*arrays)]

    def outputs() -> list[np.ndarray]:
        return list(last[0].values()) if isinstance(last[0], dict) else last

    return Loaded(infer, outputs, f"TVM {model.bundle.facts['versions'].split(',')[0].split()[-1]}")


def onnxruntime(file: Path, arrays: Sequence[np.ndarray], threads: int) -> Loaded:
    """ONNX Runtime's CPU provider, which computes float32 models in float32."""
    import onnx
    import onnxruntime as ort

    from lib.measure.onnx_process import loses_sums

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    feed = dict(zip([value.name for value in session.get_inputs()], arrays, strict=True))
    # Once as usual: shapes of outputs need not stand in the file.
    found = [aligned(value) for value in session.run(None, feed)]
    binding = session.io_binding()
    for name, array in feed.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    for value, array in zip(session.get_outputs(), found, strict=True):
        binding.bind_ortvalue_output(value.name, ort.OrtValue.ortvalue_from_numpy(array))

    def outputs() -> list[np.ndarray]:
        if threads == 1 or not loses_sums(onnx.load(file, load_external_data=False)):
            return found
        options.intra_op_num_threads = 1
        exact = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return list(exact.run(None, feed))

    return Loaded(lambda: session.run_with_iobinding(binding), outputs, f"ONNX Runtime {ort.__version__}")


def openvino(file: Path, arrays: Sequence[np.ndarray], threads: int, precision: str = "f32") -> Loaded:
    """OpenVINO's CPU plugin, held to float32: where the CPU has bfloat16 it would compute in that by default."""
    import openvino as ov

    hint, core = "INFERENCE_PRECISION_HINT", ov.Core()
    default = core.get_property("CPU", hint).to_string()
    asked = {hint: precision} if precision else {}
    model = core.compile_model(str(file), "CPU", {"INFERENCE_NUM_THREADS": threads, **asked})
    found = model.get_property(hint).to_string()
    if precision and found != precision:
        raise RuntimeError(f"the compiled model must compute in {precision}, but {hint} is {found}")
    request = model.create_infer_request()
    for n, array in enumerate(arrays):
        request.set_input_tensor(n, ov.Tensor(array, shared_memory=True))
    return Loaded(
        lambda: request.infer(share_outputs=True),
        lambda: [tensor.data for tensor in request.output_tensors],
        f"OpenVINO {ov.__version__.split('-')[0]} ({found}; its default here: {default})",
    )


def openvino_default(file: Path, arrays: Sequence[np.ndarray], threads: int) -> Loaded:
    """OpenVINO's CPU plugin in the precision that it takes if it is not told."""
    return openvino(file, arrays, threads, precision="")


def torch(file: Path, arrays: Sequence[np.ndarray], threads: int) -> Loaded:
    """torch.compile (inductor) with the weights as constants; float32 products stay so by torch's default."""
    import torch
    import torch._inductor.config as inductor

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    inductor.freezing = True
    inductor.compile_threads = 1  # in this process: compilers that wait for work would not be out of the way
    with contextlib.suppress(ImportError):  # it declares the operator of mixtures of experts
        importlib.import_module("transformers.integrations.moe")
    # One graph or an error: what is not compiled would be timed as if it were.
    program = torch.export.load(file)
    compiled = torch.compile(program.module(), fullgraph=True)
    tensors = [torch.from_numpy(array) for array in arrays]
    return _called(compiled, program, tensors, f"torch {torch.__version__} (inductor, freezing)")


def torch_cuda(file: Path, arrays: Sequence[np.ndarray], _threads: int, how: str = "eager") -> Loaded:
    """torch on a GPU, in float32: its convolutions would take TF32 there if they were not told.

    Args:
        how: `eager`: by the kernels of cuDNN and cuBLAS; `default`: compiled by inductor; `reduce-overhead`: that too,
            and started as one graph of CUDA.
    """
    import torch
    from torch.export.passes import move_to_device_pass

    torch.set_grad_enabled(False)
    torch.backends.cudnn.allow_tf32 = False
    program = move_to_device_pass(torch.export.load(file), "cuda")
    run: Callable[..., Any] = program.module()
    if how != "eager":
        run = torch.compile(run, fullgraph=True, mode=how)
    tensors = [torch.from_numpy(array).to("cuda") for array in arrays]
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return _called(run, program, tensors, f"torch {torch.__version__} ({how}, {cuda})", torch.cuda.synchronize)


def _called(
    run: Callable[..., Any],
    program: Any,
    tensors: Sequence[Any],
    version: str,
    wait: Callable[[], None] = lambda: None,
) -> Loaded:
    """An exported program of torch, by what runs it; an inference ends when `wait` does."""
    from torch.utils import _pytree as trees

    positional, named = trees.tree_unflatten(tensors, program.call_spec.in_spec)
    last: list[Any] = []

    def infer() -> None:
        last[:] = [run(*positional, **named)]
        wait()

    return Loaded(infer, lambda: [value.cpu().numpy() for value in trees.tree_leaves(last)], version)


KINDS: dict[str, Callable[[Path, Sequence[np.ndarray], int], Loaded]] = {
    "library": library,
    "bundle": bundle,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "openvino_default": openvino_default,
    "torch": torch,
    "torch_cuda": torch_cuda,
    "torch_cuda_compiled": partial(torch_cuda, how="default"),
    "torch_cuda_graph": partial(torch_cuda, how="reduce-overhead"),
}


def turn(infer: Callable[[], Any], warm_s: float, seconds: float) -> dict[str, Any]:
    """Median latency of the inferences that begin within some seconds, one at least, after a warm-up of the kind."""
    for limit in (warm_s, seconds):
        latencies: list[float] = []
        end = time.perf_counter() + limit
        while not latencies or time.perf_counter() < end:
            started = time.perf_counter()
            infer()
            latencies.append(time.perf_counter() - started)
    return {"latency_s": median(latencies), "n_inferences": len(latencies)}


def aligned(array: np.ndarray) -> np.ndarray:
    """A contiguous copy that begins with a cache line, as TVM's own tensors do."""
    memory = np.empty(array.nbytes + _CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % _CACHE_LINE
    copy: np.ndarray = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--outputs", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _die_with_parent()
    loaded: Loaded | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request.pop("do") == "load":
                arrays = [aligned(array) for array in np.load(options.inputs).values()]
                loaded = KINDS[options.kind](options.model, arrays, options.threads)
                loaded.infer()
                np.savez(options.outputs, *loaded.outputs())
                reply: dict[str, Any] = {"version": loaded.version}
            elif loaded is None:
                raise RuntimeError("nothing was loaded")
            else:
                reply = turn(loaded.infer, **request)
        except Exception as error:  # a side that cannot is a row that says why
            told = [text.strip() for text in str(error).splitlines() if text.strip()]
            reply = {"failure": f"{type(error).__name__}: {' '.join(told[:3])}"[:500]}
        print(json.dumps(reply), file=replies, flush=True)


def _flat(value: Any) -> list[np.ndarray]:
    return [value.numpy()] if hasattr(value, "numpy") else [array for item in value for array in _flat(item)]


def _die_with_parent() -> None:
    """A process that is stopped does not see its pipe close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
