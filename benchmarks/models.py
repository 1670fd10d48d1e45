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
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from lib.contracts import tables
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import SUBGRAPHS
from lib.machine import targets
from lib.models.source import Source
from lib.models.zoo import catalogue
from lib.tir.numerics import relative_error

CPU = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(CPU.threads)  # TVM's default is half the cores

import light
import numpy as np
import pandas as pd
import sides

ROOT = Path(__file__).parent.parent
_TURNS = 7


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
    row: dict[str, Any] = {}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        np.savez(work / "inputs.npz", *sides.inputs(compiled))
        models = {"ours": ("library", compiled)} | (
            {"onnx_runtime": ("onnxruntime", Path(onnx_file))} if onnx_file else {}
        )
        found = {
            name: stack.enter_context(sides.Side(kind, path, work / "inputs.npz", work / f"{name}.npz", CPU.threads))
            for name, (kind, path) in models.items()
        }
        outputs = [side.load() for side in found.values()]
        if onnx_file:
            row["error_to_onnx_runtime"] = max(relative_error(a, b) for a, b in zip(*outputs, strict=True))
        turns = list(sides.in_turn(found, _TURNS))
    if failures := [f"{turn.side}: {turn.failure}" for turn in turns if turn.failure]:
        raise SystemExit("; ".join(failures))
    for name in found:
        values = [turn.latency_s for turn in turns if turn.side == name]
        for kind, of in (("", median), ("low_", min), ("high_", max)):
            row[f"{name}_{kind}ms"] = of(values) * 1e3
    return row


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
    distinct = [name for name in catalogue.ZOO if name != "resnet50_v1"]  # another name of resnet50
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
