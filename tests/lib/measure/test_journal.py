from dataclasses import replace

import pytest

from lib.contracts.statuses import Status
from lib.measure import journal
from lib.measure.journal import Found
from lib.measure.runner import Measurement
from tests.helpers import CONDITIONS

ONE = Measurement("a", "s", "ok", [1.0, 2.0], None, 0.1, 0.2, 3.0, "host", "cpu", CONDITIONS)
TWO = Measurement("b", "s", "timeout", [], "killed after 2 s", 0.1, 2.0, 4.0, "host", "cpu", CONDITIONS)


def test_what_was_added_is_read_back(tmp_path):
    with journal.appending(tmp_path / "j.jsonl") as book:
        book.add(ONE)
        book.add(TWO)

    assert journal.read(tmp_path / "j.jsonl") == Found([ONE, TWO], 0)


def test_each_measurement_is_on_disk_before_the_next_begins(tmp_path):
    with journal.appending(tmp_path / "j.jsonl") as book:
        book.add(ONE)
        assert journal.read(tmp_path / "j.jsonl").rows == [ONE]


def test_a_line_torn_by_a_power_cut_is_left_out_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "j.jsonl"
    with journal.appending(path) as book:
        book.add(ONE)
        book.add(TWO)
    path.write_text(path.read_text()[:-30])
    assert journal.read(path) == Found([ONE], 0)

    with journal.appending(path) as book:
        book.add(TWO)

    assert journal.read(path) == Found([ONE, TWO], 1)


def test_a_status_is_one_of_those_there_are(tmp_path):
    path = tmp_path / "j.jsonl"
    with journal.appending(path) as book:
        book.add(ONE)
        book.add(replace(TWO, status="wrong_result"))

    [found] = journal.read(path).rows

    assert found == ONE
    assert found.status is Status.OK


def test_no_journal_means_nothing_was_measured(tmp_path):
    assert journal.read(tmp_path / "none.jsonl") == Found([], 0)


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_costs_its_line_and_no_other(tmp_path, bit):
    path = tmp_path / "j.jsonl"
    with journal.appending(path) as book:
        book.add(ONE)
        book.add(TWO)
    whole = path.read_bytes()
    first = whole.index(b"\n")

    for byte in range(first):
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << bit
        path.write_bytes(damaged)
        found = journal.read(path)
        assert found.rows == [TWO]
        assert found.damaged in (1, 2)  # two if the line was cut in two


@pytest.mark.parametrize("line", [b"[" * 100_000, b"\xff\xfe", b"{}", b'{"crc32": "00000000", "row": }', b"\0" * 4096])
def test_what_is_no_line_of_a_journal_is_counted_and_left_out(tmp_path, line):
    path = tmp_path / "j.jsonl"
    path.write_bytes(line + b"\n")
    with journal.appending(path) as book:
        book.add(ONE)

    assert journal.read(path) == Found([ONE], 1)
