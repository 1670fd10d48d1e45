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
