"""The table of precisions, from rows made by hand."""

import json

import pandas as pd
import precision
import pyarrow as pa
import pytest
import versus

from lib.contracts import tables
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import SUBGRAPHS
from tests.benchmarks.test_versus import rows_of

WORK = [
    {"instruction": "bf16", "flop": 60e6, "peak_flops": 100e9},
    {"instruction": "f32", "flop": 10e6, "peak_flops": 50e9},
]


def test_ratios_are_to_the_better_side_and_bounds_to_the_time_at_the_peak(tmp_path):
    rows = pd.concat(
        [
            rows_of("net", precision.BF16, "library", [1.0] * 3, bytes=2_000_000).assign(work=[WORK] * 3),
            rows_of("net", precision.DEFAULT, "openvino_default", [1.2] * 3),
            rows_of("net", precision.INT8, "library", [0.5] * 3),
            rows_of("net", precision.ORT_QDQ, "onnxruntime", [0.7] * 3),
            rows_of("net", precision.OPENVINO_QDQ, "openvino_default", [0.6] * 3, max_error=0.25),
        ]
    )
    versus.write(rows, tmp_path / "net.parquet")

    lines = precision.table(versus.read(tmp_path))

    latencies, bounds, errors, sizes = (line for line in lines if line.startswith("| net"))
    assert latencies.endswith("| - | 1.20 [1.20, 1.20] | 1.20 [1.20, 1.20] |")
    assert bounds == "| net | - | 0.8 (1.50) | - |"  # 1.2 ms of the vendor to 0.8 ms
    assert errors == "| net | - | 1.0e-06 | 1.0e-06 | 1.0e-06 | 1.0e-06 | 2.5e-01 | abc | 2026-01-01 |"
    assert sizes == "| net | - | 2.0 | - | - | - |"


@pytest.mark.parametrize("side", [precision.THREE, precision.SIX])
def test_products_of_bf16_have_columns_where_some_model_has_them_and_are_compared_in_f32(side):
    rows = pd.concat(
        [
            rows_of("net", precision.F32, "library", [1.0] * 3).assign(work=[WORK] * 3),
            rows_of("net", side, "library", [0.5] * 3, max_error=1e-5, bytes=3_000_000),
            rows_of("net", precision.ORT, "onnxruntime", [1.2] * 3, bytes=4_000_000),
            rows_of("net", precision.OPENVINO, "openvino", [1.1] * 3),
        ]
    )
    others = rows[rows["side"] != side]

    heads, *_ = precision.table(others)
    with_them, _, latencies, *lines = precision.table(rows)

    name = side.removeprefix("ours ")
    assert name not in heads
    assert with_them.count(name) == 2  # its latencies, and ratios
    assert latencies.split(" | ")[-4:-2] == ["1.10 [1.10, 1.10]", "2.20 [2.20, 2.20]"]
    assert any(line.startswith("| net | 1.0e-06 | 1.0e-05 | ") for line in lines)
    assert any(line.startswith("| net | - | 3.0 | - | - | 4.0 |") for line in lines)


@pytest.mark.parametrize("known", [True, False])
def test_work_is_told_by_instruction_where_all_peaks_are_known(tmp_path, known):
    compiled = tmp_path / "runs" / "run" / "compiled"
    compiled.mkdir(parents=True)
    peaks = {"peak_flops": 50.0} | ({"peak_flops_bf16": 150.0} if known else {})
    (compiled / "manifest.json").write_text(json.dumps(peaks))
    subgraphs = [("a", 2, 100.0, "matmul"), ("b", 1, 300.0, "matmul_bf16")]
    rows = [
        {"subgraph_id": name, "name": name, "functions": [name], "weight": weight, "flop": flop}
        | {"core_operator": operator, "operators": [operator], "tunable": True, "note": "", "workload": ""}
        for name, weight, flop, operator in subgraphs
    ]
    table = pa.Table.from_pylist(rows, schema=SUBGRAPHS)
    tables.write(table, ModelFiles(tmp_path).subgraphs, SUBGRAPHS, tables.Provenance())

    expected = [
        {"instruction": "f32", "flop": 2 * 100.0, "peak_flops": 50.0},
        {"instruction": "bf16", "flop": 300.0, "peak_flops": 150.0},
    ]
    assert precision.work(compiled) == (expected if known else None)
