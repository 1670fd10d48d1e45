"""How well cost models order programs that they have not seen: one model for all, one a family, one each (FamilySeer,
figures 1 and 2, table 2), from scratch and from base models, by how many programs of a subgraph they were trained on.
A family's model learns from its own programs alone, as FamilySeer has it, or from other families' beside them, which
count less (`[train] others`).

    python benchmarks/pool/accuracy.py --pool FOLDER --out FILE.parquet [--splits 10] [--samples 8,16,32,64]

The pool was recorded twice. Models are trained on latencies of the first pass; held-out programs are compared by those
of the second. The ceiling is how many pairs the first pass itself orders as the second does: no model of single
measurements is asked for more. Intervals of 95 % are by bootstrap over subgraphs of the means over splits; those of
differences are of pairs of the same subgraph.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a process a core
sys.path.append(str(Path(__file__).resolve().parents[1]))

import intervals
import numpy as np
import pandas as pd
from deep import DeepPool, in_parallel

from lib.machine import targets
from lib.tuning.base import base_models
from lib.tuning.cost_model import TrainConfig, accuracy
from lib.tuning.families import cluster
from stages.train import fit

_FAMILY = "core-operator"
KINDS = (  # clustering; whether on base models, of which there is one for each operator; whether others teach, too
    (_FAMILY, False, False), (_FAMILY, False, True), (_FAMILY, True, False), (_FAMILY, True, True),
    ("single", False, False), ("each", False, False), ("each", True, False),
)  # fmt: skip
_DEFAULT = (_FAMILY, False, True)  # less base models
_LOOKS = (1, 8)
CONFIG = TrainConfig(min_samples=2)
_LEAST_HELD_OUT = 16  # programs of a subgraph that is counted


def split(pool: DeepPool, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of n random programs of each subgraph, and those of all others."""
    shuffled = np.random.default_rng([seed, 0]).permutation(len(pool.rows))
    rank = pool.rows.iloc[shuffled].groupby("subgraph_id").cumcount().to_numpy()
    return shuffled[rank < n], shuffled[rank >= n]


def told(scores: np.ndarray, rows: pd.DataFrame) -> dict[str, float]:
    """How well scores foretold the held-out programs of one subgraph."""
    speeds = np.nan_to_num(1 / rows["second"].to_numpy(), nan=0.0)
    ceiling = accuracy(-np.nan_to_num(rows["first"].to_numpy(), nan=np.inf), speeds)
    found = accuracy(scores, speeds)
    best = np.maximum.accumulate(speeds[np.argsort(-scores, kind="stable")])
    regrets = {f"regret {n}": float(speeds.max() / best[n - 1]) for n in _LOOKS}
    return {
        "pairwise": found.pairwise, "ceiling": ceiling.pairwise, "correlation": found.rank_correlation,
        "top recall": found.top_recall, "top recall ceiling": ceiling.top_recall, **regrets,
    }  # fmt: skip


def of_split(folder: Path, n: int, seed: int) -> list[dict[str, Any]]:
    """Rows for each subgraph under each kind of model."""
    pool = DeepPool(folder)
    known, held_out = split(pool, n, seed)
    described = [SimpleNamespace(**row) for row in pool.subgraphs]
    bases = base_models(targets.cpu_target().instructions)
    rows = []
    for clustering, with_base, with_others in KINDS:
        families: dict[str, list[Any]] = {}
        for subgraph, family in zip(described, cluster(described, clustering), strict=True):
            families.setdefault(family, []).append(subgraph)
        for members in families.values():
            base = bases.of(members[0].core_operator) if with_base else None
            is_own = np.isin(pool.rows["subgraph_id"].to_numpy(str)[known], [m.subgraph_id for m in members])
            own, others = (pool.samples(known[chosen], "first") for chosen in (is_own, ~is_own))
            model = fit(own, CONFIG, seed, base.model() if base else None, others if with_others else None)
            if model is None:
                continue
            for member in members:
                mine = held_out[(pool.rows["subgraph_id"].to_numpy()[held_out] == member.subgraph_id)]
                if len(mine) < _LEAST_HELD_OUT:
                    continue
                found = told(model.predict(pool.features[mine]), pool.rows.iloc[mine])
                rows.append({
                    "clustering": clustering, "base": with_base, "others": with_others, "samples": n, "split": seed,
                    "subgraph_id": member.subgraph_id, "operator": member.core_operator, **found,
                })  # fmt: skip
    return rows


def summary(rows: pd.DataFrame) -> Iterator[str]:
    """A line of Markdown for each kind of model and number of samples."""
    yield "| samples | model | pairs right | of the ceiling | less family | top recall | best of 1 | best of 8 |"
    yield "|---|---|---|---|---|---|---|---|"
    for n, of_n in rows.groupby("samples"):
        kinds: dict[Any, pd.DataFrame] = {
            kind: each.groupby("subgraph_id").mean(numeric_only=True)
            for kind, each in of_n.groupby(["clustering", "base", "others"])
        }
        for (clustering, base, others), own in kinds.items():
            yield (
                f"| {n} | {clustering}{' and others' if others else ''}{' on base' if base else ''} "
                f"| {_text(own['pairwise'])} | {_text(own['pairwise'] / own['ceiling'])} "
                f"| {_text(own['pairwise'] - kinds[_DEFAULT]['pairwise'])} "
                f"| {own['top recall'].mean():.2f} of {own['top recall ceiling'].mean():.2f} "
                f"| {_geometric(own['regret 1']):.3f} | {_geometric(own['regret 8']):.3f} |"
            )


def _text(values: pd.Series) -> str:
    array = values.to_numpy()
    return intervals.estimate(lambda drawn: array[drawn].mean(axis=-1), len(array)).text()


def _geometric(values: pd.Series) -> float:
    return float(np.exp(np.log(values).mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--samples", default="8,16,32,64")
    given = parser.parse_args()
    orders = [(given.pool, int(n), seed) for n in given.samples.split(",") for seed in range(given.splits)]
    print("\n".join(summary(in_parallel(of_split, orders, given.out))))


if __name__ == "__main__":
    main()
