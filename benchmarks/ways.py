"""Several ways to compute the same: random programs of each, the fastest of which are timed again in turn.

With weights that come from memory, as in a large model. Nothing else may run on the machine.
"""

import os
from collections.abc import Mapping

from lib.machine import targets
from lib.measure.protocol import Build, Define, Time
from lib.measure.worker import Kernels
from lib.search import evolution

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)

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
