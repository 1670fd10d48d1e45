"""What prefetching weights and keeping accumulators on the stack bring: one model's contractions, program by program.

    python benchmarks/prefetch.py --model resnet50 --programs 12 --out benchmarks/prefetch/resnet50.parquet

Random programs of each contraction, the same ones lowered in three ways, which take turns; each is timed with weights
that come from memory, and with weights that lie in the caches. Prints the fastest of each way, what the model's
contractions take together, and what choosing by warm weights would cost. Nothing else may run on the machine.
"""

import os

from lib.graph.subgraphs import Subgraph
from lib.machine import targets
from lib.measure.protocol import Build, Define, Time
from lib.measure.worker import Kernels
from lib.search import evolution
from lib.search.spaces.table import fitting
from lib.tir.lowering import Lowering, standard
from lib.tir.workload import load_module

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)

import contractions
import pandas as pd
import tvm

_WAYS = {
    "as TVM lowers": Lowering(prefetch=False, peel=False, stack=False),
    "accumulators on the stack": Lowering(prefetch=False, peel=True, stack=True),
    "and weights prefetched": standard("llvm"),
}
_TURNS, _REPEAT_S = 3, 0.02


def programs(subgraph: Subgraph, number: int) -> pd.DataFrame:
    """A row for each program, way and turn: its latency with cold and with warm weights, in microseconds."""
    kernels = {way: Kernels(TARGET.tvm(), lowering) for way, lowering in _WAYS.items()}
    for each in kernels.values():
        each.define(Define(subgraph.workload))
    rows = []
    found = evolution.sample(load_module(subgraph.workload), TARGET.tvm(), number, known=set(), seed=0)
    for program, proposal in enumerate(found):
        for way in _WAYS:
            kernels[way].build(Build(way, proposal.trace))
        for turn in range(_TURNS):
            for way in _WAYS:
                row = {"subgraph_id": subgraph.subgraph_id, "name": subgraph.name, "weight": subgraph.weight}
                for weights in ("cold", "warm"):
                    reply = kernels[way].time(Time(way, 1, _REPEAT_S, cold_weights=weights == "cold"))
                    row[f"{weights}_us"] = reply.latencies[0] * 1e6
                rows.append({**row, "program": program, "way": way, "turn": turn})
    return pd.DataFrame(rows)


def main() -> None:
    report(contractions.compare(__doc__, TARGET, _is_contraction, programs))


def _is_contraction(workload: tvm.IRModule) -> bool:
    space = fitting(workload, TARGET.tvm())
    return space is not None and space.name in ("contraction", "winograd", "winograd_1d")


def report(table: pd.DataFrame) -> None:
    """Print the fastest program of each subgraph in each way, with cold and with warm weights."""
    medians = table.groupby(["name", "weight", "way", "program"])[["cold_us", "warm_us"]].median()
    best = medians.groupby(["name", "weight", "way"]).min().unstack("way")
    columns = [(weights, way) for weights in ("cold_us", "warm_us") for way in _WAYS]
    print("| subgraph | calls | " + " | ".join(f"{way}, {weights[:4]}, us" for weights, way in columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    for (name, weight), (_, row) in zip(best.index.to_list(), best.iterrows(), strict=True):
        print(f"| {name} | {weight} | " + " | ".join(f"{row[column]:.0f}" for column in columns) + " |")
    calls = best.index.get_level_values("weight").to_numpy()
    sums = [(best[column] * calls).sum() / 1e3 for column in columns]
    print("| all, ms | | " + " | ".join(f"{found:.2f}" for found in sums) + " |")
    prefetched = medians.xs("and weights prefetched", level="way")
    chosen = prefetched.loc[prefetched.groupby(["name", "weight"])["warm_us"].idxmin()]
    calls = chosen.index.get_level_values("weight").to_numpy()
    print(f"Chosen by warm weights, they take {(chosen['cold_us'] * calls).sum() / 1e3:.2f} ms with cold ones.")


if __name__ == "__main__":
    main()
