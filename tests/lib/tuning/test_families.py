import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.contracts.errors import ConfigError
from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.models.zoo import catalogue
from lib.tuning import families


@dataclass(frozen=True)
class Fake:
    subgraph_id: str
    core_operator: str
    operators: list[str] = field(default_factory=list)
    weight: int = 1


CONV = Fake("a", "conv2d", ["conv2d", "add", "max"])
CONV_RESIDUAL = Fake("b", "conv2d", ["conv2d", "add", "add", "max"])
MATMUL = Fake("c", "matmul", ["matmul", "add", "max"])


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("core-operator", ["conv2d", "conv2d", "matmul"]),
        ("operator-count", ["3-operators", "4-operators", "3-operators"]),
        ("operator-sequence", ["conv2d-add-max", "conv2d-add-add-max", "matmul-add-max"]),
        ("single", ["all", "all", "all"]),
        ("each", ["a", "b", "c"]),
    ],
)
def test_each_algorithm_groups_by_its_rule(algorithm, expected):
    assert families.cluster([CONV, CONV_RESIDUAL, MATMUL], algorithm) == expected


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        ("conv2d_1x1 add max", 3),
        ("pad conv2d add max", 3),  # the border is part of the convolution
        ("pad conv2d add max min", 3),  # ReLU6
        ("matmul add mul rational mul add mul", 3),  # GELU
        ("matmul add mul erf mul add mul", 3),
        ("matmul add mul mul mul add mul min max rational mul add mul", 3),  # GELU with tanh
        ("matmul mul mul rational mul add mul", 3),  # a scale before GELU
        ("matmul add min max rational", 3),  # tanh
        ("matmul add mul exp add div mul", 3),  # SiLU
        ("matmul add mul exp add div", 3),  # sigmoid
        ("reduce_max sub exp reduce_sum div", 1),
        ("reduce_sum div reduce_sum rsqrt", 1),
        ("pad avg_pool div", 1),
        ("transpose reshape", 1),
        ("", 1),
    ],
)
def test_what_is_one_operator_of_the_model_counts_once(operators, expected):
    assert families.count(operators.split()) == expected


@pytest.mark.parametrize("model", ["tiny_cnn", "tiny_transformer"])
def test_operators_are_as_many_as_tvm_lists_in_the_name_of_what_it_fused(cpu, model):
    one = r"conv2d|max_pool2d|matmul|einsum|layer_norm|softmax|add|relu|gelu|tanh|multiply|mean|take"
    subgraphs = extract_subgraphs(fusion.fuse(catalogue.load(model).module, cpu.tvm()))

    assert {s.name: families.count(s.operators) for s in subgraphs} == {
        s.name: max(len(re.findall(one, s.name)), 1) for s in subgraphs
    }


def test_an_unknown_algorithm_lists_the_known_ones():
    with pytest.raises(ConfigError, match="core-operator, each, operator-count, operator-sequence, single"):
        families.cluster([], "by-name")


def test_a_registered_clustering_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(families, "ALGORITHMS", dict(families.ALGORITHMS))
    families.register("length")(lambda subgraph: str(len(subgraph.core_operator)))

    assert families.cluster([CONV, MATMUL], "length") == ["6", "6"]


def test_labels_that_are_no_file_names_stay_distinct():
    long = [Fake("a", "x" * 80 + "1"), Fake("b", "x" * 80 + "2"), Fake("c", "a+b"), Fake("d", "a/b")]

    ids = families.cluster(long, "core-operator")

    assert len(set(ids)) == 4
    assert all(len(name) < 80 and "/" not in name and "+" not in name for name in ids)


@given(st.permutations([CONV, CONV_RESIDUAL, MATMUL]), st.integers(1, 9))
def test_families_do_not_depend_on_order_or_weights(order, weight):
    expected = dict(zip("abc", families.cluster([CONV, CONV_RESIDUAL, MATMUL], "core-operator"), strict=True))
    weighted = [Fake(s.subgraph_id, s.core_operator, s.operators, weight) for s in order]

    found = families.cluster(weighted, "core-operator")

    assert {s.subgraph_id: family for s, family in zip(weighted, found, strict=True)} == expected
