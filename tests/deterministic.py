"""A luigi command whose measurements are real but for the latencies: those follow from the candidate's id.

So two runs of one command can be compared row by row, whatever interrupted them.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from luigi.cmdline import luigi_run

import pipeline
from lib.runner import Job, Measurement
from lib.workers import LocalPool


class Deterministic(LocalPool):
    def run(self, jobs: Sequence[Job]) -> Iterator[Measurement]:
        for measurement in super().run(jobs):
            told = 1e-6 * (1 + int(measurement.candidate_id[:6], 16) % 1000)
            yield replace(measurement, latencies=[told]) if measurement.status == "ok" else measurement


@cache
def make_runner(_where: Any, target: Any, config: Any) -> LocalPool:
    pool = Deterministic(target, config)
    pipeline.atexit.register(pool.close)
    return pool


if __name__ == "__main__":
    pipeline.make_runner = make_runner
    luigi_run(["--module", "pipeline", *sys.argv[1:]])
