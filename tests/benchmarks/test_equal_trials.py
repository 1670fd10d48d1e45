"""One product tuned by stock MetaSchedule and in both spaces, with equal trials."""

import equal_trials
import pandas as pd
import pytest

from tests.benchmarks.conftest import run_script

SIDES = ("stock, rounds of 10", "ours in stock's space", "ours")
TRIALS = 10


@pytest.fixture(scope="module")
def tuned(product, tmp_path_factory):
    folder = tmp_path_factory.mktemp("equal")
    options = ("--trials-per-subgraph", TRIALS, "--sides", *SIDES, "--turns", 3, "--out", folder)
    done = run_script("equal_trials.py", "--model", product.onnx, *options)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_all_sides_have_the_same_number_of_trials(tuned):
    rows = pd.read_parquet(tuned[0] / "trials.parquet")

    for side in SIDES:
        own = rows[rows["side"] == side]
        assert own["trial"].tolist() == list(range(1, TRIALS + 1)), side
        assert own["estimate_s"].dropna().is_monotonic_decreasing
        assert own["estimate_s"].min() == own["latency_s"].min()
        assert own["trace"].notna().sum() == 1
        assert own.loc[own["trace"].notna(), "latency_s"].item() == own["latency_s"].min()


def test_stocks_space_is_not_ours(tuned):
    rows = pd.read_parquet(tuned[0] / "trials.parquet")

    won = rows.dropna(subset="trace").set_index("side")["trace"]
    tilings = {side: trace.count("SamplePerfectTile") for side, trace in won.items()}
    assert tilings["ours in stock's space"] == tilings["stock, rounds of 10"] != tilings["ours"]


def test_the_winners_of_all_sides_are_timed_in_turn(tuned):
    rows = pd.read_parquet(tuned[0] / "winners.parquet")

    assert rows.groupby("turn")["side"].agg(set).tolist() == [set(SIDES)] * 3
    assert (rows["latency_s"] > 0).all()


def test_the_table_is_made_from_the_rows_and_nothing_is_tuned_twice(tuned, product):
    folder, printed = tuned
    kept = (folder / "trials.parquet").read_bytes()

    found = run_script("equal_trials.py", "--table", folder).stdout

    assert found.strip() in printed
    assert found.count("| geometric mean |") == len(SIDES)
    assert f"| {SIDES[0]} | geometric mean | | | | | 1.00 [1.00, 1.00] |" in found
    again = run_script("equal_trials.py", "--model", product.onnx, "--trials-per-subgraph", TRIALS, "--sides", *SIDES,
                       "--turns", 1, "--out", folder)  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert (folder / "trials.parquet").read_bytes() == kept


def test_the_summary_has_each_model_and_side_and_their_means(tuned):
    folder, _ = tuned
    of_one = run_script("equal_trials.py", "--table", folder).stdout.splitlines()

    lines = run_script("equal_trials.py", "--table", folder, folder).stdout.splitlines()[2:]

    for side in SIDES[1:]:
        [of_seeds] = [line for line in of_one if line.startswith(f"| {side} | geometric mean |")]
        mean = of_seeds.split(" | ")[-1].removesuffix(" |")
        of_models = [line for line in lines if f"| 1 | {TRIALS} | {side} |" in line]
        assert len(of_models) == 2
        assert all(line.endswith(f"| {mean} |") for line in of_models)
        [over_all] = [line for line in lines if line.startswith(f"| all | | | {side} |")]
        assert over_all.split(" | ")[-1].split(" [")[0] == mean.split(" [")[0]
        assert over_all.endswith("(of 2) |")


def test_ways_are_of_equal_trials_but_for_the_one_that_says_otherwise():
    assert {name: way.trials_per_subgraph for name, way in equal_trials.WAYS.items() if way.trials_per_subgraph} == {
        "stock, 512 a subgraph": 512
    }
