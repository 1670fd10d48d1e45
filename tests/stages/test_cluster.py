from dataclasses import asdict

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.contracts import tables
from lib.contracts.errors import ConfigError
from lib.contracts.schemas import FAMILIES, SUBGRAPHS
from lib.models.source import Source
from lib.tuning.families import ALGORITHMS
from stages import cluster, extract
from tests.stages.conftest import PROVENANCE


def test_every_tunable_subgraph_has_the_family_of_its_core_operator(started):
    subgraphs = tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()

    found = tables.read(started.families, FAMILIES).to_pylist()

    assert found == [
        {"subgraph_id": s["subgraph_id"], "family_id": s["core_operator"]} for s in subgraphs if s["tunable"]
    ]


def test_an_unknown_algorithm_writes_nothing(started, tmp_path):
    with pytest.raises(ConfigError, match="--families must be one of"):
        cluster.run(started.model.subgraphs, "by-name", provenance=PROVENANCE, out=tmp_path / "f.parquet")

    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def real(cpu) -> pa.Table:
    """The subgraphs of two models as one table."""
    found = [extract.partition(extract.load(Source(name)), cpu)[1] for name in ("tiny_cnn", "tiny_transformer")]
    return pa.Table.from_pylist([asdict(subgraph) for subgraphs in found for subgraph in subgraphs], schema=SUBGRAPHS)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), algorithm=st.sampled_from(sorted(ALGORITHMS)))
def test_a_subgraphs_family_depends_on_nothing_but_itself(real, data, algorithm):
    def families(subgraphs: pa.Table) -> dict[str, str]:
        return dict(zip(*cluster.cluster(subgraphs, algorithm).to_pydict().values(), strict=True))

    rows = data.draw(st.lists(st.sampled_from(real.to_pylist()), min_size=1, unique_by=lambda row: row["subgraph_id"]))
    for row in rows:
        row["name"] = data.draw(st.text(max_size=8))
        row["functions"] = [row["name"]]
        row["weight"] = data.draw(st.integers(1, 1000))

    found = families(pa.Table.from_pylist(rows, schema=SUBGRAPHS))

    assert found == {key: family for key, family in families(real).items() if key in {r["subgraph_id"] for r in rows}}


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
