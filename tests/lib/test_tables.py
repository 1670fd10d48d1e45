import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib import tables
from lib.errors import ContractError, MissingInput
from lib.schemas import FAMILIES, MEASUREMENTS
from lib.tables import Origin

ROWS = [{"subgraph_id": "a", "family_id": "conv2d"}, {"subgraph_id": "b", "family_id": "matmul"}]


def families(rows=ROWS):
    return pa.Table.from_pylist(rows, schema=FAMILIES)


def test_a_table_reads_back_as_it_was_written(tmp_path):
    path = tables.write(families(), tmp_path / "f.parquet", FAMILIES, Origin("inputs"))

    assert tables.read(path, FAMILIES).to_pylist() == ROWS


def test_units_and_docs_of_columns_are_in_the_file(tmp_path):
    path = tables.write(pa.Table.from_pylist([], schema=MEASUREMENTS), tmp_path / "m.parquet", MEASUREMENTS, Origin())

    assert pq.read_schema(path).field("build_s").metadata[b"unit"] == b"s"


def test_nothing_but_the_whole_file_is_left_after_writing(tmp_path):
    tables.write(families(), tmp_path / "f.parquet", FAMILIES, Origin())

    assert [path.name for path in tmp_path.iterdir()] == ["f.parquet"]


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(MissingInput, match=r"f\.parquet does not exist"):
        tables.read(tmp_path / "f.parquet", FAMILIES)


def test_a_truncated_table_is_called_damaged_and_told_what_to_do(tmp_path):
    path = tables.write(families(), tmp_path / "f.parquet", FAMILIES, Origin())
    path.write_bytes(path.read_bytes()[:-20])

    for look in (lambda: tables.read(path, FAMILIES), lambda: tables.stamp(path, FAMILIES)):
        with pytest.raises(ContractError, match=r"f\.parquet is damaged: expected a families table(.|\n)*Delete it"):
            look()


def test_a_table_of_another_version_is_refused_by_version(tmp_path):
    newer = FAMILIES.with_metadata({**FAMILIES.metadata, b"version": b"2"})
    path = tables.write(families(), tmp_path / "f.parquet", newer, Origin())

    for look in (lambda: tables.read(path, FAMILIES), lambda: tables.is_current(path, FAMILIES, "")):
        with pytest.raises(ContractError, match="is not a families v1 table:\n  version: expected 1, found 2"):
            look()


def test_another_table_is_refused_by_name(tmp_path):
    path = tables.write(pa.Table.from_pylist([], schema=MEASUREMENTS), tmp_path / "m.parquet", MEASUREMENTS, Origin())

    with pytest.raises(ContractError, match="table: expected families, found measurements"):
        tables.read(path, FAMILIES)


def test_each_column_that_differs_is_told_with_both_sides(tmp_path):
    other = pa.schema(
        [FAMILIES.field("subgraph_id"), pa.field("family_id", pa.int64()), pa.field("extra", pa.int64())],
        metadata=FAMILIES.metadata,
    )
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"subgraph_id": ["a"], "family_id": [1], "extra": [1]}).cast(other), path)

    with pytest.raises(ContractError) as caught:
        tables.read(path, FAMILIES)

    assert "family_id: expected string not null [1], found int64 [?]" in str(caught.value)
    assert "extra: expected no such column" in str(caught.value)


def test_a_table_is_current_only_for_the_inputs_it_was_made_from(tmp_path):
    path = tables.write(families(), tmp_path / "f.parquet", FAMILIES, Origin("old"))

    assert tables.is_current(path, FAMILIES, "old")
    assert not tables.is_current(path, FAMILIES, "new")


def test_a_table_whose_side_file_is_gone_is_not_current(tmp_path):
    side = tmp_path / "models" / "a.ubj"
    side.parent.mkdir()
    side.write_text("x")
    path = tables.write(families(), tmp_path / "f.parquet", FAMILIES, Origin("i"), files=[side])
    assert tables.is_current(path, FAMILIES, "i")

    side.unlink()

    assert not tables.is_current(path, FAMILIES, "i")


def test_clocks_and_sessions_are_no_part_of_the_content(tmp_path):
    first = tables.write(families(), tmp_path / "1.parquet", FAMILIES, Origin("i", "s1"), clock={"total": 1.0})
    second = tables.write(families(), tmp_path / "2.parquet", FAMILIES, Origin("i", "s2"), clock={"total": 2.0})

    assert tables.stamp(first, FAMILIES).fingerprint == tables.stamp(second, FAMILIES).fingerprint


def test_a_file_written_anew_is_not_read_from_the_cache(tmp_path):
    path = tables.write(families(), tmp_path / "f.parquet", FAMILIES, Origin("i"))
    before = tables.stamp(path, FAMILIES).content

    tables.write(families(ROWS[:1]), path, FAMILIES, Origin("i"))

    assert tables.stamp(path, FAMILIES).content != before


@given(st.lists(st.tuples(st.text(min_size=1), st.text()), max_size=8))
def test_the_content_digest_depends_on_rows_and_their_order_alone(pairs):
    rows = [{"subgraph_id": a, "family_id": b} for a, b in pairs]
    chunked = pa.concat_tables([families(rows[:3]), families(rows[3:])])

    whole = tables._content_digest(families(rows))

    assert tables._content_digest(chunked.combine_chunks()) == whole
    if rows[::-1] != rows:
        assert tables._content_digest(families(rows[::-1])) != whole
