"""Register tiles with remainders against those that divide an output: contractions of one model.

    python benchmarks/remainder.py --model FILE --programs 12 --out benchmarks/remainder/NAME.parquet

For each contraction whose register tiles differ, random programs of the space with remainders and of the one without
(MetaSchedule's, where that leaves no tiles at all), timed alternately with weights that come from memory. Prints the
fastest of each. Nothing else may run on the machine.
"""

import os

from lib.graph.subgraphs import Subgraph
from lib.machine import targets
from lib.measure.protocol import Build, Define, Time
from lib.measure.worker import Kernels
from lib.search import evolution
from lib.search.spaces import contraction
from lib.tir.workload import load_module

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)

import contractions
import pandas as pd
import tvm

_WITH, _WITHOUT = "with remainders", "without"
_TURNS, _REPEAT_S = 3, 0.02
_SPACES = {_WITH: contraction.space(), _WITHOUT: contraction.space(remainders=False)}


def sampled(workload: tvm.IRModule, number: int) -> dict[str, list[str]]:
    """Traces of random programs, with and without remainders; empty if the two spaces are the same."""
    target, found = TARGET.tvm(), {}
    for way, space in _SPACES.items():
        proposals = evolution.sample(workload, target, number, known=set(), seed=0, spaces=[space])
        found[way] = [proposal.trace for proposal in proposals]
    return {} if sorted(found[_WITH]) == sorted(found[_WITHOUT]) else found


def programs(subgraph: Subgraph, number: int) -> pd.DataFrame:
    """A row for each program and turn: its latency in microseconds."""
    kernels, rows = Kernels(TARGET.tvm()), []
    kernels.define(Define(subgraph.workload))
    found = sampled(load_module(subgraph.workload), number)
    names = [(way, n) for way, traces in found.items() for n in range(len(traces))]
    for way, n in names:
        kernels.build(Build(f"{way} {n}", found[way][n]))
    for turn in range(_TURNS):
        for way, n in names:
            reply = kernels.time(Time(f"{way} {n}", 1, _REPEAT_S, cold_weights=True))
            row = {"name": subgraph.name, "weight": subgraph.weight, "flop": subgraph.flop, "way": way}
            rows.append({**row, "program": n, "turn": turn, "us": reply.latencies[0] * 1e6})
    return pd.DataFrame(rows)


def main() -> None:
    report(contractions.compare(__doc__, TARGET, lambda workload: contraction.fits(workload, TARGET.tvm()), programs))


def report(table: pd.DataFrame) -> None:
    """Print the fastest program of each subgraph in each way, and its GFLOP/s."""
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
