from lib import journal
from lib.runner import Measurement

ONE = Measurement("a", "s", "ok", [1.0, 2.0], None, 0.1, 0.2, 3.0, "host", "cpu", 2, "tvm 0")
TWO = Measurement("b", "s", "timeout", [], "killed after 2 s", 0.1, 2.0, 4.0, "host", "cpu", 2, "tvm 0")


def test_what_was_added_is_read_back(tmp_path):
    with journal.appending(tmp_path / "j.jsonl") as book:
        book.add(ONE)
        book.add(TWO)

    assert journal.read(tmp_path / "j.jsonl") == [ONE, TWO]


def test_each_measurement_is_on_disk_before_the_next_begins(tmp_path):
    with journal.appending(tmp_path / "j.jsonl") as book:
        book.add(ONE)
        assert journal.read(tmp_path / "j.jsonl") == [ONE]


def test_a_line_torn_by_a_power_cut_is_left_out_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "j.jsonl"
    with journal.appending(path) as book:
        book.add(ONE)
        book.add(TWO)
    path.write_text(path.read_text()[:-30])

    with journal.appending(path) as book:
        book.add(TWO)

    assert journal.read(path) == [ONE, TWO]


def test_no_journal_means_nothing_was_measured(tmp_path):
    assert journal.read(tmp_path / "none.jsonl") == []
