"""Trials per second with one device and with two: RPC servers on loopback, each pinned to a core, one-thread kernels.

    python benchmarks/devices.py [--candidates 64] [--turns 3]

One and two servers have their turns one after the other, with equal candidates. Compilers run on the same two cores,
so compiling and measuring take turns; with devices elsewhere they overlap.
"""

import argparse
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import pandas as pd

from lib.machine import targets
from lib.measure.device_pool import DevicePool
from lib.measure.fleet import RpcFleet
from lib.measure.runner import Job, MeasureConfig
from lib.search import evolution
from tests.farm import KEY, Farm
from tests.helpers import job, matmul

TARGET = targets.cpu_target(threads=1)


def candidates(n: int) -> list[Job]:
    """Distinct programs of a product as BERT has them."""
    workload = matmul(128, 768, 768)
    found = evolution.sample(workload, TARGET.tvm(), n, known=set(), seed=0)
    return [job(f"candidate {k}", workload, proposal.trace) for k, proposal in enumerate(found)]


def turn(cores: list[str], jobs: list[Job], config: MeasureConfig) -> dict[str, float]:
    """Measure all candidates on one server for each of the cores; processes are started before."""
    farm = Farm(cores=cores)
    pool = DevicePool(TARGET, config, RpcFleet(farm.tracker, KEY, TARGET))
    list(pool.run(jobs[: 2 * len(cores)]))
    started = time.perf_counter()
    rows = pd.DataFrame([asdict(measurement) for measurement in pool.run(jobs)])
    seconds = time.perf_counter() - started
    clock = pool.clock
    pool.close()
    farm.close()
    assert set(rows["status"]) == {"ok"}, rows["error"].dropna().tolist()
    return {
        "devices": len(cores),
        "trials_per_s": len(rows) / seconds,
        "seconds": seconds,
        "building_s": clock["build"],
        "measuring_s": clock["run"],
        "device_busy": float(rows["run_s"].sum()) / (clock["run"] * len(cores)),
        "rest_s": seconds - clock["build"] - clock["run"],
    }


def main() -> None:
    """Alternate one and two devices, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--min-repeat-s", type=float, default=0.1, help="of a repeat; three are measured of each candidate"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "devices.parquet")
    options = parser.parse_args()
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    jobs = candidates(options.candidates)
    config = MeasureConfig(min_repeat_s=options.min_repeat_s, slow_factor=1e9)
    rows = []
    for n in range(options.turns):
        for used in (cores[:1], cores):
            rows.append({"turn": n, **turn(used, jobs, config)})
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    table.to_parquet(options.out)
    print(table.groupby("devices").median().drop(columns="turn").round(3).to_string())
    rate = table.pivot_table(index="turn", columns="devices", values="trials_per_s")
    print("two devices to one, by turn:", ", ".join(f"{ratio:.2f}x" for ratio in rate[2] / rate[1]))


if __name__ == "__main__":
    main()
