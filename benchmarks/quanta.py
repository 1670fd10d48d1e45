"""How far each layer of a quantised file is from what ONNX Runtime computes, in quanta.

    python benchmarks/quanta.py --onnx QDQ ... [--seed 0]

All bytes between layers (what `QuantizeLinear` makes of activations) become outputs of the file, and are compared with
those of ONNX Runtime without its optimisations, which computes what the file says, operator by operator, in floats.
Each layer of ours begins with the bytes that ONNX Runtime has there: carried on, one byte that was rounded otherwise
becomes many in a network of random weights. Ours are the kernels of the importer, in integers, without schedules: how
they are scheduled does not change them. Nothing is timed here.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import tvm
from onnx import helper
from quantize import random_samples
from tvm import relax

from lib.graph import fusion
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.machine import targets
from lib.models import onnx_import
from lib.tir import lowering


def _quantized(proto: onnx.ModelProto) -> dict[str, int]:
    """The bytes between layers, by name, with their element types."""
    zeros = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    made = [node for node in proto.graph.node if node.op_type == "QuantizeLinear" and node.input[0] not in zeros]
    return {node.output[0]: zeros.get([*node.input, ""][2], onnx.TensorProto.UINT8) for node in made}


def with_layers(file: Path, out: Path) -> list[str]:
    """Write the file with the bytes between its layers as its outputs; returns their names."""
    proto = onnx.load(file)
    found = _quantized(proto)
    del proto.graph.output[:]
    proto.graph.output.extend(helper.make_tensor_value_info(name, kind, None) for name, kind in found.items())
    onnx.save(proto, out)
    return list(found)


def apart(file: Path, values: Mapping[str, np.ndarray], out: Path) -> list[str]:
    """Write the file with its layers apart: each reads the bytes before it from an input; returns these inputs' names.

    Args:
        file: As `with_layers` wrote it; `values`: of its outputs.
    """
    proto = onnx.load(file)
    kinds = {value.name: value.type.tensor_type.elem_type for value in proto.graph.output}
    read = [name for name in kinds if any(name in node.input for node in proto.graph.node)]
    for node in proto.graph.node:
        node.input[:] = [f"{name}_given" if name in read else name for name in node.input]
    proto.graph.input.extend(
        helper.make_tensor_value_info(f"{name}_given", kinds[name], values[name].shape) for name in read
    )
    onnx.save(proto, out)
    return read


def ours(file: Path, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs of the imported file, for this CPU."""
    target = targets.cpu_target()
    model = choose_algorithms(onnx_import.load(file), target, AlgorithmConfig())
    module = lowering.reference(fusion.fuse(model.module, target.tvm()), target.tvm())
    machine = relax.VirtualMachine(relax.build(module, target=target.tvm()), tvm.cpu())
    found = machine["main"](*[tvm.runtime.tensor(array) for array in (*inputs, *model.weights.values())])
    return [each.numpy() for each in ([found] if isinstance(found, tvm.runtime.Tensor) else found)]


def theirs(file: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The same of ONNX Runtime, operator by operator."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, inputs))


def compared(file: Path, seed: int = 0) -> pd.DataFrame:
    """A row for each layer: the share of its bytes that are equal, and that are equal or neighbours."""
    with tempfile.TemporaryDirectory() as work:
        names = with_layers(file, Path(work) / "layers.onnx")
        with np.load(random_samples(file, Path(work) / "inputs.npz", seed)) as samples:
            inputs = {name: samples[name][0] for name in samples.files}
        expected = theirs(Path(work) / "layers.onnx", inputs)
        values = dict(zip(names, expected, strict=True))
        read = apart(Path(work) / "layers.onnx", values, Path(work) / "apart.onnx")
        found = ours(Path(work) / "apart.onnx", [*inputs.values(), *(values[name] for name in read)])
    rows = []
    for name, a, b in zip(names, found, expected, strict=True):
        off = np.abs(a.astype(np.int16) - b.astype(np.int16))
        rows.append({"layer": name, "equal": np.mean(off == 0), "within one": np.mean(off <= 1), "largest": off.max()})
    return pd.DataFrame(rows)


def main() -> None:
    """Print a line for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--onnx", type=Path, nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    given = parser.parse_args()
    heads = ("file", "layers", "equal, mean", "equal, least", "within one, mean", "within one, least", "largest")
    print(f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", sep="\n")
    for file in given.onnx:
        rows = compared(file, given.seed)
        shares = [
            f"{value:.5f}" for column in ("equal", "within one") for value in (rows[column].mean(), rows[column].min())
        ]
        print(f"| {file.stem} | {len(rows)} | {' | '.join(shares)} | {rows['largest'].max()} |", flush=True)


if __name__ == "__main__":
    main()
