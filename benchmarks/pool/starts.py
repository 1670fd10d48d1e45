"""How base models of some classes of targets order recorded programs of another one: what that should start from.

    python benchmarks/pool/starts.py --pools benchmarks/pool/neon --classes avx2 avx512 [--unseen-by FOLDER ...]

For each core operator: the share of pairs ordered right; and, as geometric means over subgraphs, how much slower than
the fastest of a subgraph's programs are the one liked best, and the median one. `shape` orders by the estimate of the
register tile's efficiency alone, where programs have one; many are alike to it, and such pairs count as wrong. With
`--unseen-by`, subgraphs that these pools have are left out: models that were trained on them have seen them, if on
another CPU.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from train_base import Pool, _told

from lib.search import nest
from lib.tuning.base import base_models

_LEAST_PROGRAMS = 5  # of a group
_SLOWNESS = list(nest.NAMES).index("slowness")


def orders(pool: Pool, name: str, left_out: set[str]) -> pd.DataFrame:
    """A row for each operator that models of a class, or `shape`, say something of."""
    rows = []
    for operator in np.unique(pool.operators):
        own = (pool.operators == operator) & ~np.isin(pool.subgraphs, sorted(left_out)) & np.isfinite(pool.latencies)
        base = base_models(name).of(operator) if name != "shape" else None
        scores = base.model().predict(pool.features) if base else -pool.features[:, _SLOWNESS]
        own &= np.isfinite(scores)  # an untuned program has no register tile
        groups = [np.flatnonzero(own & (pool.groups == group)) for group in np.unique(pool.groups[own])]
        told = [_told(scores[chosen], pool.latencies[chosen]) for chosen in groups if len(chosen) >= _LEAST_PROGRAMS]
        if told and (base or name == "shape"):
            found = pd.DataFrame(told)
            slower = {key: np.exp(np.log(found[column]).mean()) - 1
                      for key, column in (("first", "regret 1"), ("median", "median"))}  # fmt: skip
            rows.append(
                {"by": name, "operator": operator, "n": len(found), "pairs": found["pairwise"].mean(), **slower}
            )
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", nargs="+", type=Path, required=True)
    parser.add_argument("--classes", nargs="+", default=["avx2", "avx512"])
    parser.add_argument("--unseen-by", nargs="*", type=Path, default=[])
    given = parser.parse_args()
    seen = set(Pool(given.unseen_by, []).subgraphs) if given.unseen_by else set()
    pool = Pool(given.pools, [])
    found = pd.concat([orders(pool, name, seen) for name in (*given.classes, "shape")])
    for column in ("n", "pairs", "first", "median"):
        print(f"{column}\n{found.pivot(index='operator', columns='by', values=column).round(3).to_string()}\n")


if __name__ == "__main__":
    main()
