"""The identity of a latency: all that decides how long a program takes, beside the program.

A candidate is a workload with a trace; what it takes depends on how it is lowered, for which target, on how many
threads, on which kind of device, and on whether its weights came from caches. Each measurement carries these, and two
latencies are compared, averaged or learned from together only where they are equal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from lib.contracts import digests
from lib.contracts.errors import ContractError


@dataclass(frozen=True, slots=True)
class Conditions:
    """See the columns of MEASUREMENTS below `conditions` for units."""

    target: str
    threads: int
    weights: str
    lowering: str
    timing: int
    device: str
    versions: str

    @property
    def id(self) -> str:
        """A digest: equal for latencies that may be compared."""
        return _id(self)

    def differences(self, other: "Conditions") -> list[str]:
        """Each field that differs, as `name: mine, not theirs`, for messages."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name}: {mine[name]}, not {theirs[name]}" for name in mine if mine[name] != theirs[name]]

    @staticmethod
    def of(row: Mapping[str, Any]) -> "Conditions":
        """From the `conditions` of a row as Parquet and JSON have it.

        Raises:
            TypeError: Fields are missing, or there are others.
        """
        return Conditions(**row)


NAMES = tuple(field.name for field in fields(Conditions))


@cache
def _id(conditions: Conditions) -> str:
    return digests.of_json(asdict(conditions))


def require_equal(found: Iterable[Conditions], expected: Conditions | None, path: Path) -> Conditions | None:
    """The conditions that all rows of a table share, or `expected` if it has none.

    Args:
        expected: Of the tables that were read before, if any.

    Raises:
        ContractError: Rows were measured under different conditions, so that their latencies cannot be compared.
    """
    for each in dict.fromkeys(found):
        if expected is not None and each != expected:
            raise ContractError(
                f"{path} holds latencies that cannot be compared with the others of this run:\n"
                + "".join(f"  {line}\n" for line in each.differences(expected))
                + "Move it away to keep it, or delete it; the next command measures again what is missing."
            )
        expected = each
    return expected
