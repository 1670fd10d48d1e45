"""Products with a bias in Strassen's way and as they are: which is faster, and which `lib.graph.strassen` takes.

    python benchmarks/strassen.py --programs 100 --out benchmarks/strassen/zen5.parquet 197x768x3072 14x14x1024x512 ...

Rows, or lines and pixels of an image, whose product is a 1x1 convolution, then depth and columns. Random programs of
each, the fastest of which are timed again in turn, with weights that come from memory. Prints the fastest of both ways.
Nothing else may run on the machine.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import tvm
import ways
from tvm import te, topi
from ways import TARGET

from lib.graph import strassen
from lib.machine.registers import registers
from lib.tir.workload import as_workload

_WAYS, _SIDES = ("plain", "strassen"), ("rows", "depth", "columns")  # rows: as text, `14x14` of an image


def workload(rows: Sequence[int], depth: int, columns: int, way: str) -> tvm.IRModule:
    """A product of `rows x depth` with `depth x columns` weights, and a bias.

    Args:
        rows: One extent, or the lines and pixels of an image.
    """
    lines = (1, *rows) if len(rows) > 1 else tuple(rows)
    data, shift = te.placeholder((*lines, depth), name="data"), te.placeholder((columns,), name="shift")
    machine = registers(TARGET.tvm())
    if way == "strassen":
        weight = te.placeholder((len(strassen.WEIGHT), depth // 2, columns // 2), name="weight")
        product = strassen.product(data, weight, *strassen.paired(lines, machine), machine.lanes)
    elif len(rows) > 1:
        weight = te.placeholder((1, 1, depth, columns), name="weight")
        product = topi.nn.conv(data, weight, [1, 1], [0] * 4, [1, 1], 1, "NHWC", "HWIO", "float32")
    else:
        weight = te.placeholder((depth, columns), name="weight")
        product = topi.matmul(data, weight)
    function = te.create_prim_func([data, weight, shift, topi.add(product, shift)])
    return as_workload(function.with_attr("layout_free_buffers", [1]))


def report(table: pd.DataFrame) -> None:
    """Print the fastest program of each product in each way, by the median of the turns after the first."""
    machine = registers(TARGET.tvm())
    print("| rows x depth x columns | as it is, us | GFLOP/s | Strassen's, us | ratio | taken |")
    print("|---|---|---|---|---|---|")
    for us in ways.best(table, list(_SIDES)).to_dict("records"):
        rows, depth, columns = [int(n) for n in str(us["rows"]).split("x")], int(us["depth"]), int(us["columns"])
        taken = "yes" if strassen.is_taken((1, *rows), depth, columns, machine) else "no"
        speed, ratio = 2 * math.prod(rows) * depth * columns / us["plain"] / 1e3, us["plain"] / us["strassen"]
        print(f"| {us['rows']} x {depth} x {columns} | {us['plain']:.0f} | {speed:.0f} | {us['strassen']:.0f} | "
              f"{ratio:.2f} | {taken} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("products", nargs="+", help="ROWSxDEPTHxCOLUMNS, or LINESxPIXELSxDEPTHxCOLUMNS")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True, help="keep each turn as Parquet")
    given = parser.parse_args()
    sides = [[int(n) for n in text.split("x")] for text in given.products]
    found = []
    for *rows, depth, columns in sides:
        modules = {way: workload(rows, depth, columns, way) for way in _WAYS}
        names = "x".join(map(str, rows))
        found.append(ways.fastest(modules, given.programs).assign(rows=names, depth=depth, columns=columns))
    table = pd.concat(found, ignore_index=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(given.out)
    report(table)


if __name__ == "__main__":
    main()
