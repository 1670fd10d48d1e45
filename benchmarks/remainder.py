"""What tiles that leave a remainder bring where an output has none that divide it well: contractions of one model.

    python benchmarks/remainder.py --model FILE --programs 12 --out benchmarks/remainder/NAME.parquet

For each contraction whose register tiles differ, random programs of the space with remainders and of the one without
(MetaSchedule's, where that leaves no tiles at all), all of them timed in turn with weights that come from memory.
Prints the fastest of each. Nothing else may run on the machine.
"""

import os
from unittest.mock import patch

from lib import targets

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)

import contractions
import pandas as pd
import tvm

from lib import search, workloads
from lib.spaces import contraction, tiling
from lib.worker import Kernels
from lib.workloads import Subgraph

_WITH, _WITHOUT = "with remainders", "without"
_TURNS, _REPEAT_S = 3, 0.02
_tiles = tiling.tiles


def _without(rows: int, columns: int, machine: tiling.Registers, remainders: bool = False) -> list[tiling.Tile]:
    return _tiles(rows, columns, machine)


def sampled(workload: tvm.IRModule, number: int) -> dict[str, list[str]]:
    """Traces of random programs, with and without remainders; none if the two spaces are one."""
    target, found = TARGET.tvm(), {}
    for way, tiles in ((_WITH, _tiles), (_WITHOUT, _without)):
        with patch.object(tiling, "tiles", tiles):
            found[way] = [p.trace for p in search.sample(workload, target, number, known=set(), seed=0)]
    return {} if sorted(found[_WITH]) == sorted(found[_WITHOUT]) else found


def programs(subgraph: Subgraph, number: int) -> pd.DataFrame:
    """A row for each program and turn: its latency in microseconds."""
    kernels, rows = Kernels(TARGET.tvm()), []
    kernels.define("workload", subgraph.workload)
    found = sampled(workloads.load(subgraph.workload), number)
    names = [(way, program) for way, traces in found.items() for program in range(len(traces))]
    for way, program in names:
        kernels.build(f"{way} {program}", "workload", found[way][program])
    for turn in range(_TURNS):
        for way, program in names:
            reply = kernels.time(f"{way} {program}", 1, _REPEAT_S, float("inf"), cold_weights=True)
            row = {"name": subgraph.name, "weight": subgraph.weight, "flop": subgraph.flop, "way": way}
            rows.append({**row, "program": program, "turn": turn, "us": reply["latencies"][0] * 1e6})
    return pd.DataFrame(rows)


def main() -> None:
    report(contractions.compare(__doc__, TARGET, lambda workload: contraction.fits(workload, TARGET.tvm()), programs))


def report(table: pd.DataFrame) -> None:
    """Print the fastest program of each subgraph in each way, and how fast that is."""
    if table.empty:
        print("No contraction has other tiles with remainders.")
        return
    medians = table.groupby(["name", "weight", "flop", "way", "program"])["us"].median()
    best = medians.groupby(["name", "weight", "flop", "way"]).min().unstack("way")
    print(f"| subgraph | calls | {_WITHOUT}, us | GFLOP/s | {_WITH}, us | GFLOP/s |\n|---|---|---|---|---|---|")
    for (name, weight, flop), row in zip(best.index.to_list(), best.to_dict("records"), strict=True):
        cells = [f"{row[way]:,.0f} | {flop / row[way] / 1e3:.0f}" for way in (_WITHOUT, _WITH)]
        print(f"| {name} | {weight} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
