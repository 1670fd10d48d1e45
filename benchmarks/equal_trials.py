"""What learning, spaces and settings are worth apart: one small model, tuned in several ways with equal trials.

    python benchmarks/equal_trials.py --model FILE --heaviest 4 --trials-per-subgraph 128 --seeds 0 1 2 --out FOLDER
    python benchmarks/equal_trials.py --table FOLDER ...    # of several, one for each model: a line for each and side

The sides are stock MetaSchedule (rounds of 64 trials, its default), stock in rounds of 10, which is as soon as this
tuner looks at all subgraphs, stock with 512 trials a subgraph, this tuner's search in stock's space, and in its own
spaces, each with cost models that know nothing before the first trial, and with the base models that the project has,
which learned from other models. All tune the same subgraphs of the same graph, without Winograd's convolutions,
Strassen's products and wider channels, and stock's builder is spared the 13 s of imports that it takes for each round
as shipped. FOLDER gets `trials.parquet`, each trial with the model's estimated latency after it and the traces that
won, and `winners.parquet`, the winners of all sides timed in turn. What stands in the first is not tuned again. Nothing
else may run on the machine.
"""

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lib.contracts import schemas, tables
from lib.contracts.files import RunFiles
from lib.graph.subgraphs import Subgraph
from lib.machine import targets
from lib.measure.runner import MeasureConfig
from lib.models.source import Source
from lib.search.evolution import SearchConfig
from lib.tir.traces import EMPTY_TRACE
from lib.tuning import history
from lib.tuning.base import NONE, BaseModels, base_models, stock_base_models
from lib.tuning.planning import PlanConfig

TARGET = targets.cpu_target()
os.environ["TVM_NUM_THREADS"] = str(TARGET.threads)

import curves
import duel
import intervals
import pandas as pd
import provenance
import rounds
import stock

from stages import extract

_TURNS = 11


@dataclass(frozen=True)
class Way:
    """A way to tune."""

    tune: Callable[[Sequence[Subgraph], int, int, Path], pd.DataFrame]  # subgraphs, trials of all, seed, work folder
    trials_per_subgraph: int = 0  # 0: as the command line says


def by_stock(trials_per_round: int) -> Callable[[Sequence[Subgraph], int, int, Path], pd.DataFrame]:
    """TVM's own tuning; see `ours` for the rows."""

    def tune(subgraphs: Sequence[Subgraph], trials: int, seed: int, folder: Path) -> pd.DataFrame:
        curve, traces = stock.tune(
            subgraphs, trials, seed, folder, trials_per_round=trials_per_round, quick_imports=True
        )
        return with_winners(curve[["seconds", "subgraph_id", "latency_s"]], traces)

    return tune


def by_ours(spaces: str, bases: BaseModels = NONE) -> Callable[[Sequence[Subgraph], int, int, Path], pd.DataFrame]:
    """This tuner's rounds in spaces of `SearchConfig`, with cost models that begin anew or with base models."""

    def tune(subgraphs: Sequence[Subgraph], trials: int, seed: int, folder: Path) -> pd.DataFrame:
        run = RunFiles(folder)

        def ended(number: int, _seconds: float) -> bool:
            return number > 0 and history.load(run.rounds(number)).n_trials >= trials

        count = rounds.tune(
            subgraphs, TARGET, run, ended, plan=PlanConfig(), timing=MeasureConfig(),
            search=SearchConfig(spaces=spaces), seed=seed, bases=bases,
        )  # fmt: skip
        measured = curves.of_run(run.folder).head(trials)  # without what the last round has beyond
        parts = [tables.read(files.candidates, schemas.CANDIDATES).to_pandas() for files in run.rounds(count)]
        trace_of = pd.concat(parts).set_index("candidate_id")["trace"].to_dict()
        fastest = measured.loc[measured.dropna(subset="latency_s").groupby("subgraph_id")["latency_s"].idxmin()]
        traces = {row["subgraph_id"]: trace_of[row["candidate_id"]] for row in fastest.to_dict("records")}
        return with_winners(measured[["seconds", "subgraph_id", "latency_s"]], traces)

    return tune


WAYS = {
    "stock": Way(by_stock(stock.ROUND)),
    "stock, rounds of 10": Way(by_stock(10)),
    "stock, 512 a subgraph": Way(by_stock(stock.ROUND), trials_per_subgraph=512),
    "ours in stock's space": Way(by_ours("metaschedule")),
    "ours in stock's space, base models": Way(by_ours("metaschedule", stock_base_models(TARGET.instructions))),
    "ours": Way(by_ours("own")),
    "ours, base models": Way(by_ours("own", base_models(TARGET.instructions))),
}


def with_winners(measured: pd.DataFrame, traces: dict[str, str]) -> pd.DataFrame:
    """Trials in the order in which they were known, with `trace`: of the fastest of each subgraph, else null."""
    measured = measured.reset_index(drop=True)
    fastest = measured.loc[measured.dropna(subset="latency_s").groupby("subgraph_id")["latency_s"].idxmin()]
    return measured.assign(trial=measured.index + 1, trace=fastest["subgraph_id"].map(traces))


def estimates(measured: pd.DataFrame, weights: dict[str, int]) -> pd.Series:
    """Estimated latency of all subgraphs after each trial, in seconds; NaN until each has a program that works."""
    found = curves.curve(measured, weights).set_index("trials")["latency_s"]
    return measured["trial"].map(found)


def tune_all(
    subgraphs: Sequence[Subgraph], names: Sequence[str], seeds: Sequence[int], trials: int, kept: Path
) -> None:
    """Add to the rows what is missing; each side and seed is on disk when it ends."""
    weights = {subgraph.subgraph_id: subgraph.weight for subgraph in subgraphs}
    parts = [pd.read_parquet(kept)] if kept.exists() else []
    done = {(side, seed) for part in parts for side, seed in part[["side", "seed"]].drop_duplicates().to_numpy()}
    for seed in seeds:
        for name in names:
            if (name, seed) in done:
                continue
            way = WAYS[name]
            total = (way.trials_per_subgraph or trials) * len(subgraphs)
            started = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                found = way.tune(subgraphs, total, seed, Path(folder))
            found["estimate_s"] = estimates(found, weights)
            found = found.assign(side=name, seed=seed, tuning_s=time.monotonic() - started)
            parts.append(found.assign(**provenance.columns(TARGET.threads)))
            pd.concat(parts, ignore_index=True).to_parquet(kept, index=False)
            print(f"{name}, seed {seed}: {len(found)} trials in {found['tuning_s'].iloc[0]:.0f} s, "
                  f"estimated {found['estimate_s'].min() * 1e3:.3f} ms", flush=True)  # fmt: skip


def time_winners(subgraphs: Sequence[Subgraph], trials: pd.DataFrame, turns: int) -> pd.DataFrame:
    """The winners of all sides of a seed in turn, subgraph by subgraph; untuned where no program of a side works."""
    rows = []
    for seed, part in trials.groupby("seed"):
        won = part.dropna(subset="trace").set_index(["side", "subgraph_id"])["trace"].to_dict()
        sides = part["side"].unique()
        for n, subgraph in enumerate(subgraphs):
            traces = {side: won.get((side, subgraph.subgraph_id), EMPTY_TRACE) for side in sides}
            found = duel.duel(asdict(subgraph), traces, turns, seed=n)
            rows.append(pd.DataFrame(found).assign(seed=seed))
    return pd.concat(rows, ignore_index=True).assign(**provenance.columns(TARGET.threads))


def totals_of(winners: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """By seed, `duel.totals`."""
    return {seed: duel.totals(winners[winners["seed"] == seed]) for seed in sorted(set(winners["seed"].astype(int)))}


def ratios(totals: dict[int, pd.DataFrame]) -> dict[str, dict[int, tuple[intervals.Statistic, int]]]:
    """By side and seed, how many times as long the first side's winners take, with the number of turns."""
    sides = [name for name in WAYS if any(name in found for found in totals.values())]
    return {
        side: {seed: (intervals.best_ratio_of([found[sides[0]]], found[side]), len(found))
               for seed, found in totals.items() if side in found}
        for side in sides
    }  # fmt: skip


def table(trials: pd.DataFrame, winners: pd.DataFrame) -> str:
    """Markdown: a line for each side and seed, and for each side over its seeds."""
    lines = [
        "| side | seed | trials | tuning, s | estimated, ms | winners in turn, ms | stock / side |",
        "|---|---|---|---|---|---|---|",
    ]
    totals = totals_of(winners)
    for side, of_seeds in ratios(totals).items():
        for seed, ratio in of_seeds.items():
            part = trials[(trials["side"] == side) & (trials["seed"] == seed)]
            found = totals[seed][side]
            in_turn = intervals.estimate(intervals.median_of(found), len(found))
            facts = (len(part), f"{part['tuning_s'].iloc[0]:.0f}", f"{part['estimate_s'].min() * 1e3:.3f}")
            cells = " | ".join(map(str, (*facts, in_turn.text(1e3), intervals.estimate(*ratio).text())))
            lines.append(f"| {side} | {seed} | {cells} |")
        lines.append(f"| {side} | geometric mean | | | | | {intervals.geometric_mean([*of_seeds.values()]).text()} |")
    return "\n".join(lines)


def summary(folders: Sequence[Path]) -> str:
    """Markdown: a line for each model and side but the first one, with all its seeds, and for each side over models."""
    lines = [
        "| model | subgraphs | trials | side | tuning, s (stock) | stock / side, by seed | geometric mean |",
        "|---|---|---|---|---|---|---|",
    ]
    of_sides: dict[str, list[tuple[intervals.Statistic, int]]] = {}
    for folder in folders:
        trials, winners = (pd.read_parquet(folder / f"{name}.parquet") for name in ("trials", "winners"))
        (base, _), *others = ratios(totals_of(winners)).items()
        seconds = trials.groupby("side")["tuning_s"].mean()
        for side, of_seeds in others:
            statistics = [*of_seeds.values()]
            of_sides.setdefault(side, []).extend(statistics)
            seeds = ", ".join(f"{intervals.estimate(*each).value:.2f}" for each in statistics)
            facts = (folder.name, trials["subgraph_id"].nunique(), trials["trial"].max(), side)
            cells = " | ".join(map(str, (*facts, f"{seconds[side]:.0f} ({seconds[base]:.0f})", seeds)))
            lines.append(f"| {cells} | {intervals.geometric_mean(statistics).text()} |")
    for side, statistics in of_sides.items():
        lines.append(f"| all | | | {side} | | | {intervals.geometric_mean(statistics).text()} (of {len(statistics)}) |")
    return "\n".join(lines)


def main() -> None:
    """Tune, time and print, or print what was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--table", type=Path, nargs="+", metavar="FOLDER", help="print what the rows there say, and end"
    )
    parser.add_argument("--model")
    parser.add_argument("--heaviest", type=int, default=4, help="tune only so many, with most FLOP; 0: all")
    parser.add_argument("--trials-per-subgraph", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sides", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--turns", type=int, default=_TURNS, help="of the winners")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.table and not (options.out and options.model):
        parser.error("--model and --out are needed, or --table")
    if len(options.table or []) > 1:
        print(summary(options.table))
        return
    folder = options.table[0] if options.table else options.out
    kept, timed = folder / "trials.parquet", folder / "winners.parquet"
    if not options.table:
        logging.getLogger("tvm").setLevel(logging.ERROR)
        folder.mkdir(parents=True, exist_ok=True)
        _, subgraphs = extract.partition(extract.load(Source(options.model)), TARGET)
        chosen = [subgraph for subgraph in subgraphs if subgraph.tunable][: options.heaviest or None]
        tune_all(chosen, options.sides, options.seeds, options.trials_per_subgraph, kept)
        time_winners(chosen, pd.read_parquet(kept), options.turns).to_parquet(timed, index=False)
    print(table(pd.read_parquet(kept), pd.read_parquet(timed)))


if __name__ == "__main__":
    main()
