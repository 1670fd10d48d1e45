"""Square convolutions in Winograd's way and as they are: which is fastest, and which is taken.

    python benchmarks/winograd_2d.py --programs 30 --out FILE.parquet 14x14:336:336:14 28x28:120:120:5:3 ...

Lines and pixels of the image, channels read and written, groups of these, and taps of a side (3 unless another number
is given); with zeros around it, and a bias; with `--kind int16` of bytes, multiplied in pairs of 16 bits, and as they
are also with weights of which one word or two are added in 16 bits (`lib.tir.small_weights`). What is taken is told for
groups whose columns fill whole vectors. See `ways.py` for how they are timed.
"""

import math
from collections.abc import Mapping

import pandas as pd
import tvm
import ways
from tvm import te, topi
from ways import TARGET

from lib.graph import winograd
from lib.tir import small_weights
from lib.tir.workload import as_workload

_PLAIN, _TILES, _PAIRS = "plain", (2, 4), "int16"
_WORDS = {1: "one word", 2: "two words"}
_CASE = ("image", "inputs", "outputs", "groups", "taps")


def workload(case: Mapping[str, str], kind: str, tile: int, words: int = 0) -> tvm.IRModule:
    """A convolution with zeros around it, and a bias, to float32, or of bytes to bytes; tile 0: as it is, with so many
    words of small weights added together."""
    inputs, outputs, groups, taps = (int(case[name]) for name in _CASE[1:])
    of_bytes = kind == _PAIRS
    data = te.placeholder((1, *_image(case), inputs), "uint8" if of_bytes and (tile or words) else kind, name="data")
    shift, around = te.placeholder((outputs,), name="shift"), [taps // 2] * 4
    if tile:
        size = tile + taps - 1
        weight = te.placeholder((size, size, inputs // groups, outputs), kind, name="weight")
        made = winograd.convolution(data, weight, tile, around, groups)
    else:
        weight = te.placeholder((taps, taps, inputs // groups, outputs), "int8" if words else kind, name="weight")
        sums = "int32" if of_bytes else "float32"
        made = topi.nn.conv(data, weight, [1, 1], around, [1, 1], groups, "NHWC", "HWIO", sums)
    if of_bytes:
        made = topi.multiply(topi.cast(made, "float32"), 1e-5)
    result = topi.nn.relu(topi.add(made, shift))
    if of_bytes:
        result = topi.cast(topi.minimum(topi.round(result), 255.0), "uint8")
    function = te.create_prim_func([data, weight, shift, result]).with_attr("layout_free_buffers", [1])
    return as_workload(small_weights.marked(function, words) if words else function)


def _image(case: Mapping[str, str]) -> tuple[int, int]:
    height, width = map(int, case["image"].split("x"))
    return height, width


def _case(text: str) -> ways.Case:
    parts = text.split(":")
    return dict(zip(_CASE, [*parts, *["1", "3"][len(parts) - 3 :]], strict=True))


def _modules(case: Mapping[str, str], kind: str) -> dict[str, tvm.IRModule]:
    tiles = [0, *(_TILES[:1] if kind == "bfloat16" else _TILES)]
    found = {f"m = {tile}" if tile else _PLAIN: workload(case, kind, tile) for tile in tiles}
    return found | {name: workload(case, kind, 0, words) for words, name in _WORDS.items() if kind == _PAIRS}


def report(table: pd.DataFrame) -> None:
    """Print the fastest program of each way, and the tile that is taken."""
    keys = [*_CASE, "kind"]
    for us in ways.best(table, keys).to_dict("records"):
        case = {name: str(us[name]) for name in keys}
        inputs, outputs, groups, taps = (int(case[name]) for name in _CASE[1:])
        taken = winograd.best_tile(
            _image(case), (inputs, outputs), kind=case["kind"], instructions=TARGET.instructions, taps=taps,
            groups=groups,
        )  # fmt: skip
        flop = 2 * math.prod(_image(case)) * taps**2 * inputs * outputs // groups
        found = ways.told({str(name): value for name, value in us.items()}, keys, _PLAIN, flop)
        print(f"{' '.join(case.values())}: {found}; taken: {taken or 'none'}", flush=True)


if __name__ == "__main__":
    ways.compare(str(__doc__), "LINESxPIXELS:INPUTS:OUTPUTS[:GROUPS[:TAPS]]", _case, _modules, report)
