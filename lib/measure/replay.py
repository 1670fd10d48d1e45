"""A runner without hardware: it answers with what was measured before, under the conditions that are asked for."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lib.contracts import tables
from lib.contracts.conditions import Conditions
from lib.contracts.errors import ConfigError
from lib.contracts.schemas import MEASUREMENTS
from lib.contracts.statuses import Status
from lib.measure.runner import Job, Measurement


class ReplayRunner:
    """Measurements of stored tables by candidate; one that was never measured is a row with the status `miss`."""

    def __init__(self, folder: Path, wanted: Conditions) -> None:
        """Read every MEASUREMENTS table below a folder.

        Args:
            wanted: Only rows of these conditions are answered with. Their device may be any, but only one: where none
                is at hand, it is not known which was.

        Raises:
            ConfigError: There is no table; or no row of these conditions; or rows of several devices.
            ContractError: A table is damaged or of another version.
        """
        self._folder = folder
        paths = sorted(folder.rglob("measurements*.parquet"))
        if not paths:
            raise ConfigError(f"--devices replay:{folder}: there is no measurements.parquet in it.")
        rows = [Measurement.of(row) for path in paths for row in tables.read(path, MEASUREMENTS).to_pylist()]
        found = Counter(row.conditions for row in rows)
        self.conditions = _only(found, wanted, folder)
        self.left_out = _left_out(found, self.conditions)
        self._known: dict[str, Measurement] = {}
        for row in rows:
            if row.conditions == self.conditions:
                self._keep(row)

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
        return Measurement(
            job.candidate_id, job.subgraph_id, Status.MISS, [], text, 0.0, 0.0, 0.0, "", "replay", self.conditions
        )


def _only(found: Counter[Conditions], wanted: Conditions, folder: Path) -> Conditions:
    """The conditions that are wanted, with the device that they were measured on."""
    # Weights are cold where a pool can have them so: devices elsewhere cannot, whatever is asked for.
    for weights in dict.fromkeys((wanted.weights, "warm")):
        asked = replace(wanted, weights=weights)
        fitting = [each for each in found if replace(each, device=asked.device) == asked]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            break
    if fitting:
        names = ", ".join(sorted(each.device for each in fitting))
        raise ConfigError(f"--devices replay:{folder}: it holds latencies of several devices ({names}), which cannot "
                          "be compared. Name a folder with those of one.")  # fmt: skip
    if not found:  # tables of rounds that found no candidate
        return wanted
    nearest = min(found, key=lambda each: len(_differences(each, wanted)))
    raise ConfigError(
        f"--devices replay:{folder}: none of its {found.total()} measurements can answer this run. The nearest have\n"
        + "\n".join(f"  {line}" for line in _differences(nearest, wanted))
    )


def _left_out(found: Counter[Conditions], kept: Conditions) -> str:
    """Which rows are not answered with, and why; empty if there are none."""
    lines = [f"{count} measurements with {'; '.join(each.differences(kept))}"
             for each, count in found.items() if each != kept]  # fmt: skip
    return f"left out of the replay: {', '.join(lines)}" if lines else ""


def _differences(found: Conditions, wanted: Conditions) -> list[str]:
    return replace(found, device=wanted.device).differences(wanted)


def _rank(measurement: Measurement) -> tuple[bool, bool, float]:
    return measurement.status == Status.OK, measurement.status != Status.MISS, measurement.measured_at
