"""What programs with a primitive of TVM bring: of each subgraph of a pool, the fastest with it and without.

    python benchmarks/pool/having.py --primitive RFactor --pools FOLDER ...

Of as many programs with as without: where more were recorded of one kind, its fastest is that to be expected of so many
drawn at random. Their latencies are of one measurement each.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import intervals
import numpy as np

from lib.contracts import tables
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, SUBGRAPHS
from lib.tir import analysis
from lib.tir.workload import load_module
from lib.tuning.history import latencies_s

_FEWEST = 3  # programs of a kind


def rows(folder: Path, primitive: str) -> Iterator[tuple[str, list[int], int, float, float]]:
    """Of each subgraph with programs of both kinds: core operator, extents, how many are compared, seconds with the
    primitive and without."""
    candidates = tables.read(folder / "candidates.parquet", CANDIDATES).select(["candidate_id", "subgraph_id", "trace"])
    measured = tables.read(folder / "measurements.parquet", MEASUREMENTS)
    latency = dict(zip(measured["candidate_id"].to_pylist(), latencies_s(measured), strict=True))
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in candidates.to_pylist():
        seconds = latency.get(row["candidate_id"], math.nan)
        if math.isfinite(seconds):
            found.setdefault(row["subgraph_id"], ([], []))[f'"{primitive}"' in row["trace"]].append(seconds)
    for row in tables.read(folder / "subgraphs.parquet", SUBGRAPHS).to_pylist():
        without, having = found.get(row["subgraph_id"], ([], []))
        n = min(len(without), len(having))
        if n >= _FEWEST:
            reduction = analysis.only_reduction(load_module(row["workload"])["main"])
            extents = [int(axis.dom.extent) for axis in reduction.iter_vars] if reduction else []
            yield row["core_operator"], extents, n, fastest(having, n), fastest(without, n)


def fastest(latencies: Sequence[float], n: int) -> float:
    """Expected of the fastest of n of them, drawn at random."""
    total = len(latencies)
    chances = [math.comb(total - place - 1, n - 1) / math.comb(total, n) for place in range(total)]
    return float(np.dot(np.sort(latencies), chances))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primitive", required=True)
    parser.add_argument("--pools", type=Path, nargs="+", required=True)
    given = parser.parse_args()
    found = [row for folder in given.pools for row in rows(folder, given.primitive)]
    print(f"| operator | extents | programs of each | with {given.primitive}, us | without, us | gain |")
    print("|---|---|---|---|---|---|")
    for operator, extents, n, having, without in sorted(found, key=lambda row: row[3] / row[4]):
        shape = " x ".join(map(str, extents))
        print(f"| {operator} | {shape} | {n} | {having * 1e6:.0f} | {without * 1e6:.0f} | {without / having:.2f} |")
    gains = [without / having for *_, having, without in found]
    mean = intervals.estimate(intervals.geometric_mean_of(gains), len(gains))
    print(f"| geometric mean | of {len(gains)} | | | | {mean.text()} |")


if __name__ == "__main__":
    main()
