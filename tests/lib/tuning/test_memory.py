import multiprocessing
import os
import signal
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pytest

from lib.contracts import tables
from lib.contracts.schemas import REMEMBERED, REMEMBERED_1, REMEMBERED_2
from lib.contracts.tables import Provenance
from lib.tuning.memory import Memory, MemoryConfig
from tests.farm import until
from tests.helpers import CONDITIONS


def remembered(subgraph_id, *latencies, operator="conv2d", start=0, **changed):
    """Rows of a subgraph, candidates `<subgraph>-<n>` from `start` on."""
    rows = [
        {
            "core_operator": operator, "operators": [operator], "candidate_id": f"{subgraph_id}-{n}",
            "subgraph_id": subgraph_id, "origin": "sampled", "space": "contraction", "program_hash": f"{n}",
            "trace": f"[{n}]", "donor": "", "features": np.full(55, n, np.float32), "status": "ok",
            "latencies": [latency], "error": None, "build_s": 0.1, "run_s": 0.1, "measured_at": float(n),
            "host": "host", "device": "cpu",
            "conditions": asdict(CONDITIONS), **changed,
        }
        for n, latency in enumerate(latencies, start)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=REMEMBERED)


def ids(table):
    return table["candidate_id"].to_pylist()


@pytest.fixture
def memory(tmp_path):
    return Memory(tmp_path, CONDITIONS)


def test_what_one_run_measured_another_finds_with_all_its_columns(memory, tmp_path):
    memory.remember(remembered("a", 1.0, 2.0))

    assert Memory(tmp_path, CONDITIONS).of("conv2d", "a").equals(remembered("a", 1.0, 2.0))
    assert memory.of("conv2d", "b").num_rows == memory.of("matmul", "a").num_rows == 0


def test_what_was_measured_under_other_conditions_is_another_memory(memory, tmp_path):
    memory.remember(remembered("a", 1.0))

    other = Memory(tmp_path, replace(CONDITIONS, threads=CONDITIONS.threads + 1))

    assert other.of("conv2d", "a").num_rows == 0


def test_each_subgraph_has_files_of_its_own_and_equal_rows_are_one_file(memory):
    both = pa.concat_tables([remembered("a", 1.0), remembered("b", 2.0, operator="matmul")])

    written = memory.remember(both)

    assert sorted(path.parent.name for path in written) == ["subgraph=a", "subgraph=b"]
    assert memory.remember(both) == []


def test_a_candidate_that_is_known_twice_is_told_once_as_it_was_measured_last(memory):
    [first] = memory.remember(remembered("a", 1.0, 2.0))
    os.utime(first, (0, 0))
    memory.remember(remembered("a", 3.0, start=1))

    found = memory.of("conv2d", "a").to_pylist()

    assert [(row["candidate_id"], row["latencies"]) for row in found] == [("a-0", [1.0]), ("a-1", [3.0])]


def test_only_candidates_that_are_asked_for_are_looked_up(memory):
    memory.remember(remembered("a", 1.0, 2.0, 3.0))

    assert ids(memory.known("conv2d", "a", ["a-2", "x"])) == ["a-2"]


def test_others_of_an_operator_come_newest_first_and_without_the_runs_own(memory):
    for n, name in enumerate(("a", "b", "c")):
        [path] = memory.remember(remembered(name, 1.0))
        os.utime(path, (n, n))
    memory.remember(remembered("d", 1.0, operator="matmul"))

    assert [ids(part) for part in memory.like("conv2d", but=frozenset("c"))] == [["b-0"], ["a-0"]]


def test_a_damaged_file_costs_what_it_holds_and_is_told(tmp_path):
    told = []
    memory = Memory(tmp_path, CONDITIONS, told.append)
    [damaged] = memory.remember(remembered("a", 1.0))
    memory.remember(remembered("a", 2.0, start=1))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)

    assert ids(memory.of("conv2d", "a")) == ["a-1"]
    assert ids(memory.known("conv2d", "a", ["a-0", "a-1"])) == ["a-1"]
    assert all(str(damaged) in text for text in told)
    assert told


def test_a_full_disk_leaves_nothing_half_written(memory, monkeypatch):
    memory.remember(remembered("a", 1.0))

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tables.pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        memory.remember(remembered("a", 2.0, start=1))

    assert ids(memory.of("conv2d", "a")) == ["a-0"]
    assert [path.suffix for path in (memory.folder / "operator=conv2d" / "subgraph=a").iterdir()] == [".parquet"]


def test_what_is_exhausted_is_so_for_one_search_under_one_set_of_conditions(tmp_path):
    memory = Memory(tmp_path, CONDITIONS, search="a")
    before = memory.is_exhausted("conv2d", "s")
    memory.exhaust("conv2d", "s")
    memory.exhaust("conv2d", "s")
    other = replace(CONDITIONS, threads=CONDITIONS.threads + 1)

    assert not before
    assert Memory(tmp_path, CONDITIONS, search="a").is_exhausted("conv2d", "s")
    assert not memory.is_exhausted("conv2d", "t")
    assert not Memory(tmp_path, CONDITIONS, search="b").is_exhausted("conv2d", "s")
    assert not Memory(tmp_path, other, search="a").is_exhausted("conv2d", "s")


def test_what_a_killed_process_left_half_written_goes_when_its_subgraph_is_measured_next(memory):
    [path] = memory.remember(remembered("a", 1.0))
    left = path.with_name(f".{path.stem}.12345.parquet")  # as `tables.written_whole` names it
    left.write_bytes(b"half")
    [other] = memory.remember(remembered("b", 1.0))
    of_another = other.with_name(left.name)  # who may be writing now
    of_another.write_bytes(b"half")

    with memory.claimed({"a": "conv2d"}, lambda: None):
        assert not left.exists()

    assert of_another.exists()
    assert ids(memory.of("conv2d", "a")) == ["a-0"]


def _remember_for_ever(folder, name, done):
    memory = Memory(folder, CONDITIONS)
    for n in range(10_000):
        memory.remember(remembered(name, 1.0, start=n))
        done.value += 1


def test_two_writers_that_are_killed_at_any_moment_leave_whole_files(memory, tmp_path):
    told = []
    spawn = multiprocessing.get_context("spawn")  # Arrow's threads do not outlive a fork
    counts = [spawn.RawValue("i", 0) for _ in range(2)]  # a lock that a killed writer held would never open again
    writers = [spawn.Process(target=_remember_for_ever, args=(tmp_path, "a", done))
               for done in counts]  # fmt: skip
    for writer in writers:
        writer.start()
    until(lambda: min(done.value for done in counts) >= 20)
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()

    found = Memory(tmp_path, CONDITIONS, told.append).of("conv2d", "a")

    assert found.num_rows >= max(done.value for done in counts)
    assert told == []


def test_who_claims_a_subgraph_is_waited_for(memory, tmp_path):
    waited = []
    with memory.claimed({"a": "conv2d", "b": "conv2d"}, lambda: None):
        other = multiprocessing.get_context("spawn").Process(target=_claim, args=(tmp_path, tmp_path / "claimed"))
        other.start()
        until((tmp_path / "asks").exists)
        other.join(0.5)
        waited.append(not (tmp_path / "claimed").exists())
    other.join()

    assert waited == [True]
    assert (tmp_path / "claimed").exists()


def _claim(folder, sign):
    with Memory(folder, CONDITIONS).claimed({"b": "conv2d"}, (folder / "asks").touch):
        sign.touch()


def test_memory_is_used_or_not():
    with pytest.raises(Exception, match="use must be yes or no, but got 'maybe'"):
        MemoryConfig("maybe")


def rows_of_stores(rows):
    """As the first version had them."""
    features = pa.array([[[0.5] * 164]] * len(rows), REMEMBERED_1.field("features").type)
    return rows.drop_columns(["donor"]).set_column(rows.column_names.index("features") - 1, "features", features)


@pytest.mark.parametrize(("schema", "older"), [(REMEMBERED_1, rows_of_stores), (REMEMBERED_2, lambda rows: rows)])
def test_what_older_code_remembered_keeps_its_measurements_but_no_features(memory, schema, older):
    rows = older(remembered("a", 1.0, 2.0))
    folder = memory.folder / "operator=conv2d" / "subgraph=a"
    tables.write(rows.select(schema.names), folder / "old.parquet", schema, Provenance())

    found = memory.of("conv2d", "a")

    assert ids(found) == ["a-0", "a-1"]
    assert found["latencies"].to_pylist() == [[1.0], [2.0]]
    assert found["features"].to_pylist() == [[], []]
