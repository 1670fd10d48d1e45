import pyarrow as pa
import pytest

from lib.contracts import tables
from lib.contracts.errors import ModelError
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import MODELS, SUBGRAPHS
from stages import cluster, join
from stages.join import Part
from tests.stages.conftest import PROVENANCE


def subgraphs(path, **weights):
    """A SUBGRAPHS table; those whose names begin with `view` are not tunable."""
    rows = [
        {
            "subgraph_id": name, "name": f"fused_{name}", "functions": [name], "weight": weight, "flop": 1.0,
            "core_operator": "matmul", "operators": ["matmul"], "tunable": not name.startswith("view"), "note": "",
            "workload": f"[{name}]",
        }
        for name, weight in weights.items()
    ]  # fmt: skip
    return tables.write(pa.Table.from_pylist(rows, schema=SUBGRAPHS), path, SUBGRAPHS, PROVENANCE)


def test_what_models_share_is_there_once_with_all_calls_and_models_know_their_own(tmp_path):
    parts = [
        Part("one", 2.0, subgraphs(tmp_path / "1.parquet", a=3, b=1, view=1)),
        Part("gone", 1.0, None, "there is no such file"),
        Part("two", 1.0, subgraphs(tmp_path / "2.parquet", c=2, a=4)),
    ]
    out = ModelFiles(tmp_path / "night")

    join.run(parts, provenance=PROVENANCE, out=out)

    joined = tables.read(out.subgraphs, SUBGRAPHS).to_pylist()
    assert [(row["subgraph_id"], row["name"], row["weight"]) for row in joined] == [
        ("a", "one/fused_a", 7), ("b", "one/fused_b", 1), ("view", "one/fused_view", 1), ("c", "two/fused_c", 2),
    ]  # fmt: skip
    assert tables.read(out.models, MODELS).to_pylist() == [
        {"name": "one", "importance": 2.0, "error": "", "subgraphs": ["a", "b"], "calls": [3, 1]},
        {"name": "gone", "importance": 1.0, "error": "there is no such file", "subgraphs": [], "calls": []},
        {"name": "two", "importance": 1.0, "error": "", "subgraphs": ["c", "a"], "calls": [2, 4]},
    ]


def test_families_span_models(tmp_path):
    out = ModelFiles(tmp_path / "night")
    parts = [Part(name, 1.0, subgraphs(tmp_path / f"{name}.parquet", **{name: 1})) for name in ("a", "b")]
    join.run(parts, provenance=PROVENANCE, out=out)

    clustered = cluster.cluster(tables.read(out.subgraphs, SUBGRAPHS), "core-operator")

    assert clustered.to_pydict() == {"subgraph_id": ["a", "b"], "family_id": ["matmul", "matmul"]}


def test_without_one_model_there_is_nothing_to_join_and_all_reasons_are_told(tmp_path):
    parts = [Part("one", 1.0, None, "why one"), Part("two", 1.0, None, "why two")]

    with pytest.raises(ModelError, match=r"one: why one\n  two: why two"):
        join.run(parts, provenance=PROVENANCE, out=ModelFiles(tmp_path))
