"""Compiled models, and ONNX Runtime and OpenVINO on the file that they came from, timed in turn.

    python benchmarks/versus.py --libraries ours=FOLDER stock=FOLDER [--onnx FILE] [--turns 15] [--out FILE]

A folder is a run's `compiled/`, or what `stock.py` left. All get the same inputs and threads; how far the outputs are
from the first one's is told, too. OpenVINO takes part where it is installed. Nothing else may run on the machine.
"""

import argparse
import importlib.util
import os
from pathlib import Path
from statistics import median

from lib import targets

CPU = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(CPU.threads)  # TVM's default is half the cores

import pandas as pd
import sides

from lib.numerics import relative_error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--onnx", type=Path)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, help="keep each turn as Parquet")
    options = parser.parse_args()
    folders = {name: Path(folder) for name, _, folder in (word.partition("=") for word in options.libraries)}
    arrays = sides.inputs(next(iter(folders.values())))
    found = {name: sides.compiled(folder, arrays) for name, folder in folders.items()}
    if options.onnx:
        found["ONNX Runtime"] = sides.onnx_runtime(options.onnx, arrays, CPU.threads)
        if importlib.util.find_spec("openvino"):
            found["OpenVINO"] = sides.openvino(options.onnx, arrays, CPU.threads)
    results = {name: sides.outputs(infer()) for name, infer in found.items()}
    first = next(iter(results.values()))
    latencies = sides.in_turn(found, options.turns)
    base = next(iter(latencies.values()))
    print("| | median, ms | lowest | highest | to the first, median of turns | difference of outputs |")
    print("|---|---|---|---|---|---|")
    for name, values in latencies.items():
        error = max(relative_error(a, b) for a, b in zip(results[name], first, strict=True))
        shown = " | ".join(f"{of(values) * 1e3:.3f}" for of in (median, min, max))
        ratio = median(value / other for value, other in zip(values, base, strict=True))
        print(f"| {name} | {shown} | {ratio:.3f} | {error:.0e} |")
    if options.out:
        pd.DataFrame(latencies).to_parquet(options.out)


if __name__ == "__main__":
    main()
