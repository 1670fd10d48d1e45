from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import xgboost as xgb
from tvm.s_tir.meta_schedule.cost_model import XGBModel

from lib.contracts.errors import ConfigError, ContractError, MissingInput
from lib.contracts.schemas import N_FEATURES
from lib.machine import host
from lib.tuning import cost_model
from lib.tuning.cost_model import FamilyModel, TrainConfig, accuracy, labels, train
from lib.tuning.history import _matrices

CONFIG = TrainConfig()


@pytest.fixture(scope="module")
def measured():
    """Real programs of one 3x3 convolution of ResNet-50 in measuring order: features, latencies in seconds."""
    table = pq.read_table(Path(__file__).parents[2] / "data" / "conv2d_measured.parquet")
    return _matrices(table["features"]), table["latency_s"].to_numpy()


def spearman(a, b):
    return pd.Series(a).rank().corr(pd.Series(b).rank())


def test_labels_are_relative_to_the_best_of_each_workload_and_zero_for_failures():
    found = labels(np.array([2.0, 1.0, np.nan, 8.0, 4.0]), np.array(["a", "a", "a", "b", "b"]))

    assert found.tolist() == [0.5, 1.0, 0.0, 0.5, 1.0]


def test_the_model_ranks_unseen_programs_as_well_as_tvms_own(measured):
    features, latencies = measured
    n = len(features) * 2 // 3
    targets = labels(latencies, np.zeros(len(latencies)))
    theirs = XGBModel(num_warmup_samples=0)
    theirs._train([f.astype(np.float64) for f in features[:n]], targets[:n])

    ours = train(features[:n], targets[:n], CONFIG, 0)

    foretold = spearman(ours.predict(features[n:]), targets[n:])
    assert foretold > 0.3
    assert foretold > spearman(theirs._predict([f.astype(np.float64) for f in features[n:]]), targets[n:]) - 0.05


def test_a_device_that_cannot_train_is_refused():
    with pytest.raises(ConfigError, match="device must be cpu or cuda, but got 'tpu'"):
        TrainConfig(device="tpu")


@pytest.mark.skipif(bool(host.gpus()), reason="there is a GPU")
def test_without_a_gpu_there_is_a_reason_not_to_train_on_one():
    assert cost_model.without_cuda() in ("nvidia-smi lists no GPU", f"XGBoost {xgb.__version__} was built without CUDA")


@pytest.mark.skipif(bool(cost_model.without_cuda()), reason="needs a GPU")
def test_a_gpu_trains_models_as_accurate(measured):
    features, latencies = measured
    n = len(features) * 2 // 3
    targets = labels(latencies, np.zeros(len(latencies)))

    found = [
        spearman(train(features[:n], targets[:n], TrainConfig(device=device), 0).predict(features[n:]), targets[n:])
        for device in ("cpu", "cuda")
    ]

    assert abs(found[0] - found[1]) < 0.03


def test_equal_data_and_seeds_give_equal_models(measured, tmp_path):
    features, latencies = measured
    targets = labels(latencies, np.zeros(len(latencies)))
    for name in ("1.ubj", "2.ubj"):
        train(features[:64], targets[:64], CONFIG, 7).save(tmp_path / name)

    assert (tmp_path / "1.ubj").read_bytes() == (tmp_path / "2.ubj").read_bytes()


def test_a_score_is_the_sum_over_the_rows_of_a_program(measured):
    features, latencies = measured
    model = train(features[:64], labels(latencies[:64], np.zeros(64)), CONFIG, 0)
    matrix = features[0]

    [whole] = model.predict([matrix])

    assert whole == pytest.approx(sum(float(s) for s in model.predict([row[None] for row in matrix])), abs=1e-5)


def test_a_model_reads_back_and_scores_the_same(measured, tmp_path):
    features, latencies = measured
    model = train(features[:64], labels(latencies[:64], np.zeros(64)), CONFIG, 0)

    model.save(tmp_path / "m.ubj")

    assert np.array_equal(FamilyModel.load(tmp_path / "m.ubj").predict(features), model.predict(features))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
def test_a_full_disk_is_the_systems_error_not_xgboosts(measured):
    features, latencies = measured
    model = train(features[:64], labels(latencies[:64], np.zeros(64)), CONFIG, 0)

    with pytest.raises(OSError, match="No space left"):
        model.save(Path("/dev/full"))


def test_nothing_to_score_is_no_error(measured):
    features, latencies = measured
    model = train(features[:64], labels(latencies[:64], np.zeros(64)), CONFIG, 0)

    assert model.predict([]).shape == (0,)


def test_a_model_of_other_features_is_refused(tmp_path):
    booster = xgb.train({}, xgb.DMatrix(np.ones((4, N_FEATURES)), label=np.ones(4)), 1)
    booster.set_attr(features="per-store-172-tvm-0.9")
    booster.save_model(tmp_path / "m.ubj")

    with pytest.raises(
        ContractError, match=r"was trained on other features: expected per-store-164.*found per-store-172"
    ):
        FamilyModel.load(tmp_path / "m.ubj")


def test_a_model_with_another_number_of_columns_is_refused(tmp_path):
    booster = xgb.train({}, xgb.DMatrix(np.ones((4, 3)), label=np.ones(4)), 1)
    booster.set_attr(features=cost_model.FEATURE_VERSION)
    booster.save_model(tmp_path / "m.ubj")

    with pytest.raises(ContractError, match=r"with 164 columns, found .* with 3"):
        FamilyModel.load(tmp_path / "m.ubj")


def test_a_damaged_model_is_called_damaged(tmp_path):
    (tmp_path / "m.ubj").write_bytes(b"{L\x00\x00\x00")

    with pytest.raises(ContractError, match=r"m\.ubj is damaged(.|\n)*the measurements are kept"):
        FamilyModel.load(tmp_path / "m.ubj")


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(MissingInput, match=r"m\.ubj does not exist"):
        FamilyModel.load(tmp_path / "m.ubj")


def test_accuracy_worked_by_hand():
    speeds = np.array([4.0, 3.0, 2.0, 1.0])

    found = accuracy(np.array([0.9, 0.5, 0.6, 0.1]), speeds)

    assert found.pairwise == pytest.approx(5 / 6)  # one pair of six is the wrong way round
    assert found.rank_correlation == pytest.approx(0.8)  # 1 - 6 * (1 + 1) / (4 * 15)
    assert found.top_recall == 1.0


def test_nothing_can_be_said_of_one_program():
    assert np.isnan(accuracy(np.array([1.0]), np.array([1.0])).pairwise)
