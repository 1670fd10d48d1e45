"""A thousand candidates over RPC, a tenth of them faulty, a server killed every hundred: is anything lost or left?

    python benchmarks/soak.py [--candidates 1000]

Two RPC servers on loopback measure small kernels, first the healthy candidates alone, then all of them with the
faults. The rows of both stand in `soak.parquet`, what is left behind and how the latencies compare is printed.
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp()  # so that what is left there is ours

import pandas as pd
import psutil

from lib.machine import targets
from lib.measure.device_pool import DevicePool
from lib.measure.fleet import RpcFleet
from lib.measure.runner import Job, MeasureConfig
from lib.search import evolution
from tests.farm import KEY, Farm, kill
from tests.helpers import DOES_NOT_COMPILE, LOOPS_FOR_EVER, NEEDS_TOO_MUCH, SEGFAULTS, job, matmul

CONFIG = MeasureConfig(run_timeout_s=2)
TARGET = targets.cpu_target(threads=1)
FAULTS = {
    "crash": SEGFAULTS,
    "timeout": LOOPS_FOR_EVER,
    "build_error": DOES_NOT_COMPILE,
    "run_error": NEEDS_TOO_MUCH,
}
_KILL_EVERY, _FAULT_EVERY = 100, 10


def healthy(n: int) -> list[Job]:
    """Candidates of two workloads, each program several times under other names."""
    programs = [
        (workload, proposal.trace)
        for workload in (matmul(64, 256, 256), matmul(32, 512, 512))
        for proposal in evolution.sample(workload, TARGET.tvm(), 16, known=set(), seed=0)
    ]
    return [
        job(f"healthy {k}", workload, trace) for k, (workload, trace) in zip(range(n), itertools.cycle(programs))
    ]  # fmt: skip


def with_faults(jobs: list[Job]) -> list[Job]:
    """A faulty candidate after every nine, one kind after the other."""
    kinds = itertools.cycle(FAULTS.items())
    mixed: list[Job] = []
    for n, each in enumerate(jobs, start=1):
        mixed.append(each)
        if n % (_FAULT_EVERY - 1) == 0:
            status, workload = next(kinds)
            mixed.append(job(f"{status} {n}", workload))
    return mixed


def measure(farm: Farm, pool: DevicePool, jobs: list[Job], *, kills: bool) -> pd.DataFrame:
    """All rows, with this process's memory after each."""
    rows = []
    started = time.perf_counter()
    for n, measurement in enumerate(pool.run(jobs), start=1):
        rows.append({**asdict(measurement), "rss_mb": psutil.Process().memory_info().rss / 1e6})
        if kills and n % _KILL_EVERY == 0:
            victim = farm.servers[(n // _KILL_EVERY) % len(farm.servers)]
            farm.servers.remove(victim)
            kill(victim)
            farm.start_server()
    print(
        f"{len(rows)} rows in {time.perf_counter() - started:.0f} s: {dict(Counter(r['status'] for r in rows))}",
        flush=True,
    )
    return pd.DataFrame(rows)


def resources() -> dict[str, int]:
    """What a leak would show in: of this process and of those it started."""
    me = psutil.Process()
    return {
        "processes": len(me.children(recursive=True)),
        "open files and sockets": me.num_fds(),
        "temporary files": sum(1 for _ in Path(tempfile.gettempdir()).rglob("*")),
    }


def main() -> None:
    """Run both, compare, and say what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=1000)
    n = parser.parse_args().candidates
    jobs = healthy(n * (_FAULT_EVERY - 1) // _FAULT_EVERY)
    farm = Farm(servers=2)
    before = resources()
    pool = DevicePool(TARGET, CONFIG, RpcFleet(farm.tracker, KEY, TARGET))
    calm = measure(farm, pool, jobs, kills=False)
    rough = measure(farm, pool, with_faults(jobs), kills=True)
    pool.close()
    after = resources()
    farm.close()
    pd.concat([calm.assign(faults=False), rough.assign(faults=True)]).drop(columns="error").to_parquet(
        Path(__file__).parent / "soak.parquet"
    )
    wanted = Counter(each.candidate_id.split()[0].replace("healthy", "ok") for each in with_faults(jobs))
    found = Counter(rough["status"])
    print(f"statuses: expected {dict(wanted)}, found {dict(found)}: {'equal' if wanted == found else 'DIFFERENT'}")
    for name in before:
        print(f"{name}: {before[name]} before, {after[name]} after")
    for name, rows in (("healthy alone", calm), ("with faults", rough)):
        early, late = rows["rss_mb"].iloc[len(rows) // 10], rows["rss_mb"].iloc[-1]
        print(f"memory of the tuner, {name}: {early:.0f} MB after a tenth, {late:.0f} at the end")
    calm_s, rough_s = (
        rows[rows["status"] == "ok"].set_index("candidate_id")["latencies"].map(median) for rows in (calm, rough)
    )
    ratios = (rough_s / calm_s).dropna()
    low, middle, high = ratios.quantile([0.05, 0.5, 0.95])
    print(
        f"latencies with faults to alone: median {middle:.3f}, 5 % {low:.3f}, 95 % {high:.3f}; {len(ratios)} programs"
    )


if __name__ == "__main__":
    main()
