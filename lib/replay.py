"""A runner without hardware: it answers with what was measured before."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lib import tables
from lib.errors import ConfigError
from lib.runner import Job, Measurement
from lib.schemas import MEASUREMENTS


class ReplayRunner:
    """Measurements of stored tables by candidate; one that was never measured is a row with the status `miss`."""

    def __init__(self, folder: Path) -> None:
        """Read every MEASUREMENTS table below a folder.

        Raises:
            ConfigError: There is none.
            ContractError: One of them is damaged or of another version.
        """
        self._folder = folder
        self._known: dict[str, Measurement] = {}
        paths = sorted(folder.rglob("measurements*.parquet"))
        if not paths:
            raise ConfigError(f"--devices replay:{folder}: there is no measurements.parquet in it.")
        for path in paths:
            for row in tables.read(path, MEASUREMENTS).to_pylist():
                self._keep(Measurement(**row))

    @property
    def clock(self) -> dict[str, float]:
        """See `Runner.clock`: nothing was built or run."""
        return {}

    def run(self, jobs: Sequence[Job]) -> Iterator[Measurement]:
        """See `Runner.run`."""
        for job in jobs:
            yield self._known.get(job.candidate_id) or self._miss(job)

    def close(self) -> None:
        """Nothing is open."""

    def _keep(self, found: Measurement) -> None:
        """The latest success of a candidate counts, else its latest failure."""
        before = self._known.get(found.candidate_id)
        if before is None or _rank(found) > _rank(before):
            self._known[found.candidate_id] = found

    def _miss(self, job: Job) -> Measurement:
        text = f"never measured in {self._folder}"
        return Measurement(job.candidate_id, job.subgraph_id, "miss", [], text, 0.0, 0.0, 0.0, "", "replay", 0, "")


def _rank(measurement: Measurement) -> tuple[bool, bool, float]:
    return measurement.status == "ok", measurement.status != "miss", measurement.measured_at
