"""The tuner's rounds without Luigi and without compiling: plan, search, measure, train, through files."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import pyarrow as pa

from lib.contracts import tables
from lib.contracts.files import RunFiles
from lib.contracts.schemas import FAMILIES, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.graph.subgraphs import Subgraph
from lib.machine.targets import AnyTarget
from lib.measure import factory
from lib.measure.devices import Local
from lib.measure.runner import MeasureConfig, Runner
from lib.search.evolution import SearchConfig
from lib.tuning.base import NONE, BaseModels, bases_of
from lib.tuning.cost_model import TrainConfig
from lib.tuning.planning import PlanConfig
from stages import cluster, generate, measure, recall, train

DEFAULT_SEARCH = SearchConfig()


def tune(
    subgraphs: Sequence[Subgraph],
    target: AnyTarget,
    run: RunFiles,
    ended: Callable[[int, float], bool],
    *,
    families: str = "core-operator",
    plan: PlanConfig,
    timing: MeasureConfig,
    search: SearchConfig = DEFAULT_SEARCH,
    seed: int = 0,
    bases: BaseModels = NONE,
) -> int:
    """Tune subgraphs until `ended(rounds, seconds)` says so, or nothing is left to improve; how many rounds that took.

    The seconds are of the rounds alone.

    Args:
        bases: What cost models begin with, as the tuner has it; the benchmarks of what is learned have none.
    """
    provenance, number, spent = Provenance(), 0, 0.0
    table, clusters = run.folder / "subgraphs.parquet", run.folder / "families.parquet"
    tables.write(pa.Table.from_pylist([asdict(s) for s in subgraphs], schema=SUBGRAPHS), table, SUBGRAPHS, provenance)
    cluster.run(table, families, provenance=provenance, out=clusters)
    base_of = bases_of(tables.read(table, SUBGRAPHS), tables.read(clusters, FAMILIES), bases)
    learning, begun = TrainConfig(), run.recalled
    recall.run(table, clusters, families, None, learning.max_samples, provenance=provenance, out=begun)
    train.run(clusters, [begun], learning, seed=seed, provenance=provenance, out=begun, base_of=base_of)
    runner: Runner = factory.open_runner(Local(), target, timing)
    try:
        while not ended(number, spent):
            started = time.monotonic()
            past, files = run.past(number), run.round(number)
            try:
                generate.run(
                    table,
                    clusters,
                    past,
                    target,
                    plan,
                    search,
                    seed=seed,
                    provenance=provenance,
                    out=files,
                    bases=bases,
                )
            except generate.NothingToImprove:
                break
            measure.run(table, runner, provenance=provenance, out=files)
            train.run(clusters, [*past, files], learning, seed=seed, provenance=provenance, out=files, base_of=base_of)
            number, spent = number + 1, spent + time.monotonic() - started
    finally:
        runner.close()
    return number
