"""That the scripts for GPUs run, on stand-ins; their times mean nothing and are not shown."""

import gpus as script
import numpy as np
import onnx
import pandas as pd
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.benchmarks.conftest import run_script


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    """An ONNX file of one, of which there are programs enough for stock's search."""
    weights = np.random.default_rng(0).normal(size=(128, 96)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (64, 128))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (64, 96))],
        [numpy_helper.from_array(weights, "w")],
    )
    file = tmp_path_factory.mktemp("product") / "product.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return file


@pytest.fixture(scope="module")
def measured(gpus, product, tmp_path_factory):
    """With a population of which stock's search finds enough valid programs to begin with: of 16 it often does not."""
    folder = tmp_path_factory.mktemp("measured")
    few = (
        "--trials-per-subgraph",
        3,
        "--population",
        32,
        "--candidates",
        4,
        "--extent",
        32,
        "--turns",
        1,
        "--seeds",
        0,
    )
    done = run_script("gpus.py", "--models", product, "--out", folder, *few)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_all_that_the_papers_measure_is_measured(measured):
    folder, _ = measured
    quality, devices, training = (
        pd.read_parquet(folder / f"{name}.parquet") for name in ("quality", "devices", "training")
    )

    assert set(quality["way"]) == {script.STOCK, *script.WAYS}
    assert (quality.groupby("way").size() == 3).all()
    assert quality["latency_s"].notna().all()
    assert devices["devices"].tolist() == [1, 2]
    assert (devices["ok"] == devices["trials"]).all()
    trained = training.set_index("trains_on")
    assert (trained.loc["cpu", "seconds"] > 0).all()
    assert trained.loc["cuda", "reason"].str.startswith("XGBoost").all()


def test_there_is_no_table_of_stand_ins(measured):
    _, told = measured

    assert "rows of stand-ins, whose times mean nothing" in told


def test_a_table_says_how_much_sooner_ansors_quality_is_reached(tmp_path):
    rows = [
        {"model": "m", "seed": 0, "way": way, "trial": n, "seconds": scale * n, "subgraph_id": "s", "weight": 2,
         "latency_s": 1e-3 / n, "gpu": "a GPU"}
        for way, scale in (("as Ansor", 10.0), ("families and foresee", 5.0))
        for n in (1, 2, 3)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(tmp_path / "quality.parquet")

    lines = script.table(tmp_path).splitlines()

    assert lines[2] == "| m | 0 | as Ansor | 3 | 30 | 0.6667 | 1.00x | 1.00x |"
    assert lines[3] == "| m | 0 | families and foresee | 3 | 15 | 0.6667 | 2.00x | 1.00x |"


def test_trials_of_a_run_are_kept_with_what_they_took(tmp_path):
    rows = [
        {"model": "m", "gpu": "a GPU", "round": n // 2, "subgraph_id": key, "weight": weight, "origin": origin,
         "status": status, "latency_s": latency, "build_s": 2.0, "run_s": 0.05, "search_clock_s": 10.0,
         "build_clock_s": 4.0, "run_clock_s": 1.0}
        for n, (key, weight, origin, status, latency) in enumerate([
            ("s", 2, "untuned", "ok", 4e-3), ("s", 2, "sampled", "ok", 1e-3), ("t", 1, "untuned", "ok", 1e-3),
            ("t", 1, "sampled", "timeout", np.nan),
        ])
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(tmp_path / "trials.parquet")

    [_, _, line, _] = script.table(tmp_path).split("\n")

    assert line == "| m | a GPU | 4 | 1 | 2 | 0.05 | 20, 8, 2 | 9 | 3 |"
