"""How many pairs of a model's weights, in bytes, may leave the 16 bits in which `vpmaddubsw` adds their products.

    python benchmarks/saturation.py FILE.onnx ...

Weights of convolutions and products are quantised as ONNX Runtime's tools do it for each output channel (symmetric, 8
bits, or 7 as `reduce_range` has it). The instruction multiplies neighbouring input channels of data, which are 0 to
255, and adds two: more than 32,767 become 32,767, and less than -32,768 become that. Four channels of sixteen columns
are what a register tile of two vectors has in a step: if any of their pairs may do so, it needs another way.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

_FEWEST = 16  # input and output channels
_DATA, _MOST, _LEAST = 255, 32767, -32768
_COLUMNS = 16


def matrices(model: onnx.ModelProto) -> Iterator[np.ndarray]:
    """The weights of convolutions of images and of products: (taps, input channels, output channels)."""
    known = {each.name: each for each in model.graph.initializer}
    known |= {node.output[0]: each.t for node in model.graph.node if node.op_type == "Constant"
              for each in node.attribute if each.name == "value"}  # fmt: skip
    for node in model.graph.node:
        if node.op_type not in ("Conv", "MatMul") or node.input[1] not in known:
            continue
        weight = numpy_helper.to_array(known[node.input[1]]).astype(np.float32)
        if node.op_type == "Conv" and weight.ndim == 4:
            weight = weight.transpose(2, 3, 1, 0).reshape(-1, weight.shape[1], weight.shape[0])
        elif node.op_type == "MatMul" and weight.ndim == 2:
            weight = weight[None]
        else:
            continue
        if min(weight.shape[1:]) >= _FEWEST and weight.shape[1] % 4 == 0:
            yield weight


def may_leave(weight: np.ndarray, most: int) -> np.ndarray:
    """Which pairs of input channels may, (taps, pairs, output channels), with weights of at most a number."""
    scale = np.abs(weight).max(axis=(0, 1)) / most
    taps, inputs, outputs = weight.shape
    pairs = np.rint(weight / np.where(scale, scale, 1)).reshape(taps, inputs // 2, 2, outputs)
    up, down = (np.maximum(each, 0).sum(axis=2) for each in (pairs, -pairs))
    found: np.ndarray = (_DATA * up > _MOST) | (-_DATA * down < _LEAST)
    return found


def main() -> None:
    """Print a line for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    print("| file | weights | pairs that may, of 8 bits, % | fours of 16 columns that may, % | pairs of 7 bits, % |")
    print("|---|---|---|---|---|")
    for file in parser.parse_args().files:
        found = list(matrices(onnx.load(file)))
        pairs, fours, narrow = [], [], []
        for weight in found:
            which = may_leave(weight, 127)
            pairs.append(which.ravel())
            narrow.append(may_leave(weight, 63).ravel())
            whole = which[..., : which.shape[2] // _COLUMNS * _COLUMNS]
            fours.append(
                whole.reshape(len(which), -1, 2, whole.shape[2] // _COLUMNS, _COLUMNS).any(axis=(2, 4)).ravel()
            )
        if found:
            shares = [100 * np.concatenate(each).mean() for each in (pairs, fours, narrow)]
            print(f"| {file.stem} | {len(found)} | {shares[0]:.2f} | {shares[1]:.0f} | {shares[2]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
