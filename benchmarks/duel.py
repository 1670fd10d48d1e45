"""The fastest programs of a run and of stock MetaSchedule on the same subgraphs, timed in turn.

    python benchmarks/duel.py --ours RUN --stock FOLDER --out FILE.parquet

A tuning run's latencies are from one time of day each, and a shared machine is not equally fast all day. Here both
sides' best programs of a subgraph run in turn, in one process, with equal inputs and packed weights that come from
memory. `curves.py --duel FILE` scales the curves of both sides to that. Nothing else may run on the machine.
"""

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib import targets

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)

import pandas as pd

from lib import history, schemas, tables, worker
from lib.layout import RunFiles

_REPEAT_S = 0.03


def duel(subgraph: Mapping[str, Any], traces: Mapping[str, str], turns: int) -> list[dict[str, Any]]:
    """A row for each turn, with the latency of each side in seconds."""
    kernels = worker.Kernels(TARGET.tvm())
    kernels.define("workload", subgraph["workload"])
    for name, trace in traces.items():
        kernels.build(name, "workload", trace)
    known = {key: subgraph[key] for key in ("subgraph_id", "name", "weight")}
    rows = []
    for turn in range(turns):
        replies = {name: kernels.time(name, 1, _REPEAT_S, float("inf"), cold_weights=True) for name in traces}
        rows.append({**known, "turn": turn, **{name: reply["latencies"][0] for name, reply in replies.items()}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--stock", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    stock: dict[str, str] = json.loads((options.stock / "traces.json").read_text())["traces"]
    files = RunFiles(options.ours)
    past = history.load(files.rounds(json.loads(files.compiled.manifest.read_text())["n_rounds"]))
    subgraphs = tables.read(options.ours.parents[1] / "subgraphs.parquet", schemas.SUBGRAPHS).to_pylist()
    rows = []
    for subgraph in subgraphs:
        subgraph_id = subgraph["subgraph_id"]
        if subgraph_id in stock:
            best = past.of(subgraph_id).fastest[0].trace
            rows += duel(subgraph, {"ours": best, "stock": stock[subgraph_id]}, options.turns)
    frame = pd.DataFrame(rows)
    frame.to_parquet(options.out, index=False)
    frame["stock / ours"] = frame["stock"] / frame["ours"]
    shown = frame.groupby("subgraph_id", sort=False).agg(
        {"name": "first", "weight": "first", "ours": "median", "stock": "median", "stock / ours": "median"}
    )
    print(shown.to_string(index=False))
    total = shown[["ours", "stock"]].mul(shown["weight"], axis=0).sum() * 1e3
    print(f"all calls of an inference: ours {total['ours']:.2f} ms, stock {total['stock']:.2f} ms")


if __name__ == "__main__":
    main()
