"""Bring recorded pools into today's features, which follow from their workloads and traces: nothing is measured.

    python benchmarks/pool/renew.py --pools FOLDER ...

What `PerStoreFeature` said of lowered programs stays as it is.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from train_base import target_of

from lib.contracts import tables
from lib.contracts.schemas import CANDIDATES, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.search import nest
from lib.search.features import N_LOWERED
from lib.tir.workload import load_module


def renew(folder: Path) -> pa.Table:
    """The candidates of a pool, written anew; those without features stay without."""
    path = folder / "candidates.parquet"
    candidates, target = pq.read_table(path), target_of(folder)  # of whichever version
    described = tables.read(folder / "subgraphs.parquet", SUBGRAPHS).select(["subgraph_id", "workload"])
    workloads = {row["subgraph_id"]: row["workload"] for row in described.to_pylist()}
    shapes: dict[str, nest.Workload] = {}
    features = []
    for row in candidates.select(["subgraph_id", "trace", "features"]).to_pylist():
        subgraph_id, before = row["subgraph_id"], np.asarray(row["features"], np.float32)
        if subgraph_id not in shapes:
            shapes[subgraph_id] = nest.describe(load_module(workloads[subgraph_id]), target)
        lowered = before[-N_LOWERED:] if len(before) > N_LOWERED else before[:0]
        features.append(
            np.concatenate([nest.features(shapes[subgraph_id], row["trace"]), lowered]) if len(before) else before
        )
    column = pa.array(features, CANDIDATES.field("features").type)
    renewed = candidates.set_column(candidates.column_names.index("features"), "features", column)
    tables.write(renewed, path, CANDIDATES, Provenance(session="pool"))
    return renewed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", nargs="+", type=Path, required=True)
    for pool in parser.parse_args().pools:
        print(f"{pool}: {len(renew(pool))} candidates", flush=True)
