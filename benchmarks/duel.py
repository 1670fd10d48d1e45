"""The fastest programs of several tunings of the same subgraphs, timed in turn.

    python benchmarks/duel.py --ours RUN --stock FOLDER --out FILE.parquet
    python benchmarks/duel.py --table FILE.parquet

A tuning run's latencies are from one time of day each, and a shared machine is not equally fast all day. Here all
sides' best programs of a subgraph are timed in turn, in one process, in an order that is shuffled each time, with
equal inputs and packed weights that are read from memory. `curves.py --duel FILE` scales the curves of both sides to
that. Nothing else may run on the machine.
"""

import argparse
import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.contracts import schemas, tables
from lib.contracts.files import RunFiles
from lib.machine import targets
from lib.measure.protocol import Build, Check, Define, Time
from lib.measure.worker import Kernels
from lib.tuning import history

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)

import intervals
import pandas as pd
import provenance
from intervals import Estimate

_REPEAT_S = 0.03
_TOLERANCE = 1e-3


class WrongResult(Exception):
    """A program computes something else than its workload."""


def duel(subgraph: Mapping[str, Any], traces: Mapping[str, str], turns: int, seed: int = 0) -> list[dict[str, Any]]:
    """A row for each turn of each side, with its latency in seconds.

    Args:
        subgraph: A row of SUBGRAPHS.
        traces: By side.
        seed: Of the order in each turn.

    Raises:
        WrongResult: A side's program is off by more than 1e-3 of the workload's largest output.
    """
    kernels = Kernels(TARGET.tvm())
    kernels.define(Define(subgraph["workload"]))
    known = {key: subgraph[key] for key in ("subgraph_id", "name", "weight")}
    errors = {trace: kernels.check(Check(trace)).max_error for trace in set(traces.values())}
    for name, trace in traces.items():
        if not errors[trace] <= _TOLERANCE:
            raise WrongResult(f"{subgraph['name']}: the program of {name} is off by {errors[trace]:.1e}")
        kernels.build(Build(name, trace))
    rows, order = [], random.Random(seed)
    for turn in range(turns):
        for name in order.sample(list(traces), len(traces)):
            [latency_s] = kernels.time(Time(name, 1, _REPEAT_S, cold_weights=True)).latencies
            rows.append(
                {**known, "side": name, "turn": turn, "latency_s": latency_s, "max_error": errors[traces[name]]}
            )
    return rows


def totals(rows: pd.DataFrame) -> pd.DataFrame:
    """Seconds of all calls of an inference, for each turn (rows) and side (columns)."""
    calls = rows.assign(total_s=rows["latency_s"] * rows["weight"])
    return calls.pivot_table(index="turn", columns="side", values="total_s", aggfunc="sum")


def ratio(found: pd.DataFrame, other: str, side: str) -> Estimate:
    """How many times as long another side takes."""
    return intervals.estimate(intervals.best_ratio_of([found[other]], found[side]), len(found))


def table(rows: pd.DataFrame) -> str:
    """Markdown: each subgraph, and all calls of an inference."""
    sides = sorted(rows["side"].unique())
    heads = [f"{side}, us" for side in sides] + [f"{side} / ours" for side in sides if side != "ours"]
    lines = [f"| subgraph | calls | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    once = [(name, part["weight"].iloc[0], part.assign(weight=1))
            for (_, name), part in rows.groupby(["subgraph_id", "name"], sort=False)]  # fmt: skip
    for name, calls, part in [*once, ("all calls", "", rows)]:
        found = totals(part)
        cells = [intervals.estimate(intervals.median_of(found[side]), len(found)).text(1e6) for side in sides]
        cells += [ratio(found, side, "ours").text() for side in sides if side != "ours"]
        lines.append(f"| {name} | {calls} | {' | '.join(cells)} |")
    return "\n".join(lines)


def subgraphs_of(run: Path) -> list[dict[str, Any]]:
    """Rows of SUBGRAPHS of the model that a run tunes."""
    found: list[dict[str, Any]] = tables.read(run.parents[1] / "subgraphs.parquet", schemas.SUBGRAPHS).to_pylist()
    return found


def winners(run: Path, subgraph_ids: Sequence[str]) -> dict[str, str]:
    """The fastest traces that a compiled run of ours measured, by subgraph."""
    files = RunFiles(run)
    past = history.load(files.rounds(json.loads(files.compiled.manifest.read_text())["n_rounds"]))
    return {key: past.of(key).fastest[0].trace for key in subgraph_ids if past.of(key).fastest}


def main() -> None:
    """Time and keep, or print what was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of the rows there, and end")
    parser.add_argument("--ours", type=Path)
    parser.add_argument("--stock", type=Path)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(pd.read_parquet(options.table)))
        return
    if not (options.ours and options.stock and options.out):
        parser.error("--ours, --stock and --out are needed, or --table")
    stock: dict[str, str] = json.loads((options.stock / "traces.json").read_text())["traces"]
    ours = winners(options.ours, list(stock))
    rows = [
        row
        for n, subgraph in enumerate(subgraphs_of(options.ours))
        if subgraph["subgraph_id"] in ours
        for row in duel(
            subgraph, {"ours": ours[subgraph["subgraph_id"]], "stock": stock[subgraph["subgraph_id"]]}, options.turns, n
        )
    ]
    frame = pd.DataFrame(rows).assign(**provenance.columns(TARGET.threads))
    frame.to_parquet(options.out, index=False)
    print(table(frame))


if __name__ == "__main__":
    main()
