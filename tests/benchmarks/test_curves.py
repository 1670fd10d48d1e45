"""Tuning curves on rows made by hand."""

import curves
import numpy as np
import pandas as pd
import pytest

WEIGHTS = {"a": 2, "b": 1}


def measured(*rows):
    return pd.DataFrame(rows, columns=["seconds", "subgraph_id", "latency_s"])


ROWS = measured((1, "a", 5.0), (2, "other", 1.0), (3, "b", 7.0), (4, "a", np.nan), (5, "a", 4.0), (6, "b", 9.0))


def test_a_curve_begins_when_all_subgraphs_are_known_and_never_rises():
    found = curves.curve(ROWS, WEIGHTS)

    assert found["seconds"].tolist() == [3, 4, 5, 6]
    assert found["trials"].tolist() == [3, 4, 5, 6]  # those of subgraphs that do not count are trials, too
    assert found["latency_s"].tolist() == [17, 17, 15, 15]


def test_a_curve_without_some_subgraph_is_empty():
    assert curves.curve(ROWS[ROWS["subgraph_id"] != "b"], WEIGHTS).empty


def test_scaling_sets_the_fastest_and_keeps_proportions():
    found = curves.scaled(ROWS, {"a": 8.0})

    expected = [10, 1, 7, np.nan, 8, 9]
    np.testing.assert_array_equal(found["latency_s"], expected)


def test_unscaled_data_stays_beside_scaled():
    found = curves.both(ROWS, WEIGHTS, {"a": 8.0, "b": 1.0})

    assert found["latency_s"].tolist() == [17, 17, 15, 15]
    assert found["scaled_latency_s"].tolist() == [21, 21, 17, 17]
    assert curves.both(ROWS, WEIGHTS, {})["scaled_latency_s"].isna().all()


def test_what_is_never_reached_is_not_a_number():
    found = curves.curve(ROWS, WEIGHTS)

    assert curves.reached(found, 15.0) == (5, 5)
    assert np.isnan(curves.reached(found, 14.0)).all()


def side(name, seed, seconds, latencies):
    rows = pd.DataFrame({"seconds": seconds, "latency_s": latencies, "scaled_latency_s": np.nan})
    return rows.assign(trials=range(1, len(rows) + 1), model="net", seed=seed, side=name)


def test_the_table_has_each_seed_and_their_geometric_mean():
    stock = [100.0, 200.0, 400.0], [3.0, 2.0, 1.0]
    rows = pd.concat(
        [
            *(side("stock", seed, *stock) for seed in (0, 1)),
            side("ours", 0, [10.0], [1.0]),
            side("ours", 1, [40.0, 100.0], [2.0, 0.9]),
        ]
    )

    lines = curves.table(rows).splitlines()

    assert lines[0] == "Latencies as measured while tuning:"
    assert lines[4] == "| net | 0 | 1000 (400, 3) | 1000 (10, 1) | 40.0x | 3.0x | 40.0x | 3.0x |"
    assert lines[5] == "| net | 1 | 1000 (400, 3) | 900 (100, 2) | 4.0x | 1.5x | 4.0x | 1.5x |"
    assert lines[6].startswith("| geometric mean | | | | 12.6 [4.00, 40.0] (2 of 2) | 2.12 [1.50, 3.00] (2 of 2) |")


def test_a_latency_that_ours_never_reaches_is_said_so():
    rows = pd.concat([side("stock", 0, [100.0], [1.0]), side("ours", 0, [10.0], [2.0])])

    text = curves.table(rows)

    assert "never | never | never | never" in text
    assert "- (0 of 1)" in text


@pytest.mark.parametrize("kind", ["latency_s", "scaled_latency_s"])
def test_pictures_are_drawn_of_either_kind(kind, tmp_path):
    found = curves.both(ROWS, WEIGHTS, {"a": 8.0, "b": 1.0})
    shown = found.assign(latency_s=found[kind])

    curves.draw(shown, shown, "net", tmp_path / "net.png")

    assert (tmp_path / "net.png").read_bytes().startswith(b"\x89PNG")
