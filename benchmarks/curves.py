"""How soon a run reaches what stock MetaSchedule reaches, and how far both come in the same time.

    python benchmarks/curves.py --ours RUN --stock FOLDER --name NAME [--duel FILE]

RUN is a run's folder below `artifacts/`, FOLDER what `stock.py` left. A curve is the sum of the lowest latencies so
far, each times how often an inference calls its subgraph, over the wall time of tuning; it begins when each was
measured. Both sides count the subgraphs that stock tuned. With what `duel.py` left, latencies are scaled, subgraph by
subgraph and side by side, such that the fastest program takes what it took there, in turn with the other side's: the
machine was not equally fast while one and while the other was tuned. Leaves NAME-ours.parquet, NAME-stock.parquet and
NAME.png in `benchmarks/curves/`.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from lib import schemas, tables
from lib.layout import RunFiles

_OUT = Path(__file__).parent / "curves"
NEAR = 1.05  # times the latency that is to be reached


def of_run(run: Path) -> pd.DataFrame:
    """Every measurement of a run: seconds of tuning until it was known, subgraph and latency (NaN if it failed)."""
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
        parts.append(pd.DataFrame({"seconds": known, "subgraph_id": rows["subgraph_id"], "latency_s": latencies}))
        began += sum(spent)
    return pd.concat(parts).sort_values("seconds", kind="stable", ignore_index=True)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--stock", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--duel", type=Path)
    options = parser.parse_args()
    measured = pd.read_parquet(options.stock / "curve.parquet")
    weights: dict[str, int] = dict(measured[["subgraph_id", "weight"]].drop_duplicates().itertuples(index=False))
    mine = tables.read(options.ours.parents[1] / "subgraphs.parquet", schemas.SUBGRAPHS).to_pandas()
    own: dict[str, int] = dict(mine.loc[mine["tunable"], ["subgraph_id", "weight"]].itertuples(index=False))
    shared = set(own) & set(weights)
    if len(shared) < len(weights):  # of another graph (Winograd's convolutions): all of it then
        print(f"{len(weights) - len(shared)} of stock's {len(weights)} subgraphs are computed otherwise here: "
              f"the curve counts all {len(own)} of this run")  # fmt: skip
    else:
        own = {key: own[key] for key in weights}
    mine_measured = of_run(options.ours)
    if options.duel:
        in_turn = pd.read_parquet(options.duel).groupby("subgraph_id")[["ours", "stock"]].median().to_dict()
        measured, mine_measured = scaled(measured, in_turn["stock"]), scaled(mine_measured, in_turn["ours"])
    stock, ours = curve(measured, weights), curve(mine_measured, own)
    _OUT.mkdir(exist_ok=True)
    stock.to_parquet(_OUT / f"{options.name}-stock.parquet", index=False)
    ours.to_parquet(_OUT / f"{options.name}-ours.parquet", index=False)
    draw(ours, stock, options.name, _OUT / f"{options.name}.png")
    final = stock["latency_s"].min()
    print(f"{options.name}: stock {final * 1e3:.3f} ms after {stock['seconds'].max():.0f} s and "
          f"{stock['trials'].max():.0f} trials; ours {ours['latency_s'].min() * 1e3:.3f} ms after "
          f"{ours['seconds'].max():.0f} s and {ours['trials'].max():.0f} trials")  # fmt: skip
    for label, goal in (("to stock's final latency", final), (f"to {NEAR:.2f} of it", NEAR * final)):
        (theirs_s, theirs_n), (ours_s, ours_n) = reached(stock, goal), reached(ours, goal)
        print(f"  {label}: stock {theirs_s:.0f} s, {theirs_n:.0f} trials; ours {ours_s:.0f} s, {ours_n:.0f} trials: "
              f"{theirs_s / ours_s:.1f}x sooner, {theirs_n / ours_n:.1f}x fewer")  # fmt: skip


if __name__ == "__main__":
    main()
