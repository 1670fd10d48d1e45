"""Our networks compute what those of torch, timm and transformers do; tests/data/zoo/make.py made the files."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lib.contracts.errors import ModelError
from lib.graph.fusion import Model
from lib.models.zoo import catalogue, checkpoints, recipes
from lib.models.zoo.convolutional import (
    BasicBlock,
    Bottleneck,
    BottleneckB,
    MobileNet,
    MobileNetV2,
    ResNet,
    ResNetV2,
    Stage,
)
from lib.models.zoo.transformers import Bert, Gpt2, Size, Vit, Vocabulary
from lib.tir.numerics import relative_error
from tests import helpers

DATA = Path(__file__).parents[2] / "data" / "zoo"
DEPTHS, WIDTH = (1, 2, 1, 1), 4
LENGTH = 12


def size(eps):
    return Size(layers=2, width=32, heads=4, hidden=48, eps=eps)


# As in make.py: the network and where its weights lie.
NETWORKS = {
    "resnet18": (lambda: ResNet(BasicBlock, DEPTHS, WIDTH, 10), recipes.resnet),
    "resnet_v1": (lambda: ResNet(Bottleneck, DEPTHS, WIDTH, 10), recipes.resnet),
    "resnet_v1b": (lambda: ResNet(BottleneckB, DEPTHS, WIDTH, 10), recipes.resnet),
    "resnet_v2": (lambda: ResNetV2((2, 1), 2 * WIDTH, 10), recipes.resnet_v2),
    "mobilenet_v2": (lambda: MobileNetV2((Stage(1, 16, 1, 1), Stage(6, 24, 2, 2)), 0.5, 20, 10), recipes.mobilenet_v2),
    "vit": (lambda: Vit(32, 8, 7, size(1e-12)), recipes.vit),
    "bert": (lambda: Bert(LENGTH, Vocabulary(50, 20), size(1e-12)), recipes.bert),
    "roberta": (lambda: Bert(LENGTH, Vocabulary(50, 22, offset=2, n_types=1), size(1e-5)), recipes.bert),
    "gpt2": (lambda: Gpt2(LENGTH, Vocabulary(50, 20), size(1e-5)), recipes.gpt2),
}


def stored(name):
    return load_file(DATA / f"{name}.safetensors")


def read(name, path):
    """Weights of a network out of a file."""
    make, source = NETWORKS[name]
    network = make()
    return checkpoints.read(path, name, source(network), catalogue.shapes(network))


def run(network, weights, given, cpu):
    """A network's outputs, as TVM runs it without any schedule."""
    model = catalogue.export(network, given.shape, str(given.dtype))
    return helpers.computed(Model(model.module, weights), cpu, given)


def assert_computes(found, tensors):
    expected = [tensors[key] for key in sorted(tensors) if key.startswith("test.output")]
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_checkpoint_gives_what_its_library_computes(cpu, name, batch):
    tensors = stored(name)
    tensors |= {key: tensors[key][:batch] for key in tensors if key.startswith("test.")}
    network = NETWORKS[name][0]()

    found = run(network, read(name, DATA / f"{name}.safetensors"), tensors["test.input"], cpu)

    assert_computes(found, tensors)


def test_mobilenet_computes_what_torch_computes(cpu):
    tensors = stored("mobilenet")
    network = MobileNet(((64, 1), (128, 2)), 0.5, 10)
    weights = {key: tensors[key] for key in catalogue.shapes(network)}

    assert_computes(run(network, weights, tensors["test.input"], cpu), tensors)


def test_strides_elsewhere_give_other_results_from_the_same_shapes(cpu):
    tensors = stored("resnet_v1b")
    network = NETWORKS["resnet_v1"][0]()

    [found] = run(network, read("resnet_v1", DATA / "resnet_v1b.safetensors"), tensors["test.input"], cpu)

    assert relative_error(found, tensors["test.output.0"]) > 0.1


def test_a_causal_token_does_not_see_the_later_ones(cpu):
    network, weights = NETWORKS["gpt2"][0](), read("gpt2", DATA / "gpt2.safetensors")
    given = stored("gpt2")["test.input"]
    changed = given.copy()
    changed[:, 7:] = 3

    [before], [after] = (run(network, weights, ids, cpu) for ids in (given, changed))

    assert np.array_equal(before[:, :7], after[:, :7])
    assert not np.allclose(before[:, 7:], after[:, 7:], atol=0.1)


@pytest.mark.parametrize(
    ("name", "prefix"), [("bert", "bert."), ("roberta", "roberta."), ("gpt2", "transformer."), ("vit", "vit.")]
)
def test_a_prefix_makes_no_difference(tmp_path, name, prefix):
    plain = {key.removeprefix(prefix): tensor for key, tensor in stored(name).items()}
    save_file(plain, tmp_path / "plain.safetensors")
    save_file({prefix + key: tensor for key, tensor in plain.items()}, tmp_path / "prefixed.safetensors")

    without, with_prefix = (read(name, tmp_path / f"{kind}.safetensors") for kind in ("plain", "prefixed"))

    assert all(np.array_equal(without[key], with_prefix[key]) for key in without)


def test_the_first_berts_named_their_norms_otherwise(tmp_path):
    renamed = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for key, tensor in stored("bert").items()
    }
    save_file(renamed, tmp_path / "old.safetensors")

    old, new = read("bert", tmp_path / "old.safetensors"), read("bert", DATA / "bert.safetensors")

    assert all(np.array_equal(old[key], new[key]) for key in new)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats_become_fp32(tmp_path, dtype):
    tensors = {key: tensor.astype(dtype) for key, tensor in stored("gpt2").items()}
    save_file(tensors, tmp_path / "half.safetensors")

    found = read("gpt2", tmp_path / "half.safetensors")["embedding.word"]

    assert found.dtype == np.float32
    assert np.array_equal(found, tensors["wte.weight"].astype(np.float32))


def test_masked_language_models_have_no_pooler_and_get_one_of_zeros(tmp_path):
    tensors = {key: tensor for key, tensor in stored("roberta").items() if not key.startswith("pooler")}
    save_file(tensors, tmp_path / "mlm.safetensors")

    weights = read("roberta", tmp_path / "mlm.safetensors")

    assert not weights["pooler.weight"].any()
    assert not weights["pooler.bias"].any()


def test_missing_and_misshaped_tensors_are_named_with_the_file(tmp_path):
    tensors = stored("bert")
    del tensors["encoder.layer.1.output.dense.weight"]
    tensors["embeddings.word_embeddings.weight"] = np.zeros((51, 32), np.float32)
    tensors["encoder.layer.0.output.dense.bias"] = np.zeros(32, np.int8)
    path = tmp_path / "other.safetensors"
    save_file(tensors, path)

    with pytest.raises(ModelError) as caught:
        read("bert", path)

    assert str(caught.value).splitlines()[:-1] == [  # the last one says what to do
        f"{path} is no checkpoint of bert:",
        "  embeddings.word_embeddings.weight: expected (50, 32), found (51, 32)",
        "  encoder.layer.0.output.dense.bias: expected floats (F64, F32, F16, BF16), found I8",
        "  encoder.layer.1.output.dense.weight: expected (32, 48), found no such tensor",
    ]


def test_of_many_missing_tensors_a_few_are_named():
    with pytest.raises(ModelError, match=r"(?s)wte.weight: .*\n  and 20 more"):
        read("gpt2", DATA / "bert.safetensors")


def test_a_file_of_another_size_is_refused_by_name():
    with pytest.raises(ModelError, match=r"resnet_v1b\.safetensors is no checkpoint of resnet50_v1b:\n  conv1.weight"):
        catalogue.load("resnet50_v1b", weights=DATA / "resnet_v1b.safetensors")


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\x08\x00\x00\x00\x00\x00\x00\x00{"])
def test_a_damaged_file_is_called_damaged(tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)

    with pytest.raises(ModelError, match=r"bad\.safetensors is damaged or no \.safetensors file"):
        catalogue.load("mobilenetv2", weights=path)


def test_a_file_that_was_cut_off_is_called_damaged(tmp_path):
    path = tmp_path / "cut.safetensors"
    path.write_bytes((DATA / "gpt2.safetensors").read_bytes()[:-100])

    with pytest.raises(ModelError, match="is damaged"):
        catalogue.load("gpt2", weights=path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere\.safetensors: there is no such file"):
        catalogue.load("mobilenetv2", weights=tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet50", "Use --model resnet50_v1b"),
        ("resnet50_v1", "Use --model resnet50_v1b"),
        ("mobilenet", "neither timm nor transformers has"),
        ("tiny_cnn", "it is there for tests"),
    ],
)
def test_a_model_without_checkpoints_says_why(name, reason):
    with pytest.raises(ModelError, match=f"--model {name} takes no checkpoint: .*{reason}"):
        catalogue.load(name, weights=DATA / "resnet_v1.safetensors")


@pytest.mark.parametrize(
    "name", [name for name, entry in catalogue.ZOO.items() if not isinstance(entry.checkpoint, str)]
)
def test_every_weight_of_a_model_with_checkpoints_has_a_recipe(name):
    _, network = catalogue.define(name)

    assert set(catalogue.entry(name).checkpoint(network)) == set(catalogue.shapes(network))
