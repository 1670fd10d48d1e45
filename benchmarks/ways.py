"""Several ways to compute the same: random programs of each, the fastest of which are timed again in turn.

With weights that come from memory, as in a large model. Nothing else may run on the machine.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lib.machine import targets
from lib.measure.protocol import Build, Define, Time
from lib.measure.worker import Kernels
from lib.search import evolution

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)

import numpy as np
import pandas as pd
import tvm

_AGAIN, _TURNS, _REPEAT_S = 8, 5, 0.02


def fastest(ways: Mapping[str, tvm.IRModule], programs: int) -> pd.DataFrame:
    """A row for each way, program and turn: its latency in microseconds.

    Args:
        ways: Workloads by name.
        programs: Of each, or fewer where its space has no more.
    """
    kernels: dict[str, Kernels] = {}
    left: dict[str, list[int]] = {}
    found: list[dict[str, float | int | str]] = []
    for way, module in ways.items():
        kernels[way] = Kernels(TARGET.tvm())
        kernels[way].define(Define(tvm.ir.save_json(module)))
        proposals = evolution.sample(module, TARGET.tvm(), programs, known=set(), seed=0)
        left[way] = list(range(len(proposals)))
        for program, proposal in enumerate(proposals):
            kernels[way].build(Build(str(program), proposal.trace))
    for turn in range(_TURNS):
        for way, numbers in left.items():
            timed = {n: kernels[way].time(Time(str(n), 1, _REPEAT_S, cold_weights=True)) for n in numbers}
            us = {n: reply.latencies[0] * 1e6 for n, reply in timed.items()}
            if turn == 0:
                left[way] = sorted(us, key=us.__getitem__)[:_AGAIN]
            found += [{"way": way, "turn": turn, "program": n, "us": latency} for n, latency in us.items()]
    return pd.DataFrame(found)


def best(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The fastest program of each way, a column each, by the median of the turns after the first; a row for each value
    of some other columns."""
    again = table[table["turn"] > 0].groupby([*keys, "way", "program"])["us"].median()
    return again.groupby([*keys, "way"]).min().unstack("way").reset_index()


Case = dict[str, str]


def compare(
    document: str, form: str, case_of: Callable[[str], Case],
    modules_of: Callable[[Case, str], Mapping[str, tvm.IRModule]], report: Callable[[pd.DataFrame], None],
) -> None:  # fmt: skip
    """The command line of a script: time the ways of each case, report it, and keep the turns.

    Args:
        document: What the script says of itself; `form`: how a case is written.
        modules_of: Workloads by name, of a case and an element type.
    """
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help=form)
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--kind", default="float32", choices=("float32", "bfloat16", "int16"))
    parser.add_argument("--out", type=Path, required=True, help="keep each turn as Parquet")
    given = parser.parse_args()
    found = []
    for case in map(case_of, given.cases):
        table = fastest(modules_of(case, given.kind), given.programs).assign(**case, kind=given.kind)
        report(table)
        found.append(table)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    pd.concat(found, ignore_index=True).to_parquet(given.out)


def told(us: Mapping[str, float], keys: Sequence[str], plain: str, flop: int) -> str:
    """The fastest program of one way, and how many times as fast the others are.

    Args:
        us: A row of `best`; `keys`: its columns that are no ways.
        flop: Of the plain way.
    """
    before = float(us[plain])
    times = [f"{way} {time:.0f} ({before / time:.2f})" for way, time in us.items()
             if way not in (*keys, plain) and np.isfinite(time)]  # fmt: skip
    return f"as it is {before:.0f} us ({flop / before / 1e3:.0f} GFLOP/s), {', '.join(times)}"
