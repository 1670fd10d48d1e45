"""What the papers measure on GPUs: how soon Ansor's quality is reached, two GPUs against one, training on a GPU.

    python benchmarks/gpus.py --models resnet50 mobilenetv2 bert_base --out FOLDER
    python benchmarks/gpus.py --run artifacts/cuda-sm_90/resnet50/runs/NAME --revision CODE --out FOLDER
    python benchmarks/gpus.py --table FOLDER

For a machine with NVIDIA GPUs that does nothing else, with `nvcc` on PATH and CUDA's libraries where TVM finds them.
`--parts` chooses among

- `quality`: each model tuned with equal trials by stock MetaSchedule (one GPU, as it comes), as Ansor does (the
  gradient decides whose turn is next, one cost model for all subgraphs), and as this tuner does (families, foresee),
  the latter two on all GPUs. Rows are trials: when each was known, and the model's estimated latency after it.
- `devices`: the same candidates measured on one GPU and on all of them, in turn: trials per second.
- `training`: the cost model of what `quality` measured, trained on the CPU and on the GPU: seconds, and how well it
  ranks the last third, which it has not seen.

With `--run` nothing is measured: the trials of a run of `TuneModel` on a GPU are kept, wherever it was.

What stands in FOLDER is not measured again. Rows name GPUs, code and date. Those of stand-ins (`tests/cuda`) show that
the script runs; there is no table of their times.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")  # for stock, whose processes inherit it

import curves
import pandas as pd
import provenance
import rounds
import stock

from lib.contracts import schemas, tables
from lib.contracts.files import ModelFiles, RunFiles
from lib.graph.subgraphs import Subgraph
from lib.machine import host, targets
from lib.measure import factory
from lib.measure.devices import Local
from lib.measure.runner import Job, MeasureConfig
from lib.models.source import Source
from lib.search import evolution
from lib.search.evolution import SearchConfig
from lib.tuning import cost_model, history
from lib.tuning.cost_model import Samples, TrainConfig
from lib.tuning.planning import PlanConfig
from stages import extract
from tests.helpers import job, matmul

_STAND_IN = "Stand-in"
WAYS = {  # families and strategy of this tuner's rounds
    "as Ansor": ("single", "gradient"),
    "families and foresee": ("core-operator", "foresee"),
}
STOCK = "stock MetaSchedule"


def origin(target: targets.AnyTarget, code: str) -> dict[str, Any]:
    """Columns of each row; `code`: its revision, where there is no clone to ask."""
    names = sorted({name for [name] in host.gpu_facts("name")})
    return {"gpu": ", ".join(names), "gpus": len(host.gpus() or []), **provenance.columns(target.threads, code)}


def quality(
    subgraphs: Sequence[Subgraph], target: targets.AnyTarget, way: str, seed: int, trials: int, population: int,
    kept: Path,
) -> pd.DataFrame:  # fmt: skip
    """A row for each trial: seconds, subgraph_id, latency_s.

    Args:
        kept: Where this tuner's rounds stay, for `training`.
    """
    if way == STOCK:
        with tempfile.TemporaryDirectory() as folder:
            found, _ = stock.tune(
                subgraphs, trials, seed, Path(folder), population=population, quick_imports=True, target=target
            )
        return found[["seconds", "subgraph_id", "latency_s"]]
    families, strategy = WAYS[way]
    run = RunFiles(kept)

    def ended(number: int, _seconds: float) -> bool:
        return number > 0 and history.load(run.rounds(number)).n_trials >= trials

    rounds.tune(
        subgraphs, target, run, ended, families=families, plan=PlanConfig(strategy=strategy), timing=MeasureConfig(),
        search=SearchConfig(population=population), seed=seed,
    )  # fmt: skip
    return curves.of_run(kept)[["seconds", "subgraph_id", "latency_s"]].head(trials)


def devices(target: targets.AnyTarget, n: int, turns: int, extent: int) -> pd.DataFrame:
    """Trials per second on one GPU and on all, in alternation; processes are started before, and candidates are
    compiled in the time that counts, as in a run."""
    jobs, rows = candidates(target, n, extent), []
    all_gpus = host.gpus() or []
    for turn in range(turns):
        for used in (all_gpus[:1], all_gpus):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(used)
            pool = factory.open_runner(Local(), target, MeasureConfig(slow_factor=1e9))
            try:
                list(pool.run(jobs[:2]))
                started = time.perf_counter()
                found = pd.DataFrame([asdict(measurement) for measurement in pool.run(jobs)])
                seconds = time.perf_counter() - started
            finally:
                pool.close()
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(all_gpus)
            ok, used_by = int((found["status"] == "ok").sum()), found["device"].nunique()
            rows.append({"turn": turn, "devices": len(used), "trials": len(found), "ok": ok, "seconds": seconds,
                         "used": used_by})  # fmt: skip
    return pd.DataFrame(rows)


def candidates(target: targets.AnyTarget, n: int, extent: int) -> list[Job]:
    """Distinct programs of a square product."""
    workload = matmul(extent, extent, extent)
    found = evolution.sample(workload, target.tvm(), n, known=set(), seed=0)
    return [job(f"candidate {k}", workload, proposal.trace) for k, proposal in enumerate(found)]


def training(run: Path, seed: int) -> pd.DataFrame:
    """Seconds and rank correlation of a run's samples, by what trains; or why a GPU cannot."""
    samples = measured(RunFiles(run))
    split, rows = 2 * len(samples) // 3, []
    first, last = (part(samples, chosen) for chosen in (slice(split), slice(split, None)))
    for device in ("cpu", "cuda"):
        reason = cost_model.without_cuda() if device == "cuda" else ""
        row: dict[str, Any] = {"trains_on": device, "samples": split, "reason": reason}
        if not reason:
            cost_model.train(first, TrainConfig(device=device), seed)  # the first on a GPU loads its kernels
            started = time.perf_counter()
            scores = cost_model.train(first, TrainConfig(device=device), seed).predict(last.features)
            row |= {"seconds": time.perf_counter() - started, "rank_correlation": _within(scores, last)}
        rows.append(row)
    return pd.DataFrame(rows)


def _within(scores: np.ndarray, samples: Samples) -> float:
    """Mean over workloads of how scores and speeds are ranked alike."""
    found = pd.DataFrame({"w": samples.workloads, "score": scores, "speed": -samples.latencies_s}).dropna()
    ranks = [part["score"].rank().corr(part["speed"].rank()) for _, part in found.groupby("w") if len(part) > 2]
    return float(np.nanmean(ranks)) if ranks else float("nan")


def trials_of(run: Path) -> pd.DataFrame:
    """A row for each trial of a run: of which subgraph, what became of it, and what it took, in seconds."""
    files = RunFiles(run)
    parts = []
    for now in files.rounds(len(list((run / "rounds").iterdir()))):
        if not now.measurements.exists():  # interrupted
            break
        asked = tables.read(now.candidates, schemas.CANDIDATES).to_pandas().set_index("candidate_id")
        measurements = tables.read(now.measurements, schemas.MEASUREMENTS)
        rows = measurements.to_pandas().assign(latency_s=history.latencies_s(measurements))
        rows["origin"] = asked.loc[rows["candidate_id"], "origin"].to_numpy()
        clock = {f"{name}_clock_s": tables.stamp(path, schema).clock.get(name, 0.0) for name, path, schema in (
            ("search", now.candidates, schemas.CANDIDATES), ("build", now.measurements, schemas.MEASUREMENTS),
            ("run", now.measurements, schemas.MEASUREMENTS),
        )}  # fmt: skip
        parts.append(rows.assign(round=now.number, **clock))
    found = pd.concat(parts, ignore_index=True)
    model = ModelFiles(run.parent.parent)
    known = tables.read(model.subgraphs, schemas.SUBGRAPHS).to_pandas().set_index("subgraph_id")
    found = found.join(known[["name", "core_operator", "flop", "weight"]], on="subgraph_id")
    columns = ["round", "subgraph_id", "name", "core_operator", "flop", "weight", "origin", "status", "latency_s",
               "build_s", "run_s", "search_clock_s", "build_clock_s", "run_clock_s"]  # fmt: skip
    gpus = [device.partition(" GPU-")[0] for device in found["device"] if device]  # without its number
    kept: pd.DataFrame = found[columns].assign(model=model.folder.name, gpu=gpus[0])
    return kept


def measured(run: RunFiles) -> Samples:
    """All programs of a run, in the order in which they were measured."""
    parts = []
    for files in run.rounds(len(list((run.folder / "rounds").iterdir()))):
        asked = tables.read(files.candidates, schemas.CANDIDATES).to_pandas().set_index("candidate_id")
        measurements = tables.read(files.measurements, schemas.MEASUREMENTS).sort_by("measured_at")
        rows, latencies = measurements.to_pandas(), history.latencies_s(measurements)
        features = asked.loc[rows["candidate_id"], "features"].tolist()
        parts.append(pd.DataFrame({"w": rows["subgraph_id"].tolist(), "x": features, "y": latencies}))
    found = pd.concat(parts)
    found = found[[len(each) == schemas.N_FEATURES for each in found["x"]]]  # untuned programs have none
    workloads = pd.factorize(found["w"])[0]
    return Samples(np.stack(found["x"].tolist()).astype(np.float32), workloads, found["y"].to_numpy(np.float64))


def part(samples: Samples, chosen: slice) -> Samples:
    return Samples(samples.features[chosen], samples.workloads[chosen], samples.latencies_s[chosen])


def table(folder: Path) -> str:
    """Markdown of what is there; no times of stand-ins."""
    told = []
    found = {name: pd.read_parquet(file) for name in ("trials", "quality", "devices", "training")
             if (file := folder / f"{name}.parquet").exists()}  # fmt: skip
    if any(rows["gpu"].str.startswith(_STAND_IN).any() for rows in found.values()):
        return f"{', '.join(found)}: rows of stand-ins, whose times mean nothing; there is no table of them."
    if "trials" in found:
        heads = ("model", "GPU", "trials", "not ok", "one compiled, s", "one timed, s", "search, build, run, s",
                 "kernels untuned, ms", "kernels found, ms")  # fmt: skip
        told += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *trials_lines(found["trials"]), ""]
    if "quality" in found:
        told += ["| model | seed | way | trials | tuning, s | estimated, ms | sooner at Ansor's | fewer trials |",
                 "|---" * 8 + "|", *quality_lines(found["quality"]), ""]  # fmt: skip
    if "devices" in found:
        rate = found["devices"].assign(rate=lambda rows: rows["trials"] / rows["seconds"])
        told += ["| GPUs | trials/s, by turn |", "|---|---|"]
        told += [
            f"| {n} | {', '.join(f'{value:.2f}' for value in part['rate'])} |" for n, part in rate.groupby("devices")
        ]
        told += [""]
    if "training" in found:
        told += ["| model | seed | trained on | samples | s | rank correlation |", "|---" * 6 + "|"]
        for row in found["training"].to_dict("records"):
            ends = row["reason"] or f"{row['seconds']:.2f} | {row['rank_correlation']:.3f}"
            told.append(f"| {row['model']} | {row['seed']} | {row['trains_on']} | {row['samples']} | {ends} |")
    return "\n".join(told)


def trials_lines(rows: pd.DataFrame) -> list[str]:
    """A line for each model: medians of a trial, the run's clocks, and the sums of its kernels."""
    lines = []
    for (model, gpu), of_model in rows.groupby(["model", "gpu"]):
        ok = of_model[of_model["status"] == "ok"]
        clocks = of_model.drop_duplicates("round")[["search_clock_s", "build_clock_s", "run_clock_s"]].sum()
        sums = [(part.groupby("subgraph_id")["latency_s"].min() * part.groupby("subgraph_id")["weight"].first()).sum()
                for part in (ok[ok["origin"] == "untuned"], ok)]  # fmt: skip
        lines.append(
            f"| {model} | {gpu} | {len(of_model)} | {len(of_model) - len(ok)} | {ok['build_s'].median():.2g} "
            f"| {ok['run_s'].median():.2g} | {', '.join(f'{seconds:.0f}' for seconds in clocks)} "
            f"| {sums[0] * 1e3:.3g} | {sums[1] * 1e3:.3g} |"
        )
    return lines


def quality_lines(rows: pd.DataFrame) -> list[str]:
    """A line for each model, seed and way; how much sooner it is where the way of Ansor ends."""
    lines = []
    for (model, seed), of_both in rows.groupby(["model", "seed"]):
        found = {}
        for way, one in of_both.groupby("way"):
            weights: dict[str, int] = dict(one[["subgraph_id", "weight"]].drop_duplicates().itertuples(index=False))
            found[way] = curves.curve(one, weights)
        goal = found["as Ansor"]["latency_s"].min() if "as Ansor" in found else np.nan
        theirs = curves.reached(found["as Ansor"], goal) if "as Ansor" in found else (np.nan, np.nan)
        for way, curve in found.items():
            ratios = [f"{a / b:.2f}x" if np.isfinite(b) else "never"
                      for a, b in zip(theirs, curves.reached(curve, goal), strict=True)]  # fmt: skip
            ends = f"{curve['seconds'].max():.0f} | {curve['latency_s'].min() * 1e3:.4g} | {' | '.join(ratios)}"
            lines.append(f"| {model} | {seed} | {way} | {len(of_both[of_both['way'] == way])} | {ends} |")
    return lines


def add(file: Path, fresh: pd.DataFrame, **columns: Any) -> None:
    """Rows are on disk as soon as they are known."""
    parts = [pd.read_parquet(file)] if file.exists() else list[pd.DataFrame]()
    parts.append(fresh.assign(**columns))
    pd.concat(parts, ignore_index=True).to_parquet(file, index=False)


def has(file: Path, **columns: object) -> bool:
    """Whether there are rows with these values."""
    if not file.exists():
        return False
    rows = pd.read_parquet(file)
    return bool(np.logical_and.reduce([rows[name] == value for name, value in columns.items()]).any())


def main() -> None:
    """Measure what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the tables of the rows there, and end")
    parser.add_argument("--run", type=Path, help="keep what this run of `TuneModel` measured, and end")
    parser.add_argument("--models", nargs="+", default=["resnet50", "mobilenetv2", "bert_base"])
    parser.add_argument("--target", default="cuda", help="`cuda`: this machine's GPU; or the tag of one")
    parser.add_argument("--parts", nargs="+", default=["quality", "devices", "training"])
    parser.add_argument("--ways", nargs="+", choices=[STOCK, *WAYS], default=[STOCK, *WAYS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--trials-per-subgraph", type=int, default=128)
    parser.add_argument("--population", type=int, default=512, help="of the search; 512 is MetaSchedule's default")
    parser.add_argument("--heaviest", type=int, default=0, help="tune only so many, with most FLOP; 0: all")
    parser.add_argument("--candidates", type=int, default=128, help="of `devices`")
    parser.add_argument("--extent", type=int, default=1024, help="of the product of `devices`")
    parser.add_argument("--turns", type=int, default=3, help="of `devices`")
    parser.add_argument("--revision", default="", help="of this code; default: this clone's")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
        return
    if not options.out:
        parser.error("--out is needed, or --table")
    logging.getLogger("tvm").setLevel(logging.ERROR)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.run:
        kept = provenance.columns(0, options.revision)  # of the code, and when; the run says on which GPU
        add(options.out / "trials.parquet", trials_of(options.run), revision=kept["revision"], date=kept["date"])
        print(table(options.out))
        return
    target = targets.target(options.target)
    made = origin(target, options.revision)
    file = {name: options.out / f"{name}.parquet" for name in ("quality", "devices", "training")}
    if "devices" in options.parts and not has(file["devices"], extent=options.extent):
        found = devices(target, options.candidates, options.turns, options.extent)
        add(file["devices"], found, extent=options.extent, **made)
    for model, seed, way in [(m, s, w) for m in options.models for s in options.seeds for w in options.ways]:
        which = {"model": Path(model).stem, "seed": seed, "way": way}
        run = options.out / "runs" / f"{which['model']}-{seed}-{way.replace(' ', '-')}"
        if "quality" in options.parts and not has(file["quality"], **which):
            _, subgraphs = extract.partition(extract.load(Source(model)), target)
            chosen = [subgraph for subgraph in subgraphs if subgraph.tunable][: options.heaviest or None]
            trials = options.trials_per_subgraph * len(chosen)
            found = quality(chosen, target, way, seed, trials, options.population, run)
            weights = {subgraph.subgraph_id: subgraph.weight for subgraph in chosen}
            found = found.assign(trial=np.arange(1, len(found) + 1), weight=found["subgraph_id"].map(weights))
            add(file["quality"], found, **which, **made)
        if "training" in options.parts and run.exists() and not has(file["training"], **which):
            add(file["training"], training(run, seed), **which, **made)
    print(table(options.out))


if __name__ == "__main__":
    main()
