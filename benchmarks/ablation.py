"""Each idea of the tuner with and without: how far the same time gets, on the heaviest subgraphs of a model.

    python benchmarks/ablation.py --model resnet50 --heaviest 10 --seconds 60 --seeds 0 1 --out FILE.parquet

A variant is the tuner as it is with one thing changed; all get the same subgraphs (those that Winograd's convolutions
or padded channels change among them), the same target, and as many seconds of rounds. MetaSchedule's spaces, which are
larger, get `--seconds-metaschedule`, and variants of their own. Leaves each measurement in the Parquet file and prints
a table. Nothing else may run on the machine.
"""

import argparse
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.contracts.files import RunFiles
from lib.graph.fusion import Model
from lib.graph.subgraphs import Subgraph
from lib.machine import targets
from lib.measure.runner import MeasureConfig
from lib.models.source import Source
from lib.search.evolution import SearchConfig
from lib.tuning.planning import PlanConfig

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)

import curves
import pandas as pd
import rounds

from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from stages import extract

_AS_IT_IS = AlgorithmConfig()
_DIRECT = AlgorithmConfig(winograd="never", strassen="never", widen="never")


@dataclass(frozen=True)
class Variant:
    """The tuner with one thing changed."""

    name: str
    spaces: str = "own"  # see `SearchConfig`
    extract: AlgorithmConfig = _AS_IT_IS
    families: str = "core-operator"
    plan: Mapping[str, Any] = field(default_factory=dict)
    measure: Mapping[str, Any] = field(default_factory=dict)


VARIANTS = [
    Variant("as it is"),
    Variant("without Winograd's convolutions", extract=AlgorithmConfig(winograd="never")),
    Variant("without Strassen's products", extract=AlgorithmConfig(strassen="never")),
    Variant("without wider channels", extract=AlgorithmConfig(widen="never")),
    Variant("one cost model for all", families="single"),
    Variant("a cost model for each subgraph", families="each"),
    Variant("without foresee rounds", plan={"strategy": "gradient"}),
    Variant("in turn", plan={"strategy": "round-robin"}),
    Variant("slow candidates timed in full", measure={"slow_factor": 1e6}),
    Variant("MetaSchedule's spaces", spaces="metaschedule", extract=_DIRECT),
    Variant("MetaSchedule's spaces, one cost model for all", spaces="metaschedule", extract=_DIRECT, families="single"),
    Variant("MetaSchedule's spaces, one for each subgraph", spaces="metaschedule", extract=_DIRECT, families="each"),
    Variant("MetaSchedule's spaces, no foresee", spaces="metaschedule", extract=_DIRECT, plan={"strategy": "gradient"}),
]


def tune(variant: Variant, subgraphs: list[Subgraph], seconds: float, seed: int) -> pd.DataFrame:
    """Every measurement of so many seconds of rounds, as `curves.of_run` has them."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunFiles(Path(folder))
        rounds.tune(
            subgraphs, TARGET, run, lambda _, spent: spent >= seconds, families=variant.families,
            plan=PlanConfig(**variant.plan), timing=MeasureConfig(**variant.measure),
            search=SearchConfig(spaces=variant.spaces), seed=seed,
        )  # fmt: skip
        return curves.of_run(run.folder)


def heaviest(model: Model, variant: Variant, chosen: int) -> list[Subgraph]:
    """The tunable subgraphs with most FLOP, as the model has them; then what stands for them in a variant.

    Winograd's convolutions and Strassen's products have less FLOP, so that the heaviest of a variant may be others.
    """
    _, subgraphs = extract.partition(choose_algorithms(model, TARGET, variant.extract), TARGET)
    _, direct = extract.partition(model, TARGET)
    rest = {s.subgraph_id for s in [s for s in direct if s.tunable][chosen or len(direct) :]}
    return [s for s in subgraphs if s.tunable and s.subgraph_id not in rest]


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """For each variant and seed: the estimate in the end, when it was within 5 % of the best variant's, trials."""
    found = []
    for (variant, seed), measured in rows.groupby(["variant", "seed"], sort=False):
        weights: dict[str, int] = dict(measured[["subgraph_id", "weight"]].drop_duplicates().itertuples(index=False))
        found.append((variant, seed, curves.curve(measured, weights)))
    goal = curves.NEAR * min(curve["latency_s"].min() for *_, curve in found)
    table = []
    for variant, seed, curve in found:
        seconds, trials = curves.reached(curve, goal)
        table.append(
            {
                "variant": variant, "seed": seed, "first round, ms": curve["latency_s"].iloc[0] * 1e3,
                "end, ms": curve["latency_s"].min() * 1e3, "trials": int(curve["trials"].max()),
                "within 5 % of the best, s": seconds, "its trials": trials,
            }
        )  # fmt: skip
    return pd.DataFrame(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--heaviest", type=int, default=10, help="0: all")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seconds-metaschedule", type=float, default=180)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--variants", nargs="+", choices=[v.name for v in VARIANTS], default=[v.name for v in VARIANTS])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    logging.getLogger("tvm").setLevel(logging.ERROR)
    model = extract.load(Source(options.model))
    parts: list[pd.DataFrame] = []
    for seed in options.seeds:
        for variant in (v for v in VARIANTS if v.name in options.variants):
            subgraphs = heaviest(model, variant, options.heaviest)
            seconds = options.seconds if variant.spaces == "own" else options.seconds_metaschedule
            measured = tune(variant, subgraphs, seconds, seed)
            weights = {s.subgraph_id: s.weight for s in subgraphs}
            measured["weight"] = measured["subgraph_id"].map(weights)
            parts.append(measured.assign(model=options.model, variant=variant.name, seed=seed))
            pd.concat(parts).to_parquet(options.out, index=False)
            print(summary(parts[-1]).to_string(header=len(parts) == 1, index=False), flush=True)
    print(summary(pd.concat(parts)).round(2).to_string(index=False))


if __name__ == "__main__":
    main()
