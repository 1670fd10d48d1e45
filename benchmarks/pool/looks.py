"""How few measurements are best spread over a model's subgraphs: as many of each, or more where more is to lose.

    python benchmarks/pool/looks.py --pools FOLDER ... [--each 1 2 3]

Models of the pools are left out in turn, as in `train_base.py`. Of each subgraph that no other model has, the first n
programs in the order in which they were foretold are measured, and the fastest is taken; where n is 0, the first one,
unmeasured. Told is how many times as slow a model's subgraphs are as with the fastest recorded programs, by their
calls, as the geometric mean over models: with the same n for each subgraph; and with as many measurements in all, given
in turn to where the regrets on the base models' card, times the subgraph's share of the time, shrink most for one.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from train_base import Pool, foretold, target_class

from lib.contracts import tables
from lib.contracts.schemas import MODELS
from lib.tuning.base import base_models
from lib.tuning.cost_model import LOOKS

_LEAST_SUBGRAPHS = 4  # of a model, for which there is something to spread


def spread(shares: Sequence[float], regrets: np.ndarray, n: int) -> list[int]:
    """Measurements of each subgraph, n in all.

    Args:
        shares: Of the model's time.
        regrets: Subgraphs x LOOKS, after 1, 2, ... measurements; without any it is what it is after one.
    """
    given = [0] * len(shares)
    known = np.concatenate([regrets[:, :1], regrets], axis=1)
    while n:
        gains = [
            (share * (known[i, given[i]] - known[i, given[i] + more]) / more, i, more)
            for i, share in enumerate(shares)
            for more in range(1, min(n, LOOKS - given[i]) + 1)
        ]
        gain, i, more = max(gains, default=(0.0, 0, 0))
        if gain <= 0:
            break
        given[i], n = given[i] + more, n - more
    return given


def of_model(rows: pd.DataFrame, weights: np.ndarray, known: np.ndarray, each: int) -> dict[str, float]:
    """Of one model: a row for each subgraph, with `regret 1`, ...; times as slow as could be."""
    regrets = rows[[f"regret {n}" for n in range(1, LOOKS + 1)]].to_numpy()
    shares = weights / weights.sum()

    def whole(given: Sequence[int]) -> float:
        return float(sum(shares[i] * regrets[i, max(0, n - 1)] for i, n in enumerate(given)))

    return {"alike": whole([each] * len(rows)), "spread": whole(spread(shares.tolist(), known, each * len(rows)))}


def _calls(folder: Path) -> dict[tuple[str, str], int]:
    rows = tables.read(folder / "models.parquet", MODELS).to_pylist()
    return {(row["name"], key): n for row in rows for key, n in zip(row["subgraphs"], row["calls"], strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", nargs="+", type=Path, required=True)
    parser.add_argument("--each", nargs="+", type=int, default=[1, 2, 3])
    given = parser.parse_args()
    pool, bases = Pool(given.pools, []), base_models(target_class(given.pools[0]))
    calls = {key: n for folder in given.pools for key, n in _calls(folder).items()}
    operators = [operator for operator in np.unique(pool.operators) if bases.of(operator)]
    told = pd.concat([foretold(pool, pool.is_quiet, operator, []) for operator in operators])
    means = told.groupby(["model", "subgraph", "group", "operator"], as_index=False).mean(numeric_only=True)
    rows = means.sort_values("programs").drop_duplicates(["model", "subgraph"], keep="last")
    found = []
    for name, own in rows.groupby("model"):
        if len(own) < _LEAST_SUBGRAPHS:
            continue
        weights = own["best"].to_numpy(float) * [calls[str(name), key] for key in own["subgraph"]]
        known = np.array([base.regrets for operator in own["operator"] if (base := bases.of(operator))])
        found += [{"model": name, "each": n, **of_model(own, weights, known, n)} for n in given.each]
    logs = pd.DataFrame(found).set_index(["model", "each"]).apply(np.log)
    slower = logs.groupby("each").mean().apply(np.exp)
    print(f"{len(found) // len(given.each)} models\n{slower.round(3).to_string()}")


if __name__ == "__main__":
    main()
