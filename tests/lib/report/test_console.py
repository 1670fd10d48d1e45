import errno
import logging

import pytest

from lib.contracts.errors import ConfigError
from lib.report import console


class OfTheParser(Exception):
    pass


def told(caplog, capsys, found, level=logging.WARNING):
    """What a user sees of an exception in a task: the text on stderr, and whether a traceback goes with it."""
    log = logging.getLogger("a scheduler of tests")
    log.setLevel(level)
    for old in list(log.filters):
        log.removeFilter(old)
    log.addFilter(console._WithoutTracebacks("said before", OfTheParser))
    try:
        raise found
    except type(found):
        log.exception("a task failed")
    return capsys.readouterr().err, [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (ConfigError("[measure] repeats must be int"), "error: [measure] repeats must be int\n"),
        (OfTheParser("requires the 'model' parameter"), "error: requires the 'model' parameter\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "artifacts/m.parquet"),
            "error: artifacts/m.parquet: No space left on device. What was measured is kept, and the same command "
            "continues.\n",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "a"), "error: a: Permission denied. What was measured is "
         "kept, and the same command continues.\n"),
        (MemoryError(), "error: the memory does not suffice. What was measured is kept, and the same command "
         "continues.\n"),
    ],
)  # fmt: skip
def test_what_the_user_or_the_machine_must_settle_is_one_line(caplog, capsys, found, text):
    assert told(caplog, capsys, found) == (text, [])


def test_a_bug_of_ours_keeps_its_traceback(caplog, capsys):
    text, records = told(caplog, capsys, AssertionError("a bug"))

    assert text == ""
    assert len(records) == 1


def test_who_debugs_sees_every_traceback(caplog, capsys):
    _, records = told(caplog, capsys, OSError(errno.ENOSPC, "No space left on device"), logging.DEBUG)

    assert len(records) == 1
