"""Convolutions along one axis with minimal filters and as they are: which is fastest, and which filter is taken.

    python benchmarks/winograd_1d.py --programs 60 --out FILE.parquet 9:200:256:1024 7:17x17:192:192 11:2048:64:64:5 ...

Taps, results of a signal (or lines and pixels of an image, along whose lines the kernel is), channels, the distance of
taps, and the stride of results; with a bias. See `ways.py` for how they are timed.
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

from lib.graph import winograd_1d
from lib.graph.winograd_1d import Filter
from lib.tir.workload import as_workload

_PLAIN = "plain"
_CASE = ("taps", "rows", "inputs", "outputs", "distance", "stride")


def workload(case: Mapping[str, str], kind: str, way: Filter | None) -> tvm.IRModule:
    """A convolution with zeros around it, and a bias, to float32."""
    taps, inputs, outputs, distance, stride = (int(case[name]) for name in _CASE if name != "rows")
    (rows, axis), around = _rows(case), (taps - 1) * distance // 2
    data = te.placeholder((*rows[:-1], rows[-1] * stride, inputs), kind, name="data")
    shift = te.placeholder((outputs,), name="shift")
    if way:
        shape = (way.transforms.window, way.pieces, stride * inputs, outputs)
        weight = te.placeholder(shape, kind, name="weight")
        made = winograd_1d.convolution(data, weight, way, axis, rows[axis], around)
    else:
        ones = [1] * (axis - 1)
        weight = te.placeholder((*ones, taps, inputs, outputs), kind, name="weight")
        before = [*[0] * (axis - 1), around]
        layouts = ("NWC", "WIO") if axis == 1 else ("NHWC", "HWIO")
        made = topi.nn.conv(
            data, weight, [*ones, stride], before * 2, [*ones, distance], 1, *layouts, "float32"
        )  # fmt: skip
    function = te.create_prim_func([data, weight, shift, topi.add(made, shift)])
    return as_workload(function.with_attr("layout_free_buffers", [1]))


def _rows(case: Mapping[str, str]) -> tuple[list[int], int]:
    """The extents of the results, and the axis of the kernel: the last one."""
    rows = [1, *(int(n) for n in case["rows"].split("x"))]
    return rows, len(rows) - 1


def _filters(case: Mapping[str, str], kind: str) -> list[Filter]:
    return winograd_1d.filters(int(case["taps"]), kind, int(case["distance"]), int(case["stride"]))


def _named(way: Filter) -> str:
    return f"F({way.tile}, {way.taps})" + (f" x {way.pieces}" if way.pieces > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help="TAPS:RESULTS:INPUTS:OUTPUTS[:DISTANCE[:STRIDE]]")
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--kind", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, required=True, help="keep each turn as Parquet")
    given = parser.parse_args()
    found = []
    for text in given.cases:
        case = dict(zip(_CASE, [*text.split(":"), "1", "1"], strict=False))
        of_case = {_named(way): workload(case, given.kind, way) for way in _filters(case, given.kind)}
        modules = {_PLAIN: workload(case, given.kind, None), **of_case}
        found.append(ways.fastest(modules, given.programs).assign(**case, kind=given.kind))
        report(found[-1])
    table = pd.concat(found, ignore_index=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(given.out)


def report(table: pd.DataFrame) -> None:
    """Print the fastest program of each way, and the filter that is taken."""
    for us in ways.best(table, [*_CASE, "kind"]).to_dict("records"):
        case = {str(name): str(value) for name, value in us.items()}
        (rows, axis), channels = _rows(case), (int(case["inputs"]), int(case["outputs"]))
        found = _filters(case, case["kind"])
        taken = winograd_1d.best_filter(found, int(case["taps"]), rows, axis, channels, case["kind"])
        plain, flop = float(us[_PLAIN]), 2 * math.prod(rows) * int(case["taps"]) * math.prod(channels)
        times = [f"{way} {time:.0f} ({plain / time:.2f})" for way, time in us.items()
                 if way not in (*_CASE, "kind", _PLAIN) and np.isfinite(time)]  # fmt: skip
        print(f"{' '.join(case[name] for name in _CASE)} {case['kind']}: as it is {plain:.0f} us "
              f"({flop / plain / 1e3:.0f} GFLOP/s), {', '.join(times)}; taken: {_named(taken) if taken else 'none'}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
