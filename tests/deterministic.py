"""A luigi command whose measurements are real but for the latencies: those follow from the candidate's id.

So two runs of one command can be compared row by row, whatever interrupted them.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from luigi.cmdline import luigi_run

from lib.measure import factory
from lib.measure.local_pool import LocalPool
from lib.measure.runner import Job, Measurement


class Deterministic(LocalPool):
    def run(self, jobs: Sequence[Job]) -> Iterator[Measurement]:
        for measurement in super().run(jobs):
            told = 1e-6 * (1 + int(measurement.candidate_id[:6], 16) % 1000)
            yield replace(measurement, latencies=[told]) if measurement.status == "ok" else measurement


if __name__ == "__main__":
    factory.open_runner = lambda _where, target, config, *_emulator: Deterministic(target, config)
    luigi_run(["--module", "pipeline", *sys.argv[1:]])
