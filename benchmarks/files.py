"""All model files that the benchmarks read, made anew and equal each time; nothing is downloaded.

    pip install --no-deps --require-hashes -r benchmarks/requirements.txt && pip install torch==2.13.0
    python benchmarks/files.py --out FOLDER [--only NAME ...] [--pt2]
    python benchmarks/files.py --out FOLDER --open distilbert llama_prefill

Batch 1 but where a name says otherwise, float32, static shapes, seeded random weights: those of `architectures.py`,
`unprepared.py`, `deployed.py`, `domains.py`, `signals.py`, `services.py` and `trades.py` come from the configurations
of transformers and timm, and from papers, through torch's exporter; those of `light.py` are the files in the `onnx`
package; without torch and transformers, only the latter are made. Those of `published.py` are made of them by ONNX
Runtime's tools: in bytes, in halves, with its own operators. With `--pt2` the former are also written as exported
programs.

A file appears under its name only when ONNX Runtime gives outputs that a wrong graph would change, finite and of a
usual size, and OpenVINO, if installed and if it can run it, gives the same. What fails is named, the others are made,
and the exit status is 1.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import light
import numpy as np
import onnx
import onnxruntime
import published

Arrays = dict[str, np.ndarray]
Maker = Callable[[Path, bool], None]

_MAGNITUDES = (1e-3, 1e3)  # of the largest output
_CHANGE = 1e-2  # of outputs between two inputs, of the largest: less, and the biases alone would pass for the model
_AGREEMENT = 1e-3  # of two frameworks, of the largest output
_ROUNDED = 0.2  # the same of files whose numbers are short


def makers() -> dict[str, Maker]:
    """All files that can be made here, by name."""
    found: dict[str, Maker] = {name: partial(save_light, name) for name in light.NAMES}
    if find_spec("torch") and find_spec("transformers"):
        import architectures
        import deployed  # noqa: F401  their models join the table
        import domains  # noqa: F401
        import services  # noqa: F401
        import signals  # noqa: F401
        import trades  # noqa: F401
        import unprepared  # noqa: F401

        found |= {name: partial(save_torch, name) for name in architectures.MAKERS}  # its resnet50, not the light one
    return found | {name: partial(save_published, name, write) for name, write in published.makers(found).items()}


def save_published(name: str, write: Callable[[Path], Arrays], folder: Path, _pt2: bool = False) -> None:
    """A file of `published.py`, which two frameworks may round differently."""
    with whole(folder / f"{name}.onnx") as path:
        print(checked(name, path, write(path), _ROUNDED), flush=True)


def save_light(name: str, folder: Path, _pt2: bool = False) -> None:
    """A light model of the `onnx` package."""
    proto = light.with_random_weights(name)
    rng = np.random.default_rng(0)
    inputs = {
        value.name: rng.normal(size=[axis.dim_value for axis in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in proto.graph.input
    }
    with whole(folder / f"{name}.onnx") as path:
        onnx.save(light.calibrated(proto, inputs), path)
        print(checked(name, path, inputs), flush=True)


def save_torch(name: str, folder: Path, pt2: bool) -> None:
    """A model of `architectures.py`, also as an exported program if wanted."""
    import architectures
    import torch

    program = architectures.export(name)
    with whole(folder / f"{name}.onnx") as path:
        architectures.save_onnx(program, path)
        inputs = {name: value.numpy() for name, value in program.example_inputs[1].items()}
        print(checked(name, path, inputs), flush=True)
    if pt2:
        with whole(folder / f"{name}.pt2") as path:
            torch.export.save(program, path)


def save_open(name: str, folder: Path) -> None:
    """A model of tokens whose number is left open, as the dimension `sequence`."""
    import architectures

    program = architectures.export_open(name)
    with whole(folder / f"{name}_open.onnx") as path:
        architectures.save_onnx(program, path)
        proto = onnx.load(path)
        for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
            for axis in value.type.tensor_type.shape.dim:
                if axis.dim_param:  # the exporter calls it s53, say
                    axis.dim_param = "sequence"
        onnx.save(proto, path)
        inputs = {name: value.numpy() for name, value in program.example_inputs[1].items()}
        print(checked(f"{name}_open", path, inputs), flush=True)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which gets its name only when all went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def checked(name: str, path: Path, inputs: Arrays, agreement: float = _AGREEMENT) -> str:
    """A row of the table on a file that computes something; a ValueError if it does not."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # with more its ScatterND, adding to one place, loses some of what is added
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, inputs)
    rng = np.random.default_rng(1)
    others = session.run(None, {name: rng.permuted(value) for name, value in inputs.items()})  # of the same values
    largest = max(float(np.abs(output).max()) for output in outputs)
    change = distance(outputs, others)
    if not _MAGNITUDES[0] <= largest <= _MAGNITUDES[1]:  # nor if it is not a number
        raise ValueError(f"the largest output is {largest:.3g}")
    if not change >= _CHANGE:
        raise ValueError(f"other inputs change the outputs by {change:.1g} of the largest only")
    apart = ""
    if find_spec("openvino"):
        try:
            error = distance(outputs, openvino(path, inputs))
        except RuntimeError:  # there are operators that it does not know
            apart = "OpenVINO fails"
        else:
            apart = f"{error:.0e}"
            if not error <= agreement:
                raise ValueError(f"ONNX Runtime and OpenVINO are {error:.1g} of the largest output apart")
    shapes = ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in inputs.items())
    return f"| {name} | {path.stat().st_size / 1e6:.1f} | {shapes} | {largest:.3g} | {change:.2g} | {apart} |"


def openvino(path: Path, inputs: Arrays) -> list[np.ndarray]:
    """The outputs of a file in OpenVINO, in float32 where the CPU knows shorter numbers too."""
    import openvino as ov

    return list(ov.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(inputs).values())


def distance(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The largest difference of outputs, relative to the largest value of each."""
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)


def main() -> None:
    """Make the files, one row of markdown each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder, made if it is not there")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the files; default: all")
    parser.add_argument("--pt2", action="store_true", help="also as exported programs, where they come from torch")
    parser.add_argument("--open", nargs="+", default=[], metavar="NAME", help="write NAME_open.onnx, of any length")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of torch's exporter, about its own code
    known, failed = makers(), []
    if unknown := set(options.only or []) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}")
    print("| model | MB | inputs | largest output | change with inputs | ONNX Runtime to OpenVINO |")
    print("|---|---|---|---|---|---|")
    todo = {
        name: partial(known[name], options.out, options.pt2)
        for name in options.only or (known if not options.open else ())
    }
    todo |= {f"{name}_open": partial(save_open, name, options.out) for name in options.open}
    for name, write in todo.items():
        try:
            write()
        except Exception as error:  # of any of four frameworks
            failed.append(name)
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if failed:
        sys.exit(f"not made: {', '.join(failed)}")


if __name__ == "__main__":
    main()
