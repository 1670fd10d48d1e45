"""Programs timed in turn, and the table of that."""

import json
from dataclasses import asdict

import duel
import pandas as pd
import pytest

from lib.models.source import Source
from lib.tir.traces import EMPTY_TRACE
from stages import extract


@pytest.fixture(scope="module")
def programs(by_stock, product, cpu):
    """The product as a row of SUBGRAPHS, and two programs of it."""
    _, [subgraph] = extract.partition(extract.load(Source(str(product.onnx))), cpu)
    [tuned] = json.loads((by_stock / "traces.json").read_text())["traces"].values()
    return asdict(subgraph), {"ours": tuned, "untuned": EMPTY_TRACE}


def test_all_sides_have_each_turn_in_an_order_of_its_own(programs):
    rows = pd.DataFrame(duel.duel(*programs, turns=6))

    orders = rows.groupby("turn")["side"].agg(tuple)
    assert all(sorted(order) == ["ours", "untuned"] for order in orders)
    assert len(set(orders)) == 2
    assert (rows["latency_s"] > 0).all()
    assert (rows["max_error"] < 1e-5).all()


def test_a_program_that_is_off_is_not_timed(programs, monkeypatch):
    monkeypatch.setattr(duel, "_TOLERANCE", -1.0)  # no difference is as small

    with pytest.raises(duel.WrongResult, match="is off by"):
        duel.duel(*programs, turns=1)


def test_the_total_counts_calls_and_pairs_turns():
    rows = pd.DataFrame(
        [
            {"subgraph_id": key, "name": f"{key} matmul", "weight": weight, "turn": turn, "side": side,
             "latency_s": 1e-6 * factor * (turn + 1)}
            for key, weight in (("a", 3), ("b", 1))
            for turn in range(3)
            for side, factor in (("ours", 1), ("stock", 2))
        ]
    )  # fmt: skip

    lines = duel.table(rows).splitlines()

    assert duel.totals(rows)["stock"].tolist() == pytest.approx([8e-6, 16e-6, 24e-6])
    assert lines[0] == "| subgraph | calls | ours, us | stock, us | stock / ours |"
    assert lines[2] == "| a matmul | 3 | 2.00 [1.00, 3.00] | 4.00 [2.00, 6.00] | 2.00 [2.00, 2.00] |"
    assert lines[4] == "| all calls |  | 8.00 [4.00, 12.0] | 16.0 [8.00, 24.0] | 2.00 [2.00, 2.00] |"
