import pyarrow as pa

from lib.tuning.members import join, members
from lib.tuning.planning import Member

SUBGRAPHS = pa.table({"subgraph_id": ["a", "b", "c"], "name": ["conv", "view", "dense"], "weight": [3, 1, 2]})
FAMILIES = pa.table({"subgraph_id": ["c", "a"], "family_id": ["matmul", "conv2d"]})


def test_each_subgraph_has_its_family_in_the_order_of_subgraphs_and_those_without_an_empty_one():
    assert [(row["name"], row["family_id"]) for row in join(SUBGRAPHS, FAMILIES)] == [
        ("conv", "conv2d"), ("view", ""), ("dense", "matmul"),
    ]  # fmt: skip


def test_members_are_those_that_are_tuned():
    assert members(SUBGRAPHS, FAMILIES) == [Member("a", "conv2d", 3), Member("c", "matmul", 2)]
