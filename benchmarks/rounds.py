"""The tuner's rounds without Luigi and without compiling: plan, search, measure, train, through files."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import pyarrow as pa

from lib import tables
from lib.cost_model import TrainConfig
from lib.layout import RunFiles
from lib.planning import PlanConfig
from lib.runner import MeasureConfig, Runner
from lib.schemas import SUBGRAPHS
from lib.search import SearchConfig
from lib.tables import Origin
from lib.targets import CpuTarget
from lib.workers import LocalPool
from lib.workloads import Subgraph
from stages import cluster, generate, measure, train


def tune(
    subgraphs: Sequence[Subgraph],
    target: CpuTarget,
    run: RunFiles,
    ended: Callable[[int, float], bool],
    *,
    families: str = "core-operator",
    plan: PlanConfig,
    timing: MeasureConfig,
    seed: int = 0,
) -> int:
    """Tune subgraphs until `ended(rounds, seconds)` says so, or nothing is left to improve; how many rounds that took.

    The seconds are of the rounds alone.
    """
    origin, number, spent = Origin(), 0, 0.0
    table, clusters = run.folder / "subgraphs.parquet", run.folder / "families.parquet"
    tables.write(pa.Table.from_pylist([asdict(s) for s in subgraphs], schema=SUBGRAPHS), table, SUBGRAPHS, origin)
    cluster.run(table, families, origin=origin, out=clusters)
    runner: Runner = LocalPool(target, timing)
    try:
        while not ended(number, spent):
            started = time.monotonic()
            past, files = run.rounds(number), run.round(number)
            try:
                generate.run(table, clusters, past, target, plan, SearchConfig(), seed=seed, origin=origin, out=files)
            except generate.NothingToImprove:
                break
            measure.run(table, runner, origin=origin, out=files)
            train.run(clusters, [*past, files], TrainConfig(), seed=seed, origin=origin, out=files)
            number, spent = number + 1, spent + time.monotonic() - started
    finally:
        runner.close()
    return number
