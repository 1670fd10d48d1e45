"""Stock MetaSchedule on one product, in rounds of a chosen size."""

import json

import numpy as np
import pandas as pd
import sides

from lib.tir.traces import EMPTY_TRACE


def test_each_trial_is_a_row_and_a_round_has_as_many_as_asked_for(by_stock):
    curve = pd.read_parquet(by_stock / "curve.parquet")

    assert curve.groupby("seconds").size().tolist() == [4, 4]
    assert curve["seconds"].is_monotonic_increasing
    assert curve["latency_s"].min() > 0
    assert set(curve["weight"]) == {1}


def test_the_fastest_trace_is_kept_with_where_it_comes_from(by_stock):
    kept = json.loads((by_stock / "traces.json").read_text())
    curve = pd.read_parquet(by_stock / "curve.parquet")

    assert set(kept["traces"]) == set(curve["subgraph_id"])
    assert all(trace != EMPTY_TRACE for trace in kept["traces"].values())
    assert (kept["trials_per_round"], kept["seed"]) == (4, 3)
    assert kept["revision"]
    assert kept["seconds"] >= curve["seconds"].max()


def test_its_library_computes_the_model(by_stock, product, tmp_path):
    [x] = sides.inputs(by_stock)
    np.savez(tmp_path / "inputs.npz", x)
    with sides.Side("library", by_stock, tmp_path / "inputs.npz", tmp_path / "out.npz", 1) as library:
        [found] = library.load()

    np.testing.assert_allclose(found, product.reference(x), atol=1e-5)
