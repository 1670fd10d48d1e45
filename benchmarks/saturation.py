"""How many pairs of a model's weights, in bytes, may leave the 16 bits in which `vpmaddubsw` adds their products.

    python benchmarks/saturation.py FILE.onnx ...

Weights of convolutions and products are quantised as ONNX Runtime's tools do it for each output channel (symmetric, 8
bits, or 7 as `reduce_range` has it). The instruction multiplies neighbouring input channels of data, which are 0 to
255, and adds two: more than 32,767 become 32,767, and less than -32,768 become that. Four channels of sixteen columns
are what a register tile of two vectors has in a step: if any of their pairs may do so, it needs another way.

With `--layers` instead: how many of the weights are in layers in which none may, of 8 bits, and with two words of four
channels added in 16 bits, of 7 bits (`lib.tir.small_weights`), quantised with a scale for each output channel or one.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from lib.tir import small_weights

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


def quantised(weight: np.ndarray, most: int, axis: tuple[int, ...] | None = (0, 1)) -> np.ndarray:
    """A weight in integers of at most a number, with a scale for each output channel, or one (`axis` is None)."""
    scale = np.abs(weight).max(axis=axis) / most
    found: np.ndarray = np.rint(weight / np.where(scale, scale, 1)).astype(np.int8)
    return found


def may_leave(weight: np.ndarray, most: int) -> np.ndarray:
    """Which pairs of input channels may, (taps, pairs, output channels), with weights of at most a number."""
    taps, inputs, outputs = weight.shape
    pairs = quantised(weight, most).astype(np.int32).reshape(taps, inputs // 2, 2, outputs)
    up, down = (np.maximum(each, 0).sum(axis=2) for each in (pairs, -pairs))
    found: np.ndarray = (_DATA * up > _MOST) | (-_DATA * down < _LEAST)
    return found


def that_fit(weights: Sequence[np.ndarray], most: int, words: int, axis: tuple[int, ...] | None) -> float:
    """Per cent of all weights that are in layers none of whose sums of so many words may."""
    fit = [small_weights.words_together(quantised(weight, most, axis)) >= words for weight in weights]
    sizes = [weight.size for weight in weights]
    return float(100 * np.dot(fit, sizes) / sum(sizes))


def main() -> None:
    """Print a line for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--layers", action="store_true")
    given = parser.parse_args()
    found = {file.stem: list(matrices(onnx.load(file))) for file in given.files}
    (_print_layers if given.layers else _print_pairs)({name: weights for name, weights in found.items() if weights})


def _print_pairs(files: Mapping[str, Sequence[np.ndarray]]) -> None:
    print("| file | weights | pairs that may, of 8 bits, % | fours of 16 columns that may, % | pairs of 7 bits, % |")
    print("|---|---|---|---|---|")
    for name, found in files.items():
        pairs, fours, narrow = [], [], []
        for weight in found:
            which = may_leave(weight, 127)
            pairs.append(which.ravel())
            narrow.append(may_leave(weight, 63).ravel())
            whole = which[..., : which.shape[2] // _COLUMNS * _COLUMNS]
            fours.append(
                whole.reshape(len(which), -1, 2, whole.shape[2] // _COLUMNS, _COLUMNS).any(axis=(2, 4)).ravel()
            )
        shares = [100 * np.concatenate(each).mean() for each in (pairs, fours, narrow)]
        print(f"| {name} | {len(found)} | {shares[0]:.2f} | {shares[1]:.0f} | {shares[2]:.2f} |", flush=True)


def _print_layers(files: Mapping[str, Sequence[np.ndarray]]) -> None:
    of_bits = "a scale for each channel, % | one scale, %"
    print(f"| file | weights | 8 bits, {of_bits} | two words of 7 bits, {of_bits} |\n|---|---|---|---|---|---|")
    for name, found in files.items():
        shares = [that_fit(found, most, words, axis) for most, words in ((127, 1), (64, 2)) for axis in ((0, 1), None)]
        print(f"| {name} | {len(found)} | {' | '.join(f'{share:.0f}' for share in shares)} |", flush=True)


if __name__ == "__main__":
    main()
