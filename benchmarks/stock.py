"""Stock MetaSchedule on a whole model: our graph and target, TVM's own builder, runner, cost model and scheduler.

    python benchmarks/stock.py --model resnet50 --trials-per-subgraph 128 --trials-per-round 64 --seed 0 --out FOLDER

Leaves `curve.parquet` (each measurement with its time), `traces.json`, `model.so`, `weights.safetensors` and
`manifest.json` in the folder, as `TuneModel` leaves them in `compiled/`, so that both can be timed in turn. The graph
is the one that `TuneModel` gets, but for Winograd's convolutions, Strassen's products and wider channels, which stock
TVM does not choose.
`--heaviest N` tunes N subgraphs only; started again with `--rest RUN`, the others get the schedules of that run.
Nothing else may run on the machine.
"""

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lib import deploy, packing
from lib.contracts import schemas, tables
from lib.contracts.files import RunFiles
from lib.graph.fusion import Model
from lib.graph.subgraphs import Subgraph
from lib.machine import host, intrinsics, targets
from lib.models.source import Source
from lib.tir.workload import load_module
from lib.tuning import history

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)  # for stock's workers, too

import numpy as np
import pandas as pd
import provenance
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from stages import extract

ROUND, POPULATION = 64, 512  # trials in a round and programs in a generation: TVM's defaults
_COLUMNS = ["seconds", "subgraph_id", "name", "weight", "latency_s"]
_SETTINGS = ("trials_per_round", "population", "quick_imports")  # of `tune`


@derived_object
class Recorder(ms.measure_callback.PyMeasureCallback):
    """Notes when each candidate was known, and how fast it was."""

    def __init__(self, subgraphs: Sequence[Subgraph]) -> None:
        super().__init__()
        self.subgraphs, self.started = subgraphs, time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.traces: list[Any] = []  # of each row; as JSON only for those that win, lest it costs tuning time

    def apply(self, _scheduler: Any, task_id: int, candidates: Any, _built: Any, results: Any) -> None:
        """Called by TVM after each batch; it tells no times of single candidates."""
        seconds = time.monotonic() - self.started
        for candidate, result in zip(candidates, results, strict=True):
            self.traces.append(candidate.sch.trace)
            latency_s = median(map(float, result.run_secs)) if result.run_secs else np.nan
            found = self.subgraphs[task_id]
            self.rows.append(
                {
                    "seconds": seconds,
                    "subgraph_id": found.subgraph_id,
                    "name": found.name,
                    "weight": found.weight,
                    "latency_s": latency_s,
                }
            )


def tune(
    subgraphs: Sequence[Subgraph],
    trials: int,
    seed: int,
    folder: Path,
    *,
    trials_per_round: int = ROUND,
    population: int = POPULATION,
    quick_imports: bool = False,
    target: targets.AnyTarget = TARGET,
) -> tuple[pd.DataFrame, dict[str, str]]:
    """TVM's `tune_tasks` for all of them.

    Args:
        trials: Of all subgraphs together. What the last round measures beyond is dropped.
        quick_imports: TVM's builder starts new processes for each round, which import for 13 s before they build; here
            only what the target needs, as this tuner's processes do. What is built is the same.

    Returns:
        The curve: a row for each trial, in the order in which they were measured, with `seconds`, `subgraph_id`,
        `name`, `weight` and `latency_s` (NaN if it failed); and the fastest trace of each subgraph by its id.
    """
    intrinsics.load(target.tvm())
    tasks = [
        ms.TuneContext(
            mod=load_module(subgraph.workload), target=target.tvm(), space_generator="post-order-apply",
            search_strategy=ms.search_strategy.EvolutionarySearch(population_size=population), task_name=f"{n}",
            rand_state=seed * 1000 + n + 1, num_threads="physical",
        )
        for n, subgraph in enumerate(subgraphs)
    ]  # fmt: skip
    load = partial(intrinsics.load, target.tvm()) if quick_imports else None  # of `lib`, which its processes find
    recorder = Recorder(subgraphs)
    ms.tune.tune_tasks(
        tasks=tasks,
        task_weights=[float(subgraph.weight) for subgraph in subgraphs],
        work_dir=str(folder),
        max_trials_global=trials,
        num_trials_per_iter=trials_per_round,
        builder=ms.builder.LocalBuilder(max_workers=host.physical_cores(), initializer=load),  # else TVM's defaults
        measure_callbacks=[*ms.measure_callback.MeasureCallback.create("default"), recorder],
    )
    curve = pd.DataFrame(recorder.rows, columns=_COLUMNS).head(trials)
    fastest = curve.dropna(subset="latency_s").groupby("subgraph_id")["latency_s"].idxmin()
    as_json = {str(key): recorder.traces[row].as_json() for key, row in fastest.items()}
    return curve, {key: json.dumps(trace, default=lambda number: number.value) for key, trace in as_json.items()}


def build(model: Model, traces: Mapping[str, str], rest: Path | None, out: Path) -> list[dict[str, object]]:
    """Compile the model into a folder; what stock did not tune gets the schedules of a run. Returns its interface."""
    module, subgraphs = extract.partition(model, TARGET)
    chosen = {**(winners(rest) if rest else {}), **traces}
    by_function = {
        name: chosen[subgraph.subgraph_id]
        for subgraph in subgraphs
        if subgraph.subgraph_id in chosen
        for name in subgraph.functions
    }
    weights, packs = out / "weights.npz", out / "packing.json"
    deploy.build(module, by_function, TARGET.tvm(), out / "model.so", packs)
    np.savez(weights, **dict(model.weights))  # type: ignore[arg-type]  # the stub takes any name for allow_pickle
    packing.write(out / "weights.safetensors", [packs], [weights], TARGET.tvm(), None)
    weights.unlink()
    packs.unlink()
    return deploy.interface(module)


def winners(run: Path) -> dict[str, str]:
    """The traces that a compiled run of ours ships, by subgraph."""
    files = RunFiles(run)
    past = history.load(files.rounds(json.loads(files.compiled.manifest.read_text())["n_rounds"]))
    results = tables.read(files.compiled.results, schemas.RESULTS).to_pylist()
    return {
        row["subgraph_id"]: program.trace
        for row in results
        for program in past.of(row["subgraph_id"]).fastest
        if program.candidate_id == row["candidate_id"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--trials-per-subgraph", type=int, default=128)
    parser.add_argument("--trials-per-round", type=int, default=ROUND, help="of one subgraph; TVM's default is 64")
    parser.add_argument("--population", type=int, default=POPULATION, help="of its search; TVM's default is 512")
    parser.add_argument("--quick-imports", action="store_true", help="spare TVM's builder 13 s of imports a round")
    parser.add_argument("--heaviest", type=int, default=0, help="tune only so many, with most FLOP; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rest", type=Path, help="a compiled run of ours, for subgraphs that stock does not tune")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    logging.getLogger("tvm").setLevel(logging.ERROR)
    options.out.mkdir(parents=True, exist_ok=True)
    model = extract.load(Source(options.model))
    settings = {name: getattr(options, name) for name in _SETTINGS}
    kept, curve_file = options.out / "traces.json", options.out / "curve.parquet"
    if not kept.exists():  # else what was tuned before is only compiled
        _, subgraphs = extract.partition(model, TARGET)
        tunable = [subgraph for subgraph in subgraphs if subgraph.tunable][: options.heaviest or None]
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            trials = options.trials_per_subgraph * len(tunable)
            curve, traces = tune(tunable, trials, options.seed, Path(folder), **settings)
        curve.to_parquet(curve_file)
        seconds = time.monotonic() - started
        facts = {**settings, "seed": options.seed, **provenance.columns(TARGET.threads)}
        kept.write_text(json.dumps({"seconds": seconds, "traces": traces, **facts}))
    tuned, curve = json.loads(kept.read_text()), pd.read_parquet(curve_file)
    interface = build(model, tuned["traces"], options.rest, options.out)
    manifest = {
        "library": "model.so",
        "params": "weights.safetensors",
        "entry": "main",
        "model_inputs": interface,
        "threads": TARGET.threads,
        "seconds": tuned["seconds"],
        "n_trials": len(curve),
        **{name: tuned[name] for name in (*_SETTINGS, "seed", "revision", "date")},
        "device": host.cpu_name(),
        "versions": host.versions(),
    }
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    best = curve.groupby("subgraph_id").agg(weight=("weight", "first"), latency_s=("latency_s", "min"))
    print(f"{options.model}: {len(curve)} trials in {tuned['seconds']:.0f} s, {len(tuned['traces'])} of {len(best)} "
          f"subgraphs tuned, estimated {(best['weight'] * best['latency_s']).sum() * 1e3:.2f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
