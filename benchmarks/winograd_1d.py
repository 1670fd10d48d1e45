"""Convolutions along one axis with minimal filters and as they are: which is fastest, and which filter is taken.

    python benchmarks/winograd_1d.py --programs 60 --out FILE.parquet 9:200:256:1024 7:17x17:192:192 11:2048:64:64:5 ...

Taps, results of a signal (or lines and pixels of an image, along whose lines the kernel is), channels, the distance of
taps, and the stride of results; with a bias. See `ways.py` for how they are timed.
"""

import math
from collections.abc import Mapping

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


def _case(text: str) -> ways.Case:
    return dict(zip(_CASE, [*text.split(":"), "1", "1"], strict=False))


def _modules(case: Mapping[str, str], kind: str) -> dict[str, tvm.IRModule]:
    return {_PLAIN: workload(case, kind, None)} | {
        _named(way): workload(case, kind, way) for way in _filters(case, kind)
    }


def report(table: pd.DataFrame) -> None:
    """Print the fastest program of each way, and the filter that is taken."""
    keys = [*_CASE, "kind"]
    for us in ways.best(table, keys).to_dict("records"):
        case = {name: str(us[name]) for name in keys}
        (rows, axis), channels = _rows(case), (int(case["inputs"]), int(case["outputs"]))
        found = _filters(case, case["kind"])
        taken = winograd_1d.best_filter(found, int(case["taps"]), rows, axis, channels, case["kind"])
        flop = 2 * math.prod(rows) * int(case["taps"]) * math.prod(channels)
        times = ways.told({str(name): value for name, value in us.items()}, keys, _PLAIN, flop)
        print(f"{' '.join(case[name] for name in _CASE)} {case['kind']}: {times}; "
              f"taken: {_named(taken) if taken else 'none'}", flush=True)  # fmt: skip


if __name__ == "__main__":
    ways.compare(str(__doc__), "TAPS:RESULTS:INPUTS:OUTPUTS[:DISTANCE[:STRIDE]]", _case, _modules, report)
