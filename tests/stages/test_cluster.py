import pyarrow as pa
import pytest

from lib import tables
from lib.errors import ConfigError
from lib.schemas import FAMILIES, SUBGRAPHS
from stages import cluster
from tests.stages.conftest import ORIGIN


def test_every_tunable_subgraph_has_the_family_of_its_core_operator(started):
    subgraphs = tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()

    found = tables.read(started.families, FAMILIES).to_pylist()

    assert found == [
        {"subgraph_id": s["subgraph_id"], "family_id": s["core_operator"]} for s in subgraphs if s["tunable"]
    ]


def test_an_unknown_algorithm_writes_nothing(started, tmp_path):
    with pytest.raises(ConfigError, match="--families must be one of"):
        cluster.run(started.model.subgraphs, "by-name", origin=ORIGIN, out=tmp_path / "f.parquet")

    assert not list(tmp_path.iterdir())


def subgraph(name, operators, weight, flop, note=""):
    return {
        "subgraph_id": name, "name": name, "functions": [name], "weight": weight, "flop": flop,
        "core_operator": operators[0] if operators else "data_movement", "operators": operators,
        "tunable": not note, "note": note, "workload": "",
    }  # fmt: skip


SMALL = pa.Table.from_pylist(
    [
        subgraph("first", ["conv2d", "add"], 2, 3e6),
        subgraph("heavy", ["matmul"], 8, 1e6),
        subgraph("light", ["conv2d"], 1, 2e6),
        subgraph("mover", [], 5, 0.0),
        subgraph("view", ["move"], 4, 0.0, "a reshape: a view, no kernel"),
    ],
    schema=SUBGRAPHS,
)


def test_the_table_has_families_by_flop_their_members_and_what_is_in_none():
    text = cluster.describe(SMALL, cluster.cluster(SMALL, "core-operator"))

    assert [line.split() for line in text.splitlines() if line and "--" not in line] == [
        ["family", "subgraphs", "calls", "MFLOP", "a", "call", "share", "operators"],
        ["conv2d", "2", "3", "50.0", "%"],
        ["first", "2", "3.000", "conv2d,", "add"],
        ["light", "1", "2.000", "conv2d"],
        ["matmul", "1", "8", "50.0", "%"],
        ["heavy", "8", "1.000", "matmul"],
        ["data_movement", "1", "5", "0.0", "%"],
        ["mover", "5", "0.000", "copy"],
        ["compiled", "as", "TVM", "lowers", "it", "calls", "why"],
        ["view", "4", "a", "reshape:", "a", "view,", "no", "kernel"],
    ]


def test_the_table_of_a_model_without_flop_divides_by_no_zero():
    movers = SMALL.slice(3, 1)

    assert "0.0 %" in cluster.describe(movers, cluster.cluster(movers, "core-operator"))


def test_every_subgraph_of_a_model_stands_in_its_table(started):
    subgraphs = tables.read(started.model.subgraphs, SUBGRAPHS)

    text = cluster.describe(subgraphs, tables.read(started.families, FAMILIES))

    assert {line.split()[0] for line in text.splitlines() if line} >= set(subgraphs["name"].to_pylist())
