import pytest

from lib.report import accounting
from lib.report.accounting import Record

RECORDS = [
    Record("s1", "generate", {"started": 100.0, "total": 10.0, "search": 9.0}),
    Record("s1", "measure", {"started": 111.0, "total": 20.0, "build": 8.0, "run": 10.0, "start": 1.0}),
    Record("s2", "train", {"started": 1000.0, "total": 5.0, "train": 4.0}),  # after an interruption
]


def test_seconds_that_no_kind_explains_are_the_pipelines_own():
    spent = accounting.spent(RECORDS)

    assert spent["total"] == pytest.approx(31 + 5)  # two sessions, without the pause between them
    assert (spent["search"], spent["build"], spent["run"], spent["train"]) == (9, 8, 10, 4)
    assert spent["rest"] == pytest.approx(36 - 9 - 8 - 10 - 1 - 4)


def test_pauses_between_sessions_do_not_count():
    assert accounting.active_seconds(RECORDS, [105.0, 131.0, 500.0, 1002.0]) == pytest.approx([5, 31, 31, 33])


def test_waiting_is_told_as_a_share_of_the_time_of_measuring():
    with_company = Record("s1", "measure", {"started": 140.0, "total": 30.0, "run": 30.0, "waited": 8.0})

    assert accounting.waited([*RECORDS, with_company]) == pytest.approx(8 / 40)
    assert accounting.waited(RECORDS) == 0
    assert accounting.waited(RECORDS[:1]) == 0  # nothing was measured
