"""The table beside the vendors, from rows made by hand and from a real run of the script."""

import importlib.util
import json
import shutil

import numpy as np
import pandas as pd
import pytest
import versus

from lib.contracts import weights
from lib.runtime.family_tuner_runtime.weights import Mapped
from tests.benchmarks.conftest import run_script

COMMON = {"max_error": 1e-6, "reference": "ONNX Runtime", "failure": "", "threads": 2, "cpu": "a CPU"}
COMMON |= {"revision": "abc", "date": "2026-01-01", "version": "1", "between_cores": np.nan}


def test_where_no_turn_had_a_common_cache_all_the_time_all_count():
    speeds = {"ours": [75e9, 25e9, 75e9], "OpenVINO": [25e9, 75e9, 25e9]}
    rows = pd.concat(
        rows_of("net", side, kind, [ms] * 3).assign(between_cores=speeds[side])
        for side, kind, ms in (("ours", "library", 1.0), ("OpenVINO", "openvino", 2.0))
    )

    assert "| net | 1.00 [1.00, 1.00] | 2.00 [2.00, 2.00] | 2.00 [2.00, 2.00] |" in versus.table(rows)


def test_turns_in_which_cores_shared_no_cache_are_apart():
    near, far = {"between_cores": 75e9}, {"between_cores": 25e9}
    ours = [1.0, 9.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0]
    theirs = [3.0, 18.0, 3.0, 3.0, 18.0, 18.0, 18.0, 18.0]
    rows = pd.concat(
        rows_of("net", side, kind, latencies).assign(
            between_cores=[(near if ms < 5 else far)["between_cores"] for ms in latencies]
        )
        for side, kind, latencies in (("ours", "library", ours), ("OpenVINO", "openvino", theirs))
    )

    told = versus.table(rows)

    assert "| net | 1.00 [1.00, 1.00] | 3.00 [3.00, 3.00] | 3.00 [3.00, 3.00] |" in told
    assert "| net | 5 | 2.00 [2.00, 2.00] |" in told
    assert "without a common cache" not in versus.table(rows[rows["latency_s"] < 5e-3])


def rows_of(model, side, kind, latencies_ms, **changed):
    turns = [
        {"model": model, "side": side, "kind": kind, "turn": turn, "latency_s": ms / 1e3, "n_inferences": 3}
        for turn, ms in enumerate(latencies_ms)
    ]
    return pd.DataFrame(turns).assign(**{**COMMON, **changed})


def failed(model, side, kind):
    one = {"turn": -1, "n_inferences": 0, "max_error": np.nan, "failure": "ImportError: no such thing", "version": ""}
    return rows_of(model, side, kind, [np.nan], **one)


RACE = pd.concat(
    [
        rows_of("net", "ours", "library", [1.0, 2.0, 4.0]),
        rows_of("net", "plain", "library", [2.0, 4.0, 8.0]),
        rows_of("net", "ONNX Runtime", "onnxruntime", [3.0, 6.0, 12.0], max_error=0.0),
        rows_of("net", "stock", "stock", [0.5, 1.0, 2.0]),
        failed("net", "OpenVINO", "openvino"),
        rows_of("slow net", "ours", "library", [30.0] * 3),
        rows_of("slow net", "ONNX Runtime", "onnxruntime", [20.0] * 3),
        rows_of("slow net", "OpenVINO", "openvino", [10.0] * 3),
    ],
    ignore_index=True,
)


def test_the_table_is_made_from_the_rows_that_were_kept(tmp_path):
    for model, part in RACE.groupby("model"):
        versus.write(part, tmp_path / f"{model}.parquet")

    found = versus.table(versus.read(tmp_path))

    lines = found.splitlines()
    assert lines[0] == (
        "| model | ours, ms | plain, ms | ONNX Runtime, ms | OpenVINO, ms | stock, ms | the better vendor / ours "
        "| the better vendor / plain | error | revision | date |"
    )
    assert lines[2] == (
        "| net | 2.00 [1.00, 4.00] | 4.00 [2.00, 8.00] | 6.00 [3.00, 12.0] | - | 1.00 [0.500, 2.00] "
        "| 3.00 [3.00, 3.00] | 1.50 [1.50, 1.50] | 1e-06 | abc | 2026-01-01 |"
    )
    assert lines[3] == (
        "| slow net | 30.0 [30.0, 30.0] | - | 20.0 [20.0, 20.0] | 10.0 [10.0, 10.0] | - | 0.333 [0.333, 0.333] | - "
        "| 1e-06 | abc | 2026-01-01 |"
    )
    assert "| 1.00 [1.00, 1.00] (of 2) | 1.50 [1.50, 1.50] (of 1) |" in lines[4]
    assert "- net, OpenVINO: ImportError: no such thing" in lines


def test_a_side_that_did_not_finish_is_not_compared():
    unfinished = pd.concat(
        [RACE[(RACE["model"] == "net") & (RACE["side"] != "OpenVINO")], rows_of("net", "OpenVINO", "openvino", [0.1])],
        ignore_index=True,
    )

    assert "| 3.00 [3.00, 3.00] |" in versus.table(unfinished)


@pytest.mark.parametrize(("error", "complaints"), [(1e-3, 0), (1.1e-3, 1), (np.inf, 1), (np.nan, 0)])
def test_differences_above_a_thousandth_are_complained_about(error, complaints):
    rows = rows_of("net", "ours", "library", [1.0, 1.0], max_error=error)

    found = versus.wrong(rows)

    assert len(found) == complaints
    assert all("net: ours differs from ONNX Runtime" in text for text in found)


@pytest.fixture(scope="module")
def race(by_stock, product, tmp_path_factory):
    """A real run, with a side that has other weights and one that has none."""
    folder = tmp_path_factory.mktemp("race")
    shutil.copytree(by_stock, folder / "wrong")
    right = Mapped(by_stock / "weights.safetensors").arrays()
    weights.write(folder / "wrong" / "weights.safetensors", {name: 1.01 * array for name, array in right.items()})
    libraries = [f"ours={by_stock}", f"wrong={folder / 'wrong'}", f"broken={folder / 'none'}", f"stock={by_stock}"]
    options = ("--turns", 3, "--patience", 1, "--seconds", 0.01, "--revision", "abc", "--out", folder / "rows")
    done = run_script("versus.py", "--libraries", *libraries, "--onnx", product.onnx, *options)
    return done, versus.read(folder / "rows"), folder / "rows"


def test_the_script_fails_and_names_the_side_that_computes_something_else(race):
    done, rows, _ = race

    assert done.returncode == 1
    assert "product: wrong differs from ONNX Runtime by 9.9e-03" in done.stderr or "by 1.0e-02" in done.stderr
    assert "ours differs" not in done.stderr
    errors = rows.groupby("side")["max_error"].first()
    assert errors["wrong"] == pytest.approx(0.01, rel=0.05)
    assert errors["ours"] < 1e-5
    assert errors["ONNX Runtime"] == 0


def test_what_cannot_run_is_a_row_that_says_why_and_the_others_go_on(race):
    _, rows, _ = race

    broken = rows[rows["side"] == "broken"]
    assert broken["turn"].tolist() == [-1]
    assert "manifest.json" in broken["failure"].item()
    for name in ("ours", "wrong", "stock", "ONNX Runtime"):
        own = rows[rows["side"] == name]
        assert own["turn"].tolist() == [0, 1, 2]
        assert (own["latency_s"] > 0).all()
        assert (own["n_inferences"] >= 1).all()
    openvino = rows.loc[rows["side"] == "OpenVINO", "failure"]
    if importlib.util.find_spec("openvino"):
        assert (openvino == "").all()
    else:
        assert "No module named 'openvino'" in openvino.item()


def test_rows_say_where_they_come_from(race, by_stock):
    _, rows, _ = race

    assert set(rows["model"]) == {"product"}
    assert set(rows["revision"]) == {"abc"}
    assert set(rows["threads"]) == {json.loads((by_stock / "manifest.json").read_text())["threads"]}
    assert rows["cpu"].str.len().min() > 0
    assert rows["date"].str.fullmatch(r"\d{4}-\d\d-\d\d").all()
    assert rows.set_index("side")["version"]["ONNX Runtime"].str.startswith("ONNX Runtime 1.").all()


def test_the_printed_table_is_that_of_the_rows(race):
    done, _, folder = race

    again = run_script("versus.py", "--table", folder)

    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() in done.stdout
    assert again.stdout.startswith("| model | ours, ms |")
