"""Square convolutions in Winograd's way and as they are: which is fastest, and which is taken.

    python benchmarks/winograd_2d.py --programs 30 --out FILE.parquet 14x14:336:336:14 28x28:120:120:5:3 ...

Lines and pixels of the image, channels read and written, groups of these, and taps of a side (3 unless another number
is given); with zeros around it, and a bias. See `ways.py` for how they are timed.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import tvm
import ways
from tvm import te, topi
from ways import TARGET

from lib.graph import winograd
from lib.tir.workload import as_workload

_PLAIN, _TILES = "plain", (2, 4)
_CASE = ("image", "inputs", "outputs", "groups", "taps")


def workload(case: Mapping[str, str], kind: str, tile: int) -> tvm.IRModule:
    """A convolution with zeros around it, and a bias, to float32; tile 0: as it is."""
    inputs, outputs, groups, taps = (int(case[name]) for name in _CASE[1:])
    data = te.placeholder((1, *_image(case), inputs), kind, name="data")
    shift, around = te.placeholder((outputs,), name="shift"), [taps // 2] * 4
    if tile:
        size = tile + taps - 1
        weight = te.placeholder((size, size, inputs // groups, outputs), kind, name="weight")
        made = winograd.convolution(data, weight, tile, around, groups)
    else:
        weight = te.placeholder((taps, taps, inputs // groups, outputs), kind, name="weight")
        made = topi.nn.conv(data, weight, [1, 1], around, [1, 1], groups, "NHWC", "HWIO", "float32")
    function = te.create_prim_func([data, weight, shift, topi.nn.relu(topi.add(made, shift))])
    return as_workload(function.with_attr("layout_free_buffers", [1]))


def _image(case: Mapping[str, str]) -> tuple[int, int]:
    height, width = map(int, case["image"].split("x"))
    return height, width


def main() -> None:
    """Time each case, keep the turns, print the fastest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help="LINESxPIXELS:INPUTS:OUTPUTS[:GROUPS[:TAPS]]")
    parser.add_argument("--programs", type=int, default=30)
    parser.add_argument("--kind", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, required=True, help="keep each turn as Parquet")
    given = parser.parse_args()
    found = []
    for text in given.cases:
        parts = text.split(":")
        case = dict(zip(_CASE, [*parts, *["1", "3"][len(parts) - 3 :]], strict=True))
        tiles = [0, *(_TILES if given.kind == "float32" else _TILES[:1])]
        modules = {f"m = {tile}" if tile else _PLAIN: workload(case, given.kind, tile) for tile in tiles}
        found.append(ways.fastest(modules, given.programs).assign(**case, kind=given.kind))
        report(found[-1])
    table = pd.concat(found, ignore_index=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(given.out)


def report(table: pd.DataFrame) -> None:
    """Print the fastest program of each way, and the tile that is taken."""
    for us in ways.best(table, [*_CASE, "kind"]).to_dict("records"):
        case = {str(name): str(us[name]) for name in (*_CASE, "kind")}
        inputs, outputs, groups, taps = (int(case[name]) for name in _CASE[1:])
        taken = winograd.best_tile(
            _image(case), (inputs, outputs), kind=case["kind"], instructions=TARGET.instructions, taps=taps,
            groups=groups,
        )  # fmt: skip
        plain, flop = float(us[_PLAIN]), 2 * math.prod(_image(case)) * taps**2 * inputs * outputs // groups
        times = [f"{way} {time:.0f} ({plain / time:.2f})" for way, time in us.items()
                 if way not in (*case, _PLAIN) and np.isfinite(time)]  # fmt: skip
        print(f"{' '.join(case.values())}: as it is {plain:.0f} us ({flop / plain / 1e3:.0f} GFLOP/s), "
              f"{', '.join(times)}; taken: {taken or 'none'}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
