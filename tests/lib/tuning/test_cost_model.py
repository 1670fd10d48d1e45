from dataclasses import replace
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
from lib.search.features import N_LOWERED, of_stores
from lib.tuning import cost_model
from lib.tuning.cost_model import (
    FamilyModel,
    Samples,
    TrainConfig,
    accuracies,
    accuracy,
    labels,
    looks,
    misleads,
    regrets,
    train,
    unseen_regrets,
)

CONFIG = TrainConfig()


@pytest.fixture(scope="module")
def measured():
    """Real programs of one 3x3 convolution of ResNet-50 in measuring order, as MetaSchedule has them."""
    table = pq.read_table(Path(__file__).parents[2] / "data" / "conv2d_measured.parquet")
    stores = [np.array(rows, np.float32) for rows in table["features"].to_pylist()]
    vectors = [np.concatenate([np.full(N_FEATURES - N_LOWERED, np.nan, np.float32), of_stores(m)]) for m in stores]
    latencies = table["latency_s"].to_numpy()
    return stores, Samples(np.stack(vectors), np.zeros(len(latencies)), latencies)


def part(samples, chosen):
    return Samples(samples.features[chosen], samples.workloads[chosen], samples.latencies_s[chosen])


def spearman(a, b):
    return pd.Series(a).rank().corr(pd.Series(b).rank())


def synthetic(seed, n_workloads=12, each=24, sign=1.0, scale=1.0):
    """Workloads of any size with programs whose logarithms of latencies are a known function of two features."""
    random = np.random.default_rng(seed)
    features = np.full((n_workloads * each, N_FEATURES), np.nan, np.float32)
    features[:, :8] = random.random((len(features), 8))
    workloads = np.repeat(np.arange(n_workloads), each)
    size = random.uniform(0, 10, n_workloads)[workloads]
    latencies = np.exp(size + sign * scale * (features[:, 2] - 0.7 * features[:, 5]))
    return Samples(features, workloads, latencies)


def pairs_right(model, samples):
    return np.mean([each.pairwise for each in accuracies(model.predict(samples.features), samples)])


def test_labels_are_logarithms_relative_to_the_best_of_each_workload():
    found = labels(np.array([2.0, 1.0, np.nan, 8.0, 4.0, np.nan]), np.array(["a", "a", "a", "b", "b", "c"]))

    assert found[:5].tolist() == pytest.approx([-np.log(2), 0.0, -2.0, -np.log(2), 0.0])
    assert np.isnan(found[5])  # nothing of it works


def test_the_model_ranks_unseen_programs_as_well_as_tvms_own(measured):
    stores, samples = measured
    n = len(stores) * 2 // 3
    speeds = samples.latencies_s.min() / samples.latencies_s
    theirs = XGBModel(num_warmup_samples=0)
    theirs._train([f.astype(np.float64) for f in stores[:n]], speeds[:n])

    ours = train(part(samples, slice(n)), CONFIG, 0)

    foretold = spearman(ours.predict(samples.features[n:]), speeds[n:])
    assert foretold > 0.3
    assert foretold > spearman(theirs._predict([f.astype(np.float64) for f in stores[n:]]), speeds[n:]) - 0.05


def test_what_workloads_of_any_size_have_in_common_is_learned():
    """Of each only the worse half was measured: which of them is the best, or how fast it is, is not told."""
    samples = synthetic(0)
    slow = samples.latencies_s > np.array(
        [np.median(samples.latencies_s[samples.workloads == w]) for w in samples.workloads]
    )

    assert pairs_right(train(part(samples, slow), CONFIG, 0), synthetic(1)) > 0.85


def test_a_base_model_helps_where_few_samples_are_its_own():
    base, few, unseen = train(synthetic(0), CONFIG, 0), synthetic(1, n_workloads=1, each=8), synthetic(2)

    assert pairs_right(train(few, CONFIG, 0, base), unseen) > pairs_right(train(few, CONFIG, 0), unseen) + 0.1


def test_a_base_model_that_orders_samples_worse_than_chance_is_left_out():
    """That of another kind of CPU: what is fast there is slow here."""
    wrong, own, unseen = train(synthetic(0, sign=-1.0), CONFIG, 0), synthetic(1), synthetic(2)

    assert misleads(wrong, own)
    assert not misleads(train(synthetic(3), CONFIG, 0), own)
    assert pairs_right(train(own, CONFIG, 0, wrong), unseen) == pairs_right(train(own, CONFIG, 0), unseen)


def test_a_base_model_that_is_half_wrong_is_corrected_by_samples():
    base, own, unseen = train(synthetic(0, scale=0.1), CONFIG, 0), synthetic(1), synthetic(2)

    assert pairs_right(train(own, CONFIG, 0, base), unseen) > pairs_right(train(own, CONFIG, 0), unseen) - 0.03


def of_others(samples):
    """Of workloads that nobody else has."""
    return replace(samples, workloads=samples.workloads + 100)


def test_other_families_teach_where_few_samples_are_a_familys_own():
    few, others, unseen = synthetic(1, n_workloads=1, each=8), of_others(synthetic(0)), synthetic(2)
    alone = replace(CONFIG, others=0.0)

    assert pairs_right(train(few, CONFIG, 0, others=others), unseen) > pairs_right(train(few, CONFIG, 0), unseen) + 0.1
    assert pairs_right(train(few, alone, 0, others=others), unseen) == pairs_right(train(few, alone, 0), unseen)


def test_what_other_families_teach_wrongly_is_outweighed():
    own, wrong, unseen = synthetic(1), of_others(synthetic(0, sign=-1.0)), synthetic(2)
    wrong = replace(wrong, features=np.where(np.arange(N_FEATURES) == 7, 5.0, wrong.features))  # they can be told apart

    assert pairs_right(train(own, CONFIG, 0, others=wrong), unseen) > pairs_right(train(own, CONFIG, 0), unseen) - 0.05


@pytest.mark.parametrize("wrong", [{"others": 1.5}, {"others": -0.1}, {"max_others": -1}])
def test_weights_of_other_families_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match="others"):
        TrainConfig(**wrong)


def test_a_device_that_cannot_train_is_refused():
    with pytest.raises(ConfigError, match="device must be cpu or cuda, but got 'tpu'"):
        TrainConfig(device="tpu")


@pytest.mark.skipif(bool(host.gpus()), reason="there is a GPU")
def test_without_a_gpu_there_is_a_reason_not_to_train_on_one():
    assert cost_model.without_cuda() in ("nvidia-smi lists no GPU", f"XGBoost {xgb.__version__} was built without CUDA")


@pytest.mark.gpu  # XGBoost's kernels are compiled for real ones
@pytest.mark.skipif(bool(cost_model.without_cuda()), reason="needs a GPU")
def test_a_gpu_trains_models_as_accurate(measured):
    _, samples = measured
    n = len(samples) * 2 // 3

    found = [
        spearman(
            train(part(samples, slice(n)), TrainConfig(device=device), 0).predict(samples.features[n:]),
            -samples.latencies_s[n:],
        )
        for device in ("cpu", "cuda")
    ]

    assert abs(found[0] - found[1]) < 0.03


def test_trees_on_top_of_a_base_are_equal_whatever_was_trained_before():
    base, own = train(synthetic(0), CONFIG, 0), synthetic(1, n_workloads=2)

    found = [train(own, CONFIG, 0, base).booster.save_raw("ubj") for _ in range(3)]

    assert found[0] == found[1] == found[2]


def test_equal_data_and_seeds_give_equal_models(measured, tmp_path):
    for name in ("1.ubj", "2.ubj"):
        train(part(measured[1], slice(64)), CONFIG, 7).save(tmp_path / name)

    assert (tmp_path / "1.ubj").read_bytes() == (tmp_path / "2.ubj").read_bytes()


def test_a_model_reads_back_and_scores_the_same(measured, tmp_path):
    model = train(part(measured[1], slice(64)), CONFIG, 0)

    model.save(tmp_path / "m.ubj")

    features = measured[1].features
    assert np.array_equal(FamilyModel.load(tmp_path / "m.ubj").predict(features), model.predict(features))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
def test_a_full_disk_is_the_systems_error_not_xgboosts(measured):
    with pytest.raises(OSError, match="No space left"):
        train(part(measured[1], slice(64)), CONFIG, 0).save(Path("/dev/full"))


def test_nothing_to_score_is_no_error(measured):
    model = train(part(measured[1], slice(64)), CONFIG, 0)

    assert model.predict(np.zeros((0, N_FEATURES), np.float32)).shape == (0,)


def test_a_model_of_other_features_is_refused(tmp_path):
    booster = xgb.train({}, xgb.DMatrix(np.ones((4, N_FEATURES)), label=np.ones(4)), 1)
    booster.set_attr(features="per-store-172-tvm-0.9")
    booster.save_model(tmp_path / "m.ubj")

    with pytest.raises(ContractError, match=r"was trained on other features: expected nest-3.*found per-store-172"):
        FamilyModel.load(tmp_path / "m.ubj")


def test_a_model_with_another_number_of_columns_is_refused(tmp_path):
    booster = xgb.train({}, xgb.DMatrix(np.ones((4, 3)), label=np.ones(4)), 1)
    booster.set_attr(features=cost_model.FEATURE_VERSION)
    booster.save_model(tmp_path / "m.ubj")

    with pytest.raises(ContractError, match=rf"with {N_FEATURES} columns, found .* with 3"):
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


def test_regrets_are_of_the_best_so_far_in_the_order_of_the_scores():
    found = regrets(np.array([3.0, 1.0, 2.0, 0.0]), np.array([1.5, 1.0, 1.2, np.nan]))

    assert found[:4] == pytest.approx([0.5, 0.2, 0.0, 0.0])
    assert regrets(np.array([1.0, 0.0]), np.array([np.nan, 1.0]))[0] == pytest.approx(np.exp(2) - 1)  # the first fails


def test_as_many_looks_as_keep_the_regret_small():
    assert [looks((0.2, 0.05, 0.01), tolerated) for tolerated in (1.0, 0.1, 0.02, 0.001)] == [1, 2, 3, 3]


def test_workloads_that_are_alike_are_foretold_from_each_other_and_others_are_not():
    alike = synthetic(0)
    by_chance = Samples(alike.features, alike.workloads, np.random.default_rng(1).permutation(alike.latencies_s))

    known, unknown = (unseen_regrets(samples, CONFIG, seed=0) for samples in (alike, by_chance))

    assert known == sorted(known, reverse=True)
    assert known[0] < 0.1
    assert unknown[0] > 2 * known[0]
    assert unseen_regrets(synthetic(0, n_workloads=3), CONFIG, seed=0) == []  # too few to leave any out
