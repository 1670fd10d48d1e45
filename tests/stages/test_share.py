import pytest

from lib.contracts import tables
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import SHARED, SUBGRAPHS
from lib.graph.algorithms import AlgorithmConfig
from lib.models.source import Source
from stages import extract, share
from tests import range_files
from tests.stages.conftest import PROVENANCE


@pytest.fixture(scope="module")
def shapes(cpu, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    file = str(range_files.attention(folder / "mask.onnx", "mask"))
    found = [ModelFiles(folder / str(extent)) for extent in (8, 24)]
    for files, extent in zip(found, (8, 24), strict=True):
        source = Source(file, shape=f"batch=1 sequence={extent}")
        extract.run(source, cpu, AlgorithmConfig(), provenance=PROVENANCE, out=files)
    return found


def test_products_with_the_same_weights_are_in_one_group_in_all_shapes(shapes, tmp_path):
    rows = tables.read(share.run(shapes, provenance=PROVENANCE, out=ModelFiles(tmp_path)), SHARED).to_pylist()
    group_of = {row["subgraph_id"]: row["group"] for row in rows}

    of_shapes = [tables.read(files.subgraphs, SUBGRAPHS).to_pylist() for files in shapes]
    products = [[row["subgraph_id"] for row in found if row["core_operator"] == "matmul"] for found in of_shapes]
    assert len(products[0]) == len(products[1]) > 1
    assert set(products[0]).isdisjoint(products[1])
    assert {group_of[key] for key in products[0]} == {group_of[key] for key in products[1]}


def test_subgraphs_hang_together_by_any_weight():
    assert share.groups({"a": "1", "b": "12", "c": "2", "d": "3", "e": "4"}) == [["a", "b", "c"], ["d"], ["e"]]
