"""What came of measuring a candidate, as MEASUREMENTS has it."""

from enum import Enum


class Status(str, Enum):
    """A plain string in Parquet and in JSON, and equal to it.

    Wrong results have no status here: only finalists are checked against the untuned program, and RESULTS says in its
    notes how many of them computed something else.
    """

    OK = "ok"
    BUILD_ERROR = "build_error"  # the trace does not fit the workload, or the program does not compile
    RUN_ERROR = "run_error"  # it raised, e.g. for want of memory
    TIMEOUT = "timeout"  # killed, while it was compiled or run
    CRASH = "crash"  # it took its process with it
    MISS = "miss"  # a replay has no measurement of it

    def __str__(self) -> str:
        return self.value
