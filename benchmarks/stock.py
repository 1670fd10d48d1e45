"""Stock MetaSchedule on a whole model: our graph and target, TVM's own builder, runner, cost model and scheduler.

    python benchmarks/stock.py --model resnet50 --trials-per-subgraph 128 --seed 0 --out FOLDER

Leaves `curve.parquet` (each measurement with its time), `traces.json`, `model.so`, `params.npz` and `manifest.json` in
the folder, the latter as `TuneModel` leaves them in `compiled/`, so that both can be timed in turn. The graph is the
one that `TuneModel` gets, but for Winograd's convolutions, which stock TVM does not choose. `--heaviest N` tunes N
subgraphs only; started again with `--rest RUN`, the others get the schedules of that run. Nothing else may run on the
machine.
"""

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lib import targets

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)  # for stock's workers, too

import numpy as np
import pandas as pd
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from lib import deploy, history, host, place, schemas, tables, workloads
from lib.graph import Model
from lib.layout import RunFiles
from lib.source import Source
from lib.worker import Libraries
from lib.workloads import Subgraph
from stages import extract

_ROUND = 64  # trials, TVM's default


@derived_object
class Recorder(ms.measure_callback.PyMeasureCallback):
    """Notes when each candidate was known, and how fast it was."""

    def __init__(self, subgraphs: Sequence[Subgraph]) -> None:
        super().__init__()
        self.subgraphs, self.started = subgraphs, time.monotonic()
        self.rows: list[dict[str, Any]] = []

    def apply(self, _scheduler: Any, task_id: int, _candidates: Any, _built: Any, results: Any) -> None:
        """Called by TVM after each batch; it tells no times of single candidates."""
        seconds = time.monotonic() - self.started
        for result in results:
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


def tune(subgraphs: Sequence[Subgraph], trials: int, seed: int, folder: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """TVM's `tune_tasks` for all of them; the curve, and the fastest trace of each subgraph by its id."""
    modules = [workloads.load(subgraph.workload) for subgraph in subgraphs]
    tasks = [
        ms.TuneContext(
            mod=module, target=TARGET.tvm(), space_generator="post-order-apply", search_strategy="evolutionary",
            task_name=f"{n}", rand_state=seed * 1000 + n + 1, num_threads="physical",
        )
        for n, module in enumerate(modules)
    ]  # fmt: skip
    recorder = Recorder(subgraphs)
    database = ms.tune.tune_tasks(
        tasks=tasks,
        task_weights=[float(subgraph.weight) for subgraph in subgraphs],
        work_dir=str(folder),
        max_trials_global=trials,
        num_trials_per_iter=_ROUND,
        measure_callbacks=[*ms.measure_callback.MeasureCallback.create("default"), recorder],
    )
    traces = {}
    for subgraph, module in zip(subgraphs, modules, strict=True):
        record = database.query_tuning_record(module, TARGET.tvm(), "main")
        if record is not None:
            traces[subgraph.subgraph_id] = json.dumps(record.trace.as_json(), default=lambda value: value.value)
    return pd.DataFrame(recorder.rows), traces


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
    library, weights = out / "model.so", out / "weights.npz"
    deploy.build(module, by_function, TARGET.tvm(), library, pack=True)
    np.savez(weights, **dict(model.weights))  # type: ignore[arg-type]  # the stub takes any name for allow_pickle
    Libraries(place.Here("llvm")).pack(str(library), str(weights), str(out / "params.npz"))
    weights.unlink()
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
    parser.add_argument("--heaviest", type=int, default=0, help="tune only so many, with most FLOP; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rest", type=Path, help="a compiled run of ours, for subgraphs that stock does not tune")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    logging.getLogger("tvm").setLevel(logging.ERROR)
    options.out.mkdir(parents=True, exist_ok=True)
    model = extract.load(Source(options.model))
    kept, curve_file = options.out / "traces.json", options.out / "curve.parquet"
    if not kept.exists():  # else what was tuned before is only compiled
        _, subgraphs = extract.partition(model, TARGET)
        tunable = [subgraph for subgraph in subgraphs if subgraph.tunable][: options.heaviest or None]
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            curve, traces = tune(tunable, options.trials_per_subgraph * len(tunable), options.seed, Path(folder))
        curve.to_parquet(curve_file)
        kept.write_text(json.dumps({"seconds": time.monotonic() - started, "traces": traces}))
    tuned, curve = json.loads(kept.read_text()), pd.read_parquet(curve_file)
    interface = build(model, tuned["traces"], options.rest, options.out)
    manifest = {
        "library": "model.so",
        "params": "params.npz",
        "entry": "main",
        "model_inputs": interface,
        "threads": TARGET.threads,
        "seconds": tuned["seconds"],
        "n_trials": len(curve),
        "seed": options.seed,
        "device": host.cpu_name(),
        "versions": host.versions(),
    }
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    best = curve.groupby("subgraph_id").agg(weight=("weight", "first"), latency_s=("latency_s", "min"))
    print(f"{options.model}: {len(curve)} trials in {tuned['seconds']:.0f} s, {len(tuned['traces'])} of {len(best)} "
          f"subgraphs tuned, estimated {(best['weight'] * best['latency_s']).sum() * 1e3:.2f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
