"""What it brings to ask for weights ahead, and to keep sums on the stack: one model's contractions, program by program.

    python benchmarks/prefetch.py --model resnet50 --programs 12 --out benchmarks/prefetch/resnet50.parquet

Random programs of each contraction, the same ones lowered in three ways, which take turns; each is timed with weights
that come from memory, and with weights that lie in the caches. Prints the fastest of each way, what the model's
contractions take together, and what choosing by warm weights would cost. Nothing else may run on the machine.
"""

import contextlib
import os
from collections.abc import Iterator
from unittest.mock import patch

from lib import targets

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)

import contractions
import pandas as pd
import tvm

from lib import backends, prefetch, search, workloads
from lib.spaces import contraction, winograd
from lib.worker import Kernels
from lib.workloads import Subgraph

_WAYS = ("as TVM lowers", "sums on the stack", "and weights ahead")
_TURNS, _REPEAT_S = 3, 0.02


@contextlib.contextmanager
def lowered(way: str) -> Iterator[None]:
    """Compile in one of the ways."""
    with contextlib.ExitStack() as changed:
        if way == _WAYS[0]:
            changed.enter_context(patch.object(backends, "pipeline", lambda _target: "default"))
        if way == _WAYS[1]:
            changed.enter_context(patch.object(prefetch, "insert", lambda function: function))
        yield


def programs(subgraph: Subgraph, number: int) -> pd.DataFrame:
    """A row for each program, way and turn: its latency with cold and with warm weights, in microseconds."""
    kernels, rows = Kernels(TARGET.tvm()), []
    kernels.define("workload", subgraph.workload)
    found = search.sample(workloads.load(subgraph.workload), TARGET.tvm(), number, known=set(), seed=0)
    for program, proposal in enumerate(found):
        for way in _WAYS:
            with lowered(way):
                kernels.build(way, "workload", proposal.trace)
        for turn in range(_TURNS):
            for way in _WAYS:
                row = {"subgraph_id": subgraph.subgraph_id, "name": subgraph.name, "weight": subgraph.weight}
                for weights in ("cold", "warm"):
                    reply = kernels.time(way, 1, _REPEAT_S, float("inf"), cold_weights=weights == "cold")
                    row[f"{weights}_us"] = reply["latencies"][0] * 1e6
                rows.append({**row, "program": program, "way": way, "turn": turn})
    return pd.DataFrame(rows)


def main() -> None:
    report(contractions.compare(__doc__, TARGET, _is_contraction, programs))


def _is_contraction(workload: tvm.IRModule) -> bool:
    return contraction.fits(workload, TARGET.tvm()) or winograd.fits(workload)


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
    asking = medians.xs(_WAYS[2], level="way")
    chosen = asking.loc[asking.groupby(["name", "weight"])["warm_us"].idxmin()]
    calls = chosen.index.get_level_values("weight").to_numpy()
    print(f"Chosen by warm weights, they take {(chosen['cold_us'] * calls).sum() / 1e3:.2f} ms with cold ones.")


if __name__ == "__main__":
    main()
