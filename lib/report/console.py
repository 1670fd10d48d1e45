"""What a terminal is told: one line of progress, notes, warnings, errors in words instead of tracebacks."""

import logging
import sys
import threading
from functools import cache
from typing import Any

from lib.contracts.errors import TunerError
from lib.report.progress import Progress


@cache
def progress() -> Progress:
    """The line of this process."""
    return Progress()


def show(text: str) -> None:
    """Print what was asked for."""
    progress().end()
    print(text)


@cache
def tell(text: str) -> None:
    """Print what the user should know, once, whether or not somebody watches."""
    progress().end()
    print(text, file=sys.stderr)


@cache
def note(text: str) -> None:
    """Print a line for whoever watches, once."""
    progress().note(text)


def error(text: str) -> None:
    """Print why something is not done."""
    progress().end()
    print(f"error: {text}", file=sys.stderr)


def set_up(scheduler: str, said_already: str, of_the_user: type[Exception]) -> None:
    """Replace tracebacks of errors that are the user's or the machine's by a line, unless the log level is DEBUG.

    Args:
        scheduler: Name of the logger that reports failures of tasks with tracebacks.
        said_already: Part of its messages about what was told in better words before.
        of_the_user: What the command line's parser raises.
    """
    logging.getLogger(scheduler).addFilter(_WithoutTracebacks(said_already, of_the_user))
    logging.getLogger("tvm").setLevel(logging.ERROR)
    if threading.current_thread() is threading.main_thread():
        sys.excepthook = _on_exception


def in_words(found: BaseException | None, of_the_user: tuple[type[BaseException], ...] = ()) -> str:
    """What is wrong, if that is the user's or the machine's affair; empty for what is a bug of ours."""
    if isinstance(found, (TunerError, *of_the_user)):
        return str(found)
    if isinstance(found, OSError):
        where = f"{found.filename}: " if found.filename else ""
        return f"{where}{found.strerror or found}. What was measured is kept, and the same command continues."
    if isinstance(found, MemoryError):
        return "the memory does not suffice. What was measured is kept, and the same command continues."
    return ""


class _WithoutTracebacks(logging.Filter):
    def __init__(self, said_already: str, *of_the_user: type[BaseException]) -> None:
        super().__init__()
        self._said_already = said_already
        self._of_the_user = of_the_user
        self._told: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        found = record.exc_info[1] if record.exc_info else None
        words = in_words(found, self._of_the_user)
        if words and not logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
            if words not in self._told:  # of a task that several others need
                self._told.add(words)
                error(words)
            return False
        return self._said_already not in record.getMessage()


def _on_exception(kind: Any, found: Any, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        progress().end()
        print("interrupted: what was measured is kept, and the same command continues", file=sys.stderr)
    elif words := in_words(found):
        error(words)
    else:
        sys.__excepthook__(kind, found, trace)
