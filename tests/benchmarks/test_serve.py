"""The script that measures a model in a server, with a small one and for a moment."""

import importlib.util

import pandas as pd
import pytest
import serve

from tests.benchmarks.conftest import run_script
from tests.helpers import SMALL
from tests.lib.runtime.conftest import small
from tests.lib.runtime.test_cpp import program

__all__ = ["program", "small"]  # fixtures
COMMON = {"model": "net", "cpu": "a CPU", "threads": 2, "version": "1", "revision": "abc", "date": "2026-01-01"}


def test_a_table_has_medians_with_their_range():
    rows = [
        {"turn": turn, "what": "first result", "side": side, "sessions": 1, "value": value, "unit": "s", **COMMON}
        for side, values in (("ours", (0.05, 0.04, 0.09)), ("theirs", (0.5, 0.5, 0.5)))
        for turn, value in enumerate(values)
    ]

    lines = serve.table(pd.DataFrame(rows)).splitlines()

    assert lines[2] == "| net | first result | 1 | ours | 50 | 40 | 90 | ms |"
    assert lines[3] == "| net | first result | 1 | theirs | 500 | 500 | 500 | ms |"
    assert lines[-1] == "a CPU, 2 cores, 3 turns; 1; revision abc, 2026-01-01"


@pytest.mark.acceptance
def test_the_script_measures_each_side_that_is_installed(small, program, tmp_path):
    given = ("--bundle", small.folder, "--onnx", SMALL, "--program", program, "--copies", 3)
    moments = ("--turns", 1, "--warm-s", 0.01, "--seconds", 0.05, "--out", tmp_path / "rows.parquet")

    done = run_script("serve.py", *given, *moments)

    assert done.returncode == 0, done.stderr
    rows = pd.read_parquet(tmp_path / "rows.parquet")
    assert (rows["value"] > 0).all()
    served = rows[rows["what"] == "inferences"]
    sides = {"ours", "ONNX Runtime"} | ({"OpenVINO"} if importlib.util.find_spec("openvino") else set())
    assert {(side, n) for side in sides for n in (1, 2, 4)} == set(zip(served["side"], served["sessions"], strict=True))
    started = set(rows.loc[rows["what"] == "first result", "side"])
    assert {"ours, C++", "ours, Python", "ONNX Runtime, Python"} <= started
    assert set(rows.loc[rows["what"] == "3 bundles loaded", "side"]) == {"ours, C++", "ours, Python"}
