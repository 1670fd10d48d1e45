"""Trials per second of this pipeline and of MetaSchedule's own tuning loop, in turn, on the same subgraphs.

    python benchmarks/trials_per_second.py [--trials 192] [--turns 2] [--out FILE]

Both sides get the same workload, target, threads and number of trials, 64 a round. Stock is
`meta_schedule.tune_tasks` as TVM ships it: its builder, runner, XGBoost model and scheduler. Ours is what
`TuneModel` runs for a model that consists of that subgraph alone: plan, search, measure, train, through files.
Nothing else may run on the machine meanwhile.
"""

import argparse
import logging
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from lib.contracts.files import RunFiles
from lib.graph import fusion
from lib.graph.subgraphs import Subgraph, extract_subgraphs
from lib.machine import host, targets
from lib.measure.runner import MeasureConfig
from lib.models.zoo import catalogue
from lib.tir.workload import load_module
from lib.tuning import history
from lib.tuning.planning import PlanConfig

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)  # for stock's workers, too

import pandas as pd
import rounds
from tvm.s_tir import meta_schedule as ms


def subgraphs() -> list[tuple[str, Subgraph]]:
    """A 3x3 convolution of ResNet-50 (14x14, 256 channels) and the first MLP product of BERT-Base with its GELU."""
    resnet = extract_subgraphs(fusion.fuse(catalogue.define("resnet50")[0], TARGET.tvm()))
    convolution = next(s for s in resnet if s.core_operator == "conv2d" and s.weight == 6)
    encoder, _ = catalogue.define("bert_base")
    bert = extract_subgraphs(fusion.fuse(encoder, TARGET.tvm()))
    product = next(s for s in bert if s.core_operator == "matmul" and s.name.rstrip("0123456789").endswith("gelu"))
    return [("ResNet-50 conv 3x3", convolution), ("BERT-Base matmul + GELU", product)]


def stock(subgraph: Subgraph, trials: int, folder: Path) -> tuple[int, float]:
    """Trials done and best latency in seconds."""
    module = load_module(subgraph.workload)
    task = ms.TuneContext(
        mod=module,
        target=TARGET.tvm(),
        space_generator="post-order-apply",
        search_strategy="evolutionary",
        task_name="main",
        rand_state=0,
        num_threads="physical",
    )
    database = ms.tune.tune_tasks(
        tasks=[task],
        task_weights=[1.0],
        work_dir=str(folder),
        max_trials_global=trials,
        num_trials_per_iter=64,
    )
    records = database.get_all_tuning_records()
    latencies = [median(float(s) for s in record.run_secs) for record in records if record.run_secs]
    return len(records), min(latencies)


def ours(subgraph: Subgraph, trials: int, folder: Path) -> tuple[int, float]:
    """Trials done and best latency in seconds."""
    run = RunFiles(folder)
    n_rounds = rounds.tune(
        [subgraph], TARGET, run, lambda number, _: history.load(run.rounds(number)).n_trials >= trials,
        plan=PlanConfig(num_trials_warmup=64), timing=MeasureConfig(),
    )  # fmt: skip
    done = history.load(run.rounds(n_rounds))
    return done.n_trials, done.of(subgraph.subgraph_id).best_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=192)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, help="keep the rows as Parquet")
    options = parser.parse_args()
    logging.getLogger("tvm").setLevel(logging.ERROR)
    rows = []
    for turn in range(options.turns):
        for name, subgraph in subgraphs():
            for side, tune in (("stock", stock), ("ours", ours)):
                with tempfile.TemporaryDirectory() as folder:
                    start = time.monotonic()
                    n, best_s = tune(subgraph, options.trials, Path(folder))
                    seconds = time.monotonic() - start
                row = {"turn": turn, "subgraph": name, "side": side, "trials": n, "seconds": seconds}
                rows.append({**row, "trials_per_s": n / seconds, "best_us": best_s * 1e6})
                print(rows[-1], flush=True)
    frame = pd.DataFrame(rows)
    if options.out:
        frame.to_parquet(options.out)
    rates = frame.groupby(["subgraph", "side"])["trials_per_s"].median().unstack()
    rates["ratio"] = rates["ours"] / rates["stock"]
    print(f"\n{TARGET.name}, {host.cpu_name()}; medians of {options.turns} turns, trials per second\n{rates.round(2)}")


if __name__ == "__main__":
    main()
