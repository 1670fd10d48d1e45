from dataclasses import asdict

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import tables
from lib.errors import ConfigError
from lib.families import ALGORITHMS
from lib.schemas import FAMILIES, SUBGRAPHS
from lib.source import Source
from stages import cluster, extract
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
