"""The table of the heaviest kernels beside what the machine can do, from rows made by hand."""

import pandas as pd
import roofline

COMMON = {"model": "net", "cpu": "a CPU", "threads": 2, "revision": "abc", "date": "2026-01-01", "turns": 7,
          "cache_bytes_per_s": 50e9, "memory_bytes_per_s": 10e9}  # fmt: skip
ROWS = pd.DataFrame(
    [
        {"operator": "matmul_bf16", "calls": 2, "time_s": 4e-3, "flop": 9e8, "bytes": 1e6, "peak_flops": 500e9},
        {"operator": "softmax", "calls": 1, "time_s": 1e-3, "flop": 1e6, "bytes": 25e6, "peak_flops": 200e9},
    ]
).assign(**COMMON)


def test_kernels_stand_beside_the_peak_of_their_instruction_the_heaviest_first():
    lines = roofline.table(ROWS)

    assert lines[2] == "| net | matmul_bf16 | 2 | 80% | 2000 | 450 | 90% | 0.5 |"
    assert lines[3].startswith("| net | softmax | 1 | 20% | 1000 | 1 | 0% | 25 |")
    assert "f32 200, bf16 500" in lines[-1]


def test_a_model_needs_what_arithmetic_or_caches_need_at_least():
    [whole] = [line for line in roofline.table(ROWS) if line.startswith("| net | 5 ")]

    assert whole == "| net | 5 | 4.1 | 82% |"  # 2 * 0.9 GFLOP at 500 G/s, and 25 MB at 50 GB/s
