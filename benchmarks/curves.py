"""How soon a run reaches what stock MetaSchedule reaches, and how far both come in the same time.

    python benchmarks/curves.py --ours RUN --stock FOLDER --name NAME --seed N [--duel FILE]
    python benchmarks/curves.py --table benchmarks/curves

RUN is a run's folder below `artifacts/`, FOLDER what `stock.py` left. A curve is the sum of the lowest latencies so
far, each times how often an inference calls its subgraph, over the wall time of tuning; it begins when each was
measured. Both sides count the subgraphs that stock tuned. The machine is not equally fast while one and while the other
is tuned: with what `duel.py` left, there is a second curve of latencies that are scaled, subgraph by subgraph and side
by side, such that the fastest program takes what it took there. Leaves both in NAME-N.parquet and the picture of the
scaled one, or else of the first, in NAME-N.png, in `benchmarks/curves/`. `--table` makes the table from the rows alone.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import intervals
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import provenance

from lib.contracts import schemas, tables
from lib.contracts.files import RunFiles

NEAR = 1.05  # times the latency that is to be reached
_KINDS = {"latency_s": "as measured while tuning", "scaled_latency_s": "scaled to latencies timed in turn"}


def of_run(run: Path) -> pd.DataFrame:
    """Every measurement of a run, by when it was known.

    Returns:
        Columns `seconds` (of tuning), `subgraph_id`, `candidate_id` and `latency_s` (NaN if it failed).
    """
    parts, began = [], 0.0
    files = RunFiles(run)
    for number in range(len(list((run / "rounds").iterdir()))):
        now = files.round(number)
        if not now.training.exists():  # interrupted
            break
        spent = [
            tables.stamp(path, schema).clock["total"]
            for path, schema in (
                (now.candidates, schemas.CANDIDATES), (now.measurements, schemas.MEASUREMENTS),
                (now.training, schemas.TRAINING),
            )
        ]  # fmt: skip
        rows = tables.read(now.measurements, schemas.MEASUREMENTS).to_pandas()
        known = began + spent[0] + spent[1] - (rows["measured_at"].max() - rows["measured_at"])
        latencies = [np.median(found) if len(found) else np.nan for found in rows["latencies"]]
        parts.append(rows[["subgraph_id", "candidate_id"]].assign(seconds=known, latency_s=latencies))
        began += sum(spent)
    found: pd.DataFrame = pd.concat(parts).sort_values("seconds", kind="stable", ignore_index=True)
    return found


def curve(measurements: pd.DataFrame, weights: Mapping[str, int]) -> pd.DataFrame:
    """Estimated latency of the model after each measurement: columns seconds, trials, latency_s."""
    best = dict.fromkeys(weights, np.inf)
    rows = []
    for n, (seconds, subgraph_id, latency_s) in enumerate(
        measurements[["seconds", "subgraph_id", "latency_s"]].itertuples(index=False), start=1
    ):
        if subgraph_id in best and latency_s < best[subgraph_id]:
            best[subgraph_id] = latency_s
        rows.append((seconds, n, sum(weight * best[key] for key, weight in weights.items())))
    known = [row for row in rows if np.isfinite(row[-1])]
    return pd.DataFrame(known, columns=["seconds", "trials", "latency_s"])


def scaled(measurements: pd.DataFrame, latencies_s: Mapping[str, float]) -> pd.DataFrame:
    """Measurements with the lowest latency of each subgraph as it is known from elsewhere, the others in proportion."""
    lowest = measurements.groupby("subgraph_id")["latency_s"].transform("min")
    known = measurements["subgraph_id"].map(latencies_s)
    return measurements.assign(latency_s=measurements["latency_s"] * (known / lowest).fillna(1.0))


def reached(found: pd.DataFrame, latency_s: float) -> tuple[float, float]:
    """Seconds and trials after which a curve is at a latency; NaN if it never is."""
    there = found[found["latency_s"] <= latency_s]
    return (float(there["seconds"].iloc[0]), float(there["trials"].iloc[0])) if len(there) else (np.nan, np.nan)


def both(measurements: pd.DataFrame, weights: Mapping[str, int], in_turn_s: Mapping[str, float]) -> pd.DataFrame:
    """The curve with `scaled_latency_s` beside `latency_s`; NaN without latencies that were timed in turn."""
    found = curve(measurements, weights)
    if not in_turn_s:
        return found.assign(scaled_latency_s=np.nan)
    return found.assign(scaled_latency_s=curve(scaled(measurements, in_turn_s), weights)["latency_s"])


def compare(ours: pd.DataFrame, stock: pd.DataFrame, kind: str) -> dict[str, float]:
    """How many times as long and as many trials stock takes to its own final latency, and to `NEAR` of it."""
    ours, stock = (found.assign(latency_s=found[kind]) for found in (ours, stock))
    facts: dict[str, float] = {}
    for label, times in (("final", 1.0), ("near", NEAR)):
        goal = times * stock["latency_s"].min()
        (theirs_s, theirs_n), (ours_s, ours_n) = reached(stock, goal), reached(ours, goal)
        facts |= {f"sooner_{label}": theirs_s / ours_s, f"fewer_{label}": theirs_n / ours_n}
    return facts


def table(rows: pd.DataFrame) -> str:
    """Markdown: each model and seed, and geometric means over all of them, drawn with replacement."""
    heads = ["model", "seed", "stock, ms (s, trials)", "ours, ms (s, trials)"]
    heads += [
        f"{what} to {goal}" for goal in ("stock's final latency", f"{NEAR} of it") for what in ("sooner", "fewer")
    ]
    lines = []
    for kind, told in _KINDS.items():
        known = rows.dropna(subset=kind)
        if known.empty:
            continue
        lines += [f"Latencies {told}:", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        facts = []
        for (model, seed), part in known.groupby(["model", "seed"]):
            sides = {side: part[part["side"] == side] for side in ("stock", "ours")}
            facts.append(compare(sides["ours"], sides["stock"], kind))
            ends = [f"{found[kind].min() * 1e3:.4g} ({found['seconds'].max():.0f}, {found['trials'].max():.0f})"
                    for found in sides.values()]  # fmt: skip
            cells = [f"{value:.1f}x" if np.isfinite(value) else "never" for value in facts[-1].values()]
            lines.append(f"| {model} | {seed} | {' | '.join([*ends, *cells])} |")
        lines += [
            f"| geometric mean | | | | {' | '.join(map(_mean, pd.DataFrame(facts).to_dict('list').values()))} |",
            "",
        ]
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    there = [value for value in values if np.isfinite(value)]
    shown = intervals.estimate(intervals.geometric_mean_of(there), len(there)).text() if there else "-"
    return f"{shown} ({len(there)} of {len(values)})"


def draw(ours: pd.DataFrame, stock: pd.DataFrame, title: str, path: Path) -> None:
    """Both curves, over a logarithmic axis of time."""
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for found, label, colour in ((stock, "stock MetaSchedule", "tab:grey"), (ours, "ours", "tab:blue")):
        axes.step(found["seconds"], found["latency_s"] * 1e3, where="post", label=label, color=colour)
    axes.axhline(stock["latency_s"].min() * 1e3, color="tab:grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="tuning, s", ylabel="estimated latency, ms", title=title)
    axes.yaxis.set_major_formatter(plt.ScalarFormatter())
    axes.yaxis.set_minor_formatter(plt.ScalarFormatter())
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Keep and draw the curves of a seed, or print the table of all that were kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of the rows there, and end")
    parser.add_argument("--ours", type=Path)
    parser.add_argument("--stock", type=Path)
    parser.add_argument("--name", help="of the model")
    parser.add_argument("--seed", type=int, default=0, help="of both runs")
    parser.add_argument("--duel", type=Path)
    parser.add_argument("--revision", default="", help="of the code of our run; default: this clone's")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "curves", help="folder of the rows")
    options = parser.parse_args()
    if options.table:
        print(table(pd.concat(map(pd.read_parquet, sorted(options.table.glob("*.parquet"))))))
        return
    if not (options.ours and options.stock and options.name):
        parser.error("--ours, --stock and --name are needed, or --table")
    measured = pd.read_parquet(options.stock / "curve.parquet")
    weights: dict[str, int] = dict(measured[["subgraph_id", "weight"]].drop_duplicates().itertuples(index=False))
    facts = json.loads((options.stock / "traces.json").read_text())
    if facts["seed"] != options.seed:
        parser.error(f"--stock was tuned with seed {facts['seed']}, but --seed is {options.seed}")
    in_turn = _medians(options.duel) if options.duel else {}
    ours = both(of_run(options.ours), _counted(options.ours, weights), in_turn.get("ours", {}))
    stock = both(measured, weights, in_turn.get("stock", {}))
    origin = provenance.columns(int(facts["threads"]), options.revision)
    rows = pd.concat(
        [ours.assign(side="ours", **origin), stock.assign(side="stock", **{**origin, "revision": facts["revision"]})]
    ).assign(model=options.name, seed=options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{options.name}-{options.seed}"
    rows.to_parquet(options.out / f"{name}.parquet", index=False)
    shown = "scaled_latency_s" if options.duel else "latency_s"
    drawn = [found.assign(latency_s=found[shown]) for found in (ours, stock)]
    draw(drawn[0], drawn[1], name, options.out / f"{name}.png")
    print(table(rows))


def _medians(duel: Path) -> dict[str, dict[str, float]]:
    """Latency in turn of each side's fastest program, by side and subgraph."""
    rows = pd.read_parquet(duel)
    found: dict[str, dict[str, float]] = {}
    for side in rows["side"].unique():
        medians = rows[rows["side"] == side].groupby("subgraph_id")["latency_s"].median()
        found[side] = {str(key): float(value) for key, value in medians.items()}
    return found


def _counted(run: Path, weights: Mapping[str, int]) -> Mapping[str, int]:
    """The subgraphs of a run that its curve counts, with their calls: stock's, or all if it computes them otherwise."""
    found = tables.read(run.parents[1] / "subgraphs.parquet", schemas.SUBGRAPHS).to_pandas()
    own: dict[str, int] = dict(found.loc[found["tunable"], ["subgraph_id", "weight"]].itertuples(index=False))
    others = set(weights) - set(own)
    if not others:
        return weights
    print(f"{len(others)} of stock's {len(weights)} subgraphs are computed otherwise here: the curve counts all "
          f"{len(own)} of this run")  # fmt: skip
    return own


if __name__ == "__main__":
    main()
