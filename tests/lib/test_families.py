import ast
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import families, graph, host, structure, workloads, zoo
from lib.errors import ConfigError


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


# Those that TVM gives to blocks and buffers, which a clustering might be tempted to read, and those that say nothing.
NAMES = ["conv2d_nhwc", "depthwise_conv2d", "matmul", "T_softmax_norm", "reduce_max", "compute_gelu", "pad_temp",
         "T_take", "layer_norm", "T_add", "rsqrt", "pool_max", "transpose", "T_concat"]  # fmt: skip
NAMES += [f"{name}_{n}" for name in NAMES for n in range(4)] + [f"v{n}" for n in range(30)]


@cache
def subgraphs_of(model):
    return workloads.extract(graph.fuse(zoo.define(model)[0], host.cpu_target().tvm()))


def renamed(module, names):
    """The same program with its parameters, buffers, loops, axes and blocks named by `names` as they appear."""
    tree = ast.parse(module.script(show_meta=False))
    known = {"T": "T", "I": "I", "range": "range"}  # the language's own

    def new(old):
        return known.setdefault(old, names[len(known) - 3])

    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.arg = new(node.arg)
        elif isinstance(node, ast.Name):
            node.id = new(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sblock":
            node.args = [ast.Constant(new(arg.value)) for arg in node.args]
    return tvm.script.from_source(ast.unparse(tree))


def with_other_names(subgraph, names):
    module = renamed(workloads.load(subgraph.workload), names)
    operators = structure.operators(module)
    return replace(
        subgraph, name=names[-1], functions=[names[-1]], workload=tvm.ir.save_json(module), operators=operators,
        core_operator=structure.core_operator(operators),
    )  # fmt: skip


@pytest.mark.parametrize("model", ["tiny_cnn", "tiny_transformer"])
def test_nothing_of_the_old_names_is_left_after_renaming(model):
    for subgraph in subgraphs_of(model):
        module = workloads.load(subgraph.workload)

        directly, in_two_steps = renamed(module, NAMES), renamed(renamed(module, NAMES[::-1]), NAMES)

        assert directly.script() == in_two_steps.script() != module.script()


@pytest.mark.parametrize("model", ["tiny_cnn", "tiny_transformer"])
@settings(max_examples=4, deadline=None)
@given(data=st.data(), names=st.permutations(NAMES))
def test_real_workloads_keep_their_families_under_other_names_orders_and_weights(model, data, names):
    known = subgraphs_of(model)
    shuffled = data.draw(st.permutations(known))
    weights = data.draw(st.lists(st.integers(1, 99), min_size=len(known), max_size=len(known)))

    others = [
        replace(with_other_names(subgraph, names), weight=weight)
        for subgraph, weight in zip(shuffled, weights, strict=True)
    ]

    assert [s.operators for s in others] == [s.operators for s in shuffled]
    assert [s.core_operator for s in others] == [s.core_operator for s in shuffled]
    for algorithm in families.ALGORITHMS.keys() - {"each"}:  # that one goes by the id
        expected = dict(zip([s.subgraph_id for s in known], families.cluster(known, algorithm), strict=True))
        found = dict(zip([s.subgraph_id for s in others], families.cluster(others, algorithm), strict=True))
        assert found == expected
