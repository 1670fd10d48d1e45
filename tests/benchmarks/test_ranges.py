import pandas as pd
import ranges


def rows(length: int, **latencies_s: float) -> pd.DataFrame:
    same = {"model": "m", "length": length, "bucket": 8, "max_error": 1e-6, "failure": "", "cpu": "c", "threads": 2}
    return pd.DataFrame([
        {**same, "side": side, "version": side, "turn": turn, "latency_s": seconds, "revision": "r",
         "at_peak_s": 1e-3, "bytes": 110 if side == "range" else 100}
        for side, seconds in latencies_s.items() for turn in range(3)
    ])  # fmt: skip


def test_the_table_has_the_ratios_and_their_geometric_means():
    told = ranges.table(pd.concat([
        rows(5, range=1.1e-3, exact=1e-3, onnxruntime=2.2e-3, openvino=3e-3),
        rows(7, range=2e-3, exact=2.2e-3, onnxruntime=9e-3, openvino=6e-3),
    ]))  # fmt: skip

    five, seven, mean = told.splitlines()[2:5]
    assert five.startswith(
        "| m | 5 | 8 | 1.10 | 1.00 | 2.20 | 3.00 | 1.00 | 1.10 [1.10, 1.10] | 2.00 [2.00, 2.00] | 2.20 | 1.100 |"
    )
    assert "| 0.909 [0.909, 0.909] | 3.00 [3.00, 3.00] | 6.00 |" in seven
    assert "| 1.00 [1.00, 1.00] | 2.45 [2.45, 2.45] | 3.63 |" in mean


def test_sides_that_fail_or_are_off_are_told():
    found = rows(5, range=1e-3, exact=1e-3)
    found.loc[found["side"] == "exact", "failure"] = "no"
    found.loc[found["side"] == "range", "max_error"] = float("nan")

    assert ranges.wrong(found) == ["range at 5: nan", "exact at 5: no"]


def test_lengths_are_drawn_alike_each_time():
    assert ranges.lengths(10, 0) == [9, 21, 39, 90, 139, 158, 262, 327, 417, 436]
