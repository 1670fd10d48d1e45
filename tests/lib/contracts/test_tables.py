import errno
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lib.contracts import tables
from lib.contracts.errors import ContractError, MissingInput
from lib.contracts.schemas import FAMILIES, MEASUREMENTS
from lib.contracts.tables import Provenance

ROWS = [{"subgraph_id": "a", "family_id": "conv2d"}, {"subgraph_id": "b", "family_id": "matmul"}]


def families(rows=ROWS):
    return pa.Table.from_pylist(rows, schema=FAMILIES)


def test_a_table_reads_back_as_it_was_written(tmp_path):
    path = tables.write(families(), tmp_path / "f.parquet", FAMILIES, Provenance("inputs"))

    assert tables.read(path, FAMILIES).to_pylist() == ROWS


def test_units_and_docs_of_columns_are_in_the_file(tmp_path):
    path = tables.write(
        pa.Table.from_pylist([], schema=MEASUREMENTS), tmp_path / "m.parquet", MEASUREMENTS, Provenance()
    )

    assert pq.read_schema(path).field("build_s").metadata[b"unit"] == b"s"


def test_nothing_but_the_whole_file_is_left_after_writing(tmp_path):
    tables.write(families(), tmp_path / "f.parquet", FAMILIES, Provenance())

    assert [path.name for path in tmp_path.iterdir()] == ["f.parquet"]


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(MissingInput, match=r"f\.parquet does not exist"):
        tables.read(tmp_path / "f.parquet", FAMILIES)


def test_a_truncated_table_is_called_damaged_and_told_what_to_do(tmp_path):
    path = tables.write(families(), tmp_path / "f.parquet", FAMILIES, Provenance())
    path.write_bytes(path.read_bytes()[:-20])

    for look in (lambda: tables.read(path, FAMILIES), lambda: tables.stamp(path, FAMILIES)):
        with pytest.raises(ContractError, match=r"f\.parquet is damaged: expected a families table(.|\n)*Delete it"):
            look()


def test_a_table_of_another_version_is_refused_by_version(tmp_path):
    newer = FAMILIES.with_metadata({**FAMILIES.metadata, b"version": b"2"})
    path = tables.write(families(), tmp_path / "f.parquet", newer, Provenance())

    for look in (lambda: tables.read(path, FAMILIES), lambda: tables.is_current(path, FAMILIES, "")):
        with pytest.raises(ContractError, match="is not a families v1 table:\n  version: expected 1, found 2"):
            look()


def test_another_table_is_refused_by_name(tmp_path):
    path = tables.write(
        pa.Table.from_pylist([], schema=MEASUREMENTS), tmp_path / "m.parquet", MEASUREMENTS, Provenance()
    )

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
    path = tables.write(families(), tmp_path / "f.parquet", FAMILIES, Provenance("old"))

    assert tables.is_current(path, FAMILIES, "old")
    assert not tables.is_current(path, FAMILIES, "new")


def test_a_table_whose_side_file_is_gone_is_not_current(tmp_path):
    side = tmp_path / "models" / "a.ubj"
    side.parent.mkdir()
    side.write_text("x")
    path = tables.write(families(), tmp_path / "f.parquet", FAMILIES, Provenance("i"), files=[side])
    assert tables.is_current(path, FAMILIES, "i")

    side.unlink()

    assert not tables.is_current(path, FAMILIES, "i")


def test_clocks_and_sessions_are_no_part_of_the_content(tmp_path):
    first = tables.write(families(), tmp_path / "1.parquet", FAMILIES, Provenance("i", "s1"), clock={"total": 1.0})
    second = tables.write(families(), tmp_path / "2.parquet", FAMILIES, Provenance("i", "s2"), clock={"total": 2.0})

    assert tables.stamp(first, FAMILIES).fingerprint == tables.stamp(second, FAMILIES).fingerprint


def test_a_file_written_anew_is_not_read_from_the_cache(tmp_path):
    path = tables.write(families(), tmp_path / "f.parquet", FAMILIES, Provenance("i"))
    before = tables.stamp(path, FAMILIES).content

    tables.write(families(ROWS[:1]), path, FAMILIES, Provenance("i"))

    assert tables.stamp(path, FAMILIES).content != before


def test_a_side_file_with_a_flipped_bit_is_not_current(tmp_path):
    side = tmp_path / "a.ubj"
    side.write_bytes(bytes(100))
    path = tables.write(families(), tmp_path / "f.parquet", FAMILIES, Provenance("i"), files=[side])

    side.write_bytes(bytes(50) + b"\1" + bytes(49))

    assert not tables.is_current(path, FAMILIES, "i")


@pytest.mark.parametrize("rows", [ROWS, [{"subgraph_id": f"id{n}", "family_id": "conv2d" * 9} for n in range(500)]])
def test_of_all_flipped_bits_none_is_read_as_other_rows(tmp_path, rows):
    path = tables.write(families(rows), tmp_path / "f.parquet", FAMILIES, Provenance("inputs", "session"))
    whole = path.read_bytes()
    inputs = tables.stamp(path, FAMILIES).inputs
    generator, caught = random.Random(0), 0

    for bit in generator.sample(range(8 * len(whole)), 400):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = tables.read(path, FAMILIES)
        except ContractError:
            caught += 1
        else:  # what Arrow itself does not look at
            assert found.to_pylist() == rows
            assert tables.stamp(path, FAMILIES).inputs == inputs

    assert caught > 200


def test_a_table_of_code_without_seals_is_called_foreign_rather_than_damaged(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(families(), path)

    with pytest.raises(ContractError, match=r"stamp: expected 2, found none\nOther code wrote it"):
        tables.read(path, FAMILIES)


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path):
    def write():
        with tables.written_whole(tmp_path / "f.parquet") as partial:
            partial.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write()

    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_swept_and_nothing_else(tmp_path):
    kept = ["subgraphs.parquet", "runs/a/.report.123.png", "rounds/0000/models/conv2d.ubj", ".hidden", "x.12.npz"]
    left = [".weights.4711.npz", "rounds/0000/models/.conv2d.99.ubj", "compiled/building-abc/tuned.so", ".lock.7"]
    for name in (*kept, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    tables.sweep(tmp_path, keep="runs")

    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == sorted(kept)


def test_the_name_of_a_half_written_file_is_one_that_is_swept(tmp_path):
    for name in ("m.parquet", "conv2d.1x1.ubj", "manifest.json"):
        with tables.written_whole(tmp_path / name) as partial:
            partial.touch()
            assert tables._PARTIAL.fullmatch(partial.name)
