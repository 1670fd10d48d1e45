"""A pool that was recorded twice: one latency of each program for each pass, and what is left when noise is taken out.

A machine may be slower an hour later. In the second pass all programs of a subgraph are measured together, so those of
each moment of the first pass are scaled by the median of their ratios between the passes.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lib.contracts import tables
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, MODELS, SUBGRAPHS
from lib.tuning.cost_model import Samples
from lib.tuning.history import latencies_s, matrix

_ONE_MOMENT_S = 60.0


class DeepPool:
    """Its programs, in the order of the table.

    Attributes:
        rows: One for each program: candidate_id, subgraph_id, program_hash, `first` and `second`, the latencies of the
            two passes in seconds, the first one scaled, and `latency`, their geometric mean. NaN for what failed in
            either.
        features: n x N_FEATURES.
        subgraphs: Rows of SUBGRAPHS, those of which there are programs.
    """

    def __init__(self, folder: Path) -> None:
        """Read it.

        Raises:
            MissingInput: A table is not there; a pool of one pass has no `again.parquet`.
        """
        self.folder = folder
        candidates = tables.read(folder / "candidates.parquet", CANDIDATES)
        rows = candidates.select(["candidate_id", "subgraph_id", "program_hash", "origin"]).to_pandas()
        rows = rows.join(_timed(folder / "measurements.parquet", "first"), on="candidate_id")
        self.rows = rows.join(_timed(folder / "again.parquet", "second"), on="candidate_id")
        self._align()
        self.features = matrix(candidates["features"])
        have = set(rows["subgraph_id"])
        described = tables.read(folder / "subgraphs.parquet", SUBGRAPHS).to_pylist()
        self.subgraphs: list[dict[str, Any]] = [row for row in described if row["subgraph_id"] in have]

    def _align(self) -> None:
        rows = self.rows
        ratio = rows["second"] / rows["first"]
        rows["first"] *= ratio.groupby(moments(rows, "first_at")).transform("median")
        rows["latency"] = np.sqrt(rows["first"] * rows["second"])

    def samples(self, chosen: np.ndarray, column: str = "latency") -> Samples:
        """Some programs, by their places, with the latencies of a column."""
        rows = self.rows.iloc[chosen]
        return Samples(self.features[chosen], rows["subgraph_id"].to_numpy(str), rows[column].to_numpy(float))

    def weights(self) -> dict[str, float]:
        """By subgraph: its calls, each model's divided by its latency, so that a model counts as much as another."""
        best = self.rows.groupby("subgraph_id")["latency"].min()
        found = dict.fromkeys(best.index, 0.0)
        for model in tables.read(self.folder / "models.parquet", MODELS).to_pylist():
            calls = {key: n for key, n in zip(model["subgraphs"], model["calls"], strict=True) if key in found}
            whole = sum(n * best[key] for key, n in calls.items())
            for key, n in calls.items():
                found[key] += n / whole
        return found


def _timed(path: Path, name: str) -> pd.DataFrame:
    """Latencies of a pass, by candidate, and when they were taken."""
    measured = tables.read(path, MEASUREMENTS)
    columns = {"candidate_id": measured["candidate_id"].to_pylist(), name: latencies_s(measured),
               f"{name}_at": measured["measured_at"].to_pylist()}  # fmt: skip
    return pd.DataFrame(columns).drop_duplicates("candidate_id").set_index("candidate_id")


def moments(rows: pd.DataFrame, at: str) -> pd.Series:
    """Which moment each measurement is of, as a number: those of one subgraph, none a minute after the one before.

    Args:
        at: The column with their times.
    """
    order = rows.sort_values(["subgraph_id", at])
    begins = (order[at].diff() > _ONE_MOMENT_S) | (order["subgraph_id"] != order["subgraph_id"].shift())
    return begins.cumsum().reindex(rows.index)


def in_parallel(
    work: Callable[..., list[dict[str, Any]]], orders: Sequence[tuple[Any, ...]], out: Path
) -> pd.DataFrame:
    """The rows that the work leaves of each order, in their order; kept in a file."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        rows = pd.DataFrame([row for part in processes.map(work, *zip(*orders, strict=True)) for row in part])
    rows.to_parquet(out)
    return rows
