"""Every model of the zoo and every light ONNX file, from its name to a compiled and verified library.

    python benchmarks/models.py [--models NAME_OR_FILE ...] [--out FILE]

Each is tuned by the command that a user types, with trials enough for the warm-up round alone; its wall time and its
largest process are noted. When all are there, their libraries are timed once more, those of ONNX files in turn with
ONNX Runtime, with the same inputs and threads, and the outputs compared; nothing else may run on the machine then.
Rows are kept in a Parquet file, and what stands there is not done again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from lib import targets

CPU = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(CPU.threads)  # TVM's default is half the cores

import light
import numpy as np
import onnxruntime
import pandas as pd
import tvm
from tvm import relax

from lib import tables, zoo
from lib.layout import ModelFiles
from lib.numerics import random_values, relative_error
from lib.schemas import SUBGRAPHS
from lib.source import Source

ROOT = Path(__file__).parent.parent
_TURNS = 7
_TURN_S = 0.7  # of measuring, after as long a warm-up
_REST_S = 0.7  # in which the threads of the side that ran before go to sleep


def tune(model: str) -> dict[str, Any]:
    """Run the user's command; what it took and what came of it."""
    command = [sys.executable, "-m", "luigi", "--module", "pipeline", "TuneModel", "--model", model, "--trials", "1"]
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{' '.join(command)} failed with status {status}")
    files = ModelFiles(ROOT / "artifacts" / CPU.name / Source(model).name)
    [compiled] = [run / "compiled" for run in (files.folder / "runs").iterdir()]
    manifest = json.loads((compiled / "manifest.json").read_text())
    subgraphs = tables.read(files.subgraphs, SUBGRAPHS).to_pandas()
    return {
        "model": Path(model).name,
        "subgraphs": len(subgraphs),
        "calls": int(subgraphs["weight"].sum()),
        "gflop": float((subgraphs["flop"] * subgraphs["weight"]).sum() / 1e9),
        "trials": manifest["n_trials"],
        "wall_s": seconds,
        "largest_process_gb": usage.ru_maxrss / 1e6,
        "untuned_ms": median(manifest["latencies_s"]["untuned"]) * 1e3,
        "tuned_ms": median(manifest["latencies_s"]["tuned"]) * 1e3,
        "error": manifest["max_error"],
        "compiled": str(compiled.relative_to(ROOT)),
    }


def timed(compiled: Path, onnx_file: str) -> dict[str, Any]:
    """Median latency of a library; for an ONNX file also ONNX Runtime's, in turn, and how far the outputs are apart."""
    manifest = json.loads((compiled / "manifest.json").read_text())
    arrays = [
        random_values(tuple(value["shape"]), value["dtype"], value["bound"], seed=n)
        for n, value in enumerate(manifest["model_inputs"])
    ]
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(compiled / manifest["library"])), tvm.cpu())
    params = np.load(compiled / manifest["params"]).values()
    arguments = [tvm.runtime.tensor(array) for array in (*arrays, *params)]
    sides: dict[str, Callable[[], Any]] = {"ours": lambda: machine["main"](*arguments)}
    row: dict[str, Any] = {}
    if onnx_file:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = CPU.threads
        session = onnxruntime.InferenceSession(onnx_file, options)
        feed = dict(zip([value.name for value in session.get_inputs()], arrays, strict=True))
        sides["onnx_runtime"] = lambda: session.run(None, feed)
        ours, expected = sides["ours"](), sides["onnx_runtime"]()
        outputs = [ours] if isinstance(ours, tvm.runtime.Tensor) else list(ours)
        row["error_to_onnx_runtime"] = max(relative_error(a.numpy(), b) for a, b in zip(outputs, expected, strict=True))
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(_TURNS):
        for name, infer in sides.items():
            time.sleep(_REST_S)
            found[name].append(_turn(infer))
    for name, values in found.items():
        for kind, of in (("", median), ("low_", min), ("high_", max)):
            row[f"{name}_{kind}ms"] = of(values) * 1e3
    return row


def _turn(infer: Any) -> float:
    """Median latency in seconds, after a warm-up."""
    for seconds in (_TURN_S, _TURN_S):
        latencies: list[float] = []
        end = time.perf_counter() + seconds
        while not latencies or time.perf_counter() < end:
            started = time.perf_counter()
            infer()
            latencies.append(time.perf_counter() - started)
    return median(latencies)


def table(rows: pd.DataFrame) -> str:
    """The rows as markdown."""
    lines = [
        "| model | subgraphs (calls) | GFLOP | trials | wall, s | largest process, GB | untuned, ms "
        "| warm-up round, ms | ONNX Runtime, ms | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows.to_dict("records"):
        beside = not np.isnan(row.get("onnx_runtime_ms", np.nan))
        ours = f"{row['tuned_ms'] if np.isnan(row.get('ours_ms', np.nan)) else row['ours_ms']:.3g}"
        theirs = f"{row['onnx_runtime_ms']:.3g}" if beside else "-"
        error = row["error_to_onnx_runtime"] if beside else row["error"]
        lines.append(
            f"| {row['model']} | {row['subgraphs']} ({row['calls']}) | {row['gflop']:.3g} | {row['trials']} "
            f"| {row['wall_s']:.0f} | {row['largest_process_gb']:.2f} | {row['untuned_ms']:,.4g} | {ours} | {theirs} "
            f"| {error:.0e} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Add what is missing to the table, then print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", help="names of the zoo or files; default: all of the zoo, all light ones"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models.parquet")
    parser.add_argument("--tune-only", action="store_true", help="leave the timing for a quiet hour")
    options = parser.parse_args()
    distinct = [name for name in zoo.ZOO if name != "resnet50_v1"]  # another name of resnet50
    models = options.models or [*distinct, *map(str, light.save_all(ROOT / "artifacts" / "light"))]
    rows: list[Any] = pd.read_parquet(options.out).to_dict("records") if options.out.exists() else []

    def keep(row: dict[str, Any]) -> None:
        pd.DataFrame(rows).to_parquet(options.out)
        print(json.dumps(row), flush=True)

    for model in models:
        if all(row["model"] != Path(model).name for row in rows):
            rows.append(tune(model))
            keep(rows[-1])
    if options.tune_only:
        return
    for model in models:
        [n] = [n for n, row in enumerate(rows) if row["model"] == Path(model).name]
        if np.isnan(rows[n].get("ours_ms", np.nan)):
            rows[n] |= timed(ROOT / rows[n]["compiled"], model if model.endswith(".onnx") else "")
            keep(rows[n])
    print(table(pd.DataFrame(rows)))


if __name__ == "__main__":
    main()
