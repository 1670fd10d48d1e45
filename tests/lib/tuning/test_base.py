import json

import numpy as np
import pyarrow as pa
import pytest

from lib.contracts.schemas import FAMILIES, FEATURE_VERSION, N_FEATURES, SUBGRAPHS
from lib.tuning import base
from lib.tuning.base import CARD, FOLDER, NONE, BaseModels, base_models, bases_of, stock_base_models
from lib.tuning.cost_model import train
from tests.lib.tuning.test_cost_model import CONFIG, synthetic


@pytest.fixture
def folder(tmp_path):
    train(synthetic(0), CONFIG, 0).save(tmp_path / "matmul.ubj")
    facts = {"file": "matmul.ubj", "regrets": [0.2, 0.05, 0.01]}
    (tmp_path / CARD).write_text(json.dumps({"features": FEATURE_VERSION, "operators": {"matmul": facts}}))
    base._bases.cache_clear()
    return tmp_path


def tables_of(**operators):
    """SUBGRAPHS and FAMILIES of subgraphs, each in the family of its first letter."""
    rows = [{"subgraph_id": key, "core_operator": operator} for key, operator in operators.items()]
    columns = {name: [row.get(name) for row in rows] for name in ("subgraph_id", "core_operator")}
    families = pa.table({"subgraph_id": list(operators), "family_id": [key[0] for key in operators]}).cast(FAMILIES)
    return pa.table(columns, schema=pa.schema([SUBGRAPHS.field(name) for name in columns])), families


def test_a_base_model_scores_programs(folder):
    found = BaseModels(folder).of("matmul")

    assert np.isfinite(found.model().predict(np.zeros((3, N_FEATURES), np.float32))).all()
    assert BaseModels(folder).of("conv2d") is None


def test_a_family_of_one_operator_has_a_base_others_have_none(folder):
    found = bases_of(*tables_of(a1="matmul", a2="matmul", b1="matmul", b2="conv2d", c1="conv2d"), BaseModels(folder))

    assert found["a"].operator == "matmul"
    assert found["b"] is found["c"] is None


def test_convolutions_of_signals_and_volumes_begin_with_what_is_known_of_images():
    models = base_models("avx512x2")

    for operator in ("conv1d", "conv3d_1x1", "depthwise_conv1d", "group_conv3d_bf16", "conv1d_bf16"):
        assert models.of(operator) is models.of(operator.replace("1d", "2d").replace("3d", "2d")) is not None
    assert models.of("conv4d") is None


def test_models_of_other_features_are_none(folder):
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps({**card, "features": "others"}))
    base._bases.cache_clear()

    assert BaseModels(folder).of("matmul") is None


def test_another_class_of_targets_has_no_base_models_and_nobody_has_to_use_them():
    for models in (base_models(""), base_models("sparc"), base_models("avx512", use=False), NONE):
        assert models.of("matmul") is None
    assert base_models("avx512").of("matmul") is not None


def test_metaschedules_space_has_models_of_its_own():
    own, stock = base_models("avx512x2"), stock_base_models("avx512x2")

    for operator in ("matmul", "conv2d", "conv2d_1x1", "depthwise_conv2d"):
        assert stock.of(operator) not in (own.of(operator), None)
    for models in (stock_base_models(""), stock_base_models("avx2"), stock_base_models("avx512x2", use=False)):
        assert models.of("matmul") is None


def test_neon_begins_with_what_avx2_taught():
    neon, avx2 = base_models("neon").of("matmul"), base_models("avx2").of("matmul")

    assert neon == avx2 != base_models("avx512").of("matmul")
    assert base_models("neon", use=False).of("matmul") is None


@pytest.mark.parametrize("card", sorted(FOLDER.glob(f"*/{CARD}")), ids=lambda path: path.parent.name)
def test_the_models_that_are_shipped_can_be_read_and_are_small(card):
    models = BaseModels(card.parent)
    operators = json.loads(card.read_text())["operators"]

    kind = "_bf16" if card.parent.name == "amx" else ""  # which has the others of AVX-512
    assert {f"matmul{kind}", f"conv2d_1x1{kind}"} <= set(operators)
    for operator in operators:
        scores = models.of(operator).model().predict(np.zeros((1, N_FEATURES), np.float32))
        assert np.isfinite(scores).all()
    assert sum(path.stat().st_size for path in card.parent.iterdir()) < 8e6


def test_where_matrices_are_multiplied_only_what_is_computed_alike_is_taken_over():
    amx, avx512 = base_models("amx"), base_models("avx512")

    assert amx.of("softmax") == avx512.of("softmax") is not None
    assert amx.of("layer_norm") not in (avx512.of("layer_norm"), None)
    assert amx.of("conv2d_bf16") != avx512.of("conv2d_bf16")
    assert amx.of("conv2d") not in (avx512.of("conv2d"), None)  # sums of floats: of such a CPU's own programs
    assert base_models("amx", use=False).of("conv2d") is None


def test_two_vectors_a_cycle_have_their_own_models_and_take_no_programs_of_matrices():
    x2, amx, avx512 = base_models("avx512x2"), base_models("amx"), base_models("avx512")

    for operator in ("conv2d_1x1", "matmul", "conv2d_bf16"):
        assert x2.of(operator) not in (amx.of(operator), avx512.of(operator), None)
    assert x2.of("group_conv2d") == amx.of("group_conv2d") != avx512.of("group_conv2d")
    assert x2.of("matmul_int8") == avx512.of("matmul_int8") is not None
    assert x2.of("layer_norm") == amx.of("layer_norm") is not None
    assert avx512.of("winograd_conv2d_bf16") is None


@pytest.mark.parametrize("name", ["avx512", "avx512x2", "amx"])
def test_what_only_narrower_vectors_were_measured_for_begins_with_their_models(name):
    assert base_models(name).of("fused_layers") == base_models("avx2").of("fused_layers") is not None
    assert base_models(name).of("matmul_int16") is None


@pytest.mark.parametrize(
    ("name", "operator", "like"),
    [
        ("neon", "strassen_matmul", "avx2"),
        ("neon", "attention", "avx2"),
        ("avx512", "strassen_matmul", "avx512x2"),
        ("amx", "strassen_matmul", "avx512x2"),
    ],
)
def test_those_without_their_own_begin_with_what_registers_of_their_number_taught(name, operator, like):
    assert base_models(name).of(operator) == base_models(like).of(operator) is not None
    assert base_models("avx2").of(operator) != base_models("avx512x2").of(operator)


def test_pairs_are_avx2s_alone():
    assert base_models("avx2").of("conv2d_int16") is not None
    assert base_models("avx512").of("conv2d_int16") is base_models("avx512x2").of("matmul_int16") is None
