import time

import numpy as np
import pytest
import tvm
from tvm import relax

from lib.contracts.errors import ModelError
from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.models.zoo import catalogue
from lib.tir.numerics import random_values

SMALL = ["resnet18", "resnet50", "mobilenet", "mobilenetv2", "tiny_cnn", "tiny_transformer"]  # 100 MB at most
SUBGRAPHS = {
    "resnet18": 18,
    "resnet50": 24,
    "resnet50_v1": 24,
    "resnet50_v1b": 27,
    "resnet152_v2": 35,
    "mobilenet": 21,
    "mobilenetv2": 32,
    "vit_huge": 15,
    "bert_base": 15,
    "bert_large": 15,
    "roberta_large": 15,
    "gpt2": 13,
    "tiny_cnn": 9,
    "tiny_transformer": 15,
}


def interface(module):
    """Shapes of the input and of the outputs."""
    function = module["main"]
    result = function.ret_ty
    outputs = result.fields if hasattr(result, "fields") else [result]
    return [[int(extent) for extent in ty.shape.values] for ty in (function.params[0].ty, *outputs)]


@pytest.mark.parametrize("name", SMALL)
def test_equal_seeds_give_equal_weights_in_parameter_order(name):
    first, second = catalogue.load(name, seed=5), catalogue.load(name, seed=5)

    params = first.module["main"].params[int(first.module["main"].attrs["num_input"]) :]
    assert list(first.weights) == [str(p.name) for p in params]
    assert [list(w.shape) for w in first.weights.values()] == [[int(n) for n in p.ty.shape.values] for p in params]
    assert all(np.array_equal(first.weights[key], second.weights[key]) for key in first.weights)


def test_other_seeds_give_other_weights():
    first, second = catalogue.load("tiny_cnn", seed=5), catalogue.load("tiny_cnn", seed=6)

    assert not np.array_equal(first.weights["stem.weight"], second.weights["stem.weight"])


def test_random_weights_stay_what_they_were():
    weights = catalogue.load("resnet18").weights

    assert weights["stem.weight"].dtype == np.float32
    assert float(weights["stem.weight"][0, 0, 0, 0]) == pytest.approx(0.09217991)
    assert float(weights["classifier.bias"][-1]) == pytest.approx(-0.0776253)


@pytest.mark.parametrize("name", ["mobilenet", "mobilenetv2"])
def test_images_reach_the_outputs_through_random_weights(name):
    """Else a wrong layer would not show, and the whole model would be called verified."""
    model = catalogue.load(name)
    library = tvm.compile(relax.transform.LegalizeOps()(model.module), "llvm")
    machine = relax.VirtualMachine(library, tvm.cpu())
    params = [tvm.runtime.tensor(weight) for weight in model.weights.values()]

    one, other = (
        machine["main"](tvm.runtime.tensor(random_values((1, 224, 224, 3), "float32", 0, seed)), *params).numpy()
        for seed in (0, 1)
    )

    assert np.abs(one - other).max() > 3e-3 * np.abs(one).max()  # of which [compile] tolerance is 1e-3


@pytest.mark.parametrize("name", catalogue.ZOO)
def test_a_graph_is_there_within_a_second_and_names_its_weights_in_order(name):
    start = time.process_time()
    module, network = catalogue.define(name)
    seconds = time.process_time() - start

    assert seconds < 1
    given, *weights = module["main"].params
    assert str(given.name) == "x"
    assert [str(weight.name) for weight in weights] == list(catalogue.shapes(network))


@pytest.mark.parametrize("name", catalogue.ZOO)
def test_a_model_has_the_known_subgraphs_all_tunable_but_views(cpu, name):
    found = extract_subgraphs(fusion.fuse(catalogue.define(name)[0], cpu.tvm()))

    assert len([subgraph for subgraph in found if subgraph.tunable]) == SUBGRAPHS[name]
    assert all("a view" in subgraph.note for subgraph in found if not subgraph.tunable)


@pytest.mark.parametrize("name", ["bert_large", "gpt2", "vit_huge"])
def test_attention_copies_three_times_a_layer_and_no_more(cpu, name):
    module, network = catalogue.define(name)

    found = extract_subgraphs(fusion.fuse(module, cpu.tvm()))
    copies = [s for s in found if s.tunable and s.core_operator == "data_movement" and "first_token" not in s.name]

    assert [s.operators for s in copies] == [["slice", "reshape", "transpose"]] * 3  # query, key and value by head
    assert all(s.weight == len(network.layers) for s in copies)


def test_bert_and_roberta_share_all_but_the_epsilon_and_the_vocabulary(cpu):
    bert, roberta = (
        {s.subgraph_id: s for s in extract_subgraphs(fusion.fuse(catalogue.define(name)[0], cpu.tvm()))}
        for name in ("bert_large", "roberta_large")
    )

    apart = {s.core_operator for key, s in bert.items() if key not in roberta}

    assert apart == {"layer_norm", "gather"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", [[3, 224, 224, 3], [3, 1000]]),
        ("resnet50_v1", [[3, 224, 224, 3], [3, 1000]]),
        ("resnet50_v1b", [[3, 224, 224, 3], [3, 1000]]),
        ("resnet152_v2", [[3, 224, 224, 3], [3, 1000]]),
        ("mobilenet", [[3, 224, 224, 3], [3, 1000]]),
        ("mobilenetv2", [[3, 224, 224, 3], [3, 1000]]),
        ("vit_huge", [[3, 224, 224, 3], [3, 1000]]),
        ("bert_base", [[3, 128], [3, 128, 768], [3, 768]]),
        ("bert_large", [[3, 128], [3, 128, 1024], [3, 1024]]),
        ("roberta_large", [[3, 128], [3, 128, 1024], [3, 1024]]),
        ("gpt2", [[3, 128], [3, 128, 768]]),
    ],
)
def test_the_batch_reaches_input_and_outputs(name, expected):
    assert interface(catalogue.define(name, batch=3)[0]) == expected


@pytest.mark.parametrize(("name", "longest"), [("bert_large", 512), ("roberta_large", 512), ("gpt2", 1024)])
def test_the_sequence_reaches_input_outputs_and_positions(name, longest):
    module, network = catalogue.define(name, sequence=longest)

    given, hidden, *_ = interface(module)
    assert given == [1, longest]
    assert hidden[:2] == [1, longest]
    assert catalogue.shapes(network)["embedding.position"][0] == longest
    with pytest.raises(ModelError, match=f"--model {name} takes sequences of 1 to {longest} tokens"):
        catalogue.define(name, sequence=longest + 1)


def test_one_token_is_a_sequence(cpu):
    module, _ = catalogue.define("gpt2", batch=2, sequence=1)

    assert interface(module) == [[2, 1], [2, 1, 768]]
    assert extract_subgraphs(fusion.fuse(module, cpu.tvm()))


def test_images_have_no_sequence():
    with pytest.raises(ModelError, match="--model resnet18 takes images, which have no sequence length, but got 7"):
        catalogue.load("resnet18", sequence=7)


def test_a_batch_of_none_is_refused():
    with pytest.raises(ModelError, match="a batch has at least one sample, but got 0"):
        catalogue.load("tiny_cnn", batch=0)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ModelError, match="The zoo has: resnet18, resnet50, resnet50_v1, resnet50_v1b, resnet152_v2"):
        catalogue.load("resnet51")
