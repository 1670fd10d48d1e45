"""A picture of `versus.py`'s rows: how much longer the better of the vendors takes than ours, model by model.

python benchmarks/ratios.py --rows benchmarks/vendors --out benchmarks/vendors/ratios.png
"""

import argparse
from pathlib import Path

import intervals
import pandas as pd
import versus
from intervals import Estimate
from matplotlib.figure import Figure


def ratios(rows: pd.DataFrame, side: str) -> dict[str, Estimate]:
    """For each model the better vendor's latency over a side's, with its 95 % interval; the smallest first."""
    found: dict[str, Estimate] = {}
    for model, part in rows.groupby("model"):
        ratio = versus.Race(part).ratio(side)
        if ratio:
            found[str(model)] = intervals.estimate(*ratio)
    return dict(sorted(found.items(), key=lambda item: item[1].value))


def draw(found: dict[str, Estimate], title: str) -> Figure:
    """A bar a model from 1, where both are equally fast, with a line for the interval."""
    figure = Figure(figsize=(8, 0.6 + 0.3 * len(found)), layout="constrained")
    axes = figure.subplots()
    values = [estimate.value for estimate in found.values()]
    colours = ["tab:blue" if value >= 1 else "tab:orange" for value in values]
    axes.barh(list(found), [value - 1 for value in values], left=1, color=colours, height=0.6)
    for n, estimate in enumerate(found.values()):
        axes.plot([estimate.low, estimate.high], [n, n], color="black", linewidth=1.2)
        edge = max(estimate.high, 1.0)
        axes.annotate(
            f"{estimate.value:.2f}", (edge, n), xytext=(4, 0), textcoords="offset points", va="center", size=9
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("better of the vendors / ours (higher: ours is faster)")
    axes.set_xlim(right=max([1.0, *(estimate.high for estimate in found.values())]) * 1.08)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Draw the rows of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--side", default="ours")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = versus.read(options.rows)
    cpu, threads, date = (rows[column].iloc[0] for column in ("cpu", "threads", "date"))
    title = f"f32, batch 1, {threads} threads of an {cpu}, {date}"
    draw(ratios(rows, options.side), title).savefig(options.out, dpi=120)


if __name__ == "__main__":
    main()
