"""All that was measured on a target, whichever model, run or night it was for.

A file holds what one round measured of one subgraph, is named after its content and never changes. Folders say what is
in it: `conditions=<id>/operator=<core operator>/subgraph=<id>/<digest>.parquet`, as pyarrow's datasets have them; so
whoever looks for a subgraph reads its files alone, however many others there are. A file that is damaged costs what it
holds, and a message.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lib.contracts import content, digests, locks, manifest, tables
from lib.contracts.conditions import Conditions
from lib.contracts.errors import ConfigError, TunerError
from lib.contracts.schemas import MEASUREMENTS, REMEMBERED, REMEMBERED_1, REMEMBERED_2
from lib.contracts.tables import Provenance

Say = Callable[[str], object]
# Versions of before, whose features say nothing now; their measurements hold.
_BEFORE = {schema.metadata[b"version"]: schema for schema in (REMEMBERED_1, REMEMBERED_2)}
_FILES_LOOKED_AT = 400  # of other subgraphs, the newest: what they teach more is not worth its seconds


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Whether runs share what they measure."""

    use: str = "yes"  # no: a run begins with nothing and leaves nothing to others, as comparisons want it

    def __post_init__(self) -> None:
        if self.use not in ("yes", "no"):
            raise ConfigError(f"[memory] use must be yes or no, but got {self.use!r}.")


class Memory:
    """What was measured under the same conditions."""

    def __init__(self, folder: Path, conditions: Conditions, say: Say = lambda _text: None, search: str = "") -> None:
        """Nothing is read yet.

        Args:
            folder: Of all measurements for a target.
            say: Told of files that cannot be used.
            search: How candidates are searched: a space that is exhausted is so for this search.
        """
        self.folder = folder / f"conditions={conditions.id}"
        self._say, self._search = say, search

    def remember(self, rows: pa.Table, session: str = "") -> list[Path]:
        """Keep rows of REMEMBERED: a file for each subgraph. The same rows go into the same file.

        Raises:
            OSError: The disk is full, say: nothing is left half-written.
        """
        written = []
        for subgraph_id in pc.unique(rows["subgraph_id"]).to_pylist():
            part = rows.filter(pc.equal(rows["subgraph_id"], subgraph_id)).select(REMEMBERED.names).cast(REMEMBERED)
            part = part.combine_chunks()
            folder = self._subgraph(part["core_operator"][0].as_py(), subgraph_id)
            path = folder / f"{content.digest(part)}.parquet"
            if not path.exists():
                written.append(tables.write(part, path, REMEMBERED, Provenance(session=session)))
        return written

    def exhaust(self, operator: str, subgraph_id: str) -> None:
        """Keep that the search found hardly any program of a subgraph that is not known."""
        manifest.write(self._exhausted(operator, subgraph_id), self._search, {}, [])

    def is_exhausted(self, operator: str, subgraph_id: str) -> bool:
        """Whether that was kept."""
        try:
            return bool(manifest.read(self._exhausted(operator, subgraph_id))["inputs"] == self._search)
        except TunerError:
            return False

    def _exhausted(self, operator: str, subgraph_id: str) -> Path:
        return self._subgraph(operator, subgraph_id) / "exhausted.json"

    def files(self, operator: str, subgraph_id: str) -> list[Path]:
        """Those of a subgraph, oldest first."""
        return [path for _, path in self._files(self._subgraph(operator, subgraph_id))]

    def of(self, operator: str, subgraph_id: str) -> pa.Table:
        """All that is known of a subgraph, as rows of REMEMBERED: each candidate once, oldest first.

        Args:
            operator: Its core operator.
        """
        parts = [part for path in self.files(operator, subgraph_id) if (part := self._read(path)) is not None]
        return _each_once(pa.concat_tables([REMEMBERED.empty_table(), *parts]))

    def known(self, operator: str, subgraph_id: str, wanted: Iterable[str]) -> pa.Table:
        """Those of some candidates that are known; the features and traces of the others are not read."""
        of_file = [(path, self._candidates(path)) for path in self.files(operator, subgraph_id)]
        chosen, wanted = [REMEMBERED.empty_table()], frozenset(wanted)
        for path, there in of_file:
            if there & wanted and (part := self._read(path)) is not None:
                chosen.append(part.filter(pc.is_in(part["candidate_id"], pa.array(sorted(wanted), pa.string()))))
        return _each_once(pa.concat_tables(chosen))

    def like(self, operator: str, but: frozenset[str]) -> Iterator[pa.Table]:
        """Files of other subgraphs with a core operator, newest first, each read when it is asked for.

        Of very many only some are looked at.
        """
        others = [folder for folder in _folders(self._operator(operator)) if folder.name.partition("=")[2] not in but]
        found = [file for folder in others for file in self._files(folder)]
        for _, path in sorted(found, reverse=True)[:_FILES_LOOKED_AT]:
            if (part := self._read(path)) is not None:
                yield part

    @contextmanager
    def claimed(self, subgraphs: Mapping[str, str], on_wait: Callable[[], object]) -> Iterator[None]:
        """Wait until nobody else measures one of these, so that nothing is measured twice. What killed processes left
        half-written of them is removed.

        Args:
            subgraphs: Core operator by id.
        """
        with ExitStack() as stack:
            for subgraph_id, operator in sorted(subgraphs.items()):  # the same order for all: nobody waits in a circle
                folder = self._subgraph(operator, subgraph_id)
                stack.enter_context(locks.exclusive(folder / "lock", on_wait))
                tables.sweep(folder)
            yield

    def _operator(self, operator: str) -> Path:
        return self.folder / f"operator={digests.file_name(operator)}"

    def _subgraph(self, operator: str, subgraph_id: str) -> Path:
        return self._operator(operator) / f"subgraph={subgraph_id}"

    def _files(self, folder: Path) -> list[tuple[int, Path]]:
        """Those of a subgraph, oldest first, with their dates."""
        try:
            found = [path for path in folder.iterdir() if path.suffix == ".parquet" and not path.name.startswith(".")]
            return sorted((path.stat().st_mtime_ns, path) for path in found)
        except FileNotFoundError:
            return []

    def _read(self, path: Path) -> pa.Table | None:
        try:
            before = _BEFORE.get(_version(path))
            return tables.read(path, REMEMBERED) if before is None else _without_features(path, before)
        except TunerError as error:
            self._say(f"of the memory, one file is left out: {error}")
            return None

    def _candidates(self, path: Path) -> frozenset[str]:
        try:
            return _candidate_ids(path)
        except (pa.ArrowException, OSError, ValueError):
            self._read(path)  # which tells
            return frozenset()


def rows(candidates: pa.Table, measurements: pa.Table, described: Mapping[str, Mapping[str, Any]]) -> pa.Table:
    """Rows of REMEMBERED: a MEASUREMENTS table with what it is of.

    Args:
        candidates: A CANDIDATES table that has all of them.
        described: `core_operator` and `operators` by subgraph.
    """
    place = {candidate_id: n for n, candidate_id in enumerate(candidates["candidate_id"].to_pylist())}
    places = [place[candidate_id] for candidate_id in measurements["candidate_id"].to_pylist()]
    of_rows = candidates.take(pa.array(places, pa.int64()))
    subgraph_ids = measurements["subgraph_id"].to_pylist()

    def column(name: str) -> pa.Array | pa.ChunkedArray:
        if name in ("core_operator", "operators"):
            return pa.array([described[key][name] for key in subgraph_ids], REMEMBERED.field(name).type)
        return (measurements if name in MEASUREMENTS.names else of_rows)[name]

    return pa.table({name: column(name) for name in REMEMBERED.names}).cast(REMEMBERED)


@lru_cache(maxsize=100_000)
def _candidate_ids(path: Path) -> frozenset[str]:
    """Of a file, which never changes."""
    return frozenset(pq.read_table(path, columns=["candidate_id"])["candidate_id"].to_pylist())


def _version(path: Path) -> bytes:
    """Of a file's schema; empty if it cannot be read."""
    try:
        return dict(pq.read_schema(path).metadata or {}).get(b"version", b"")
    except (pa.ArrowException, OSError, ValueError):
        return b""  # reading it tells what is wrong


def _without_features(path: Path, before: pa.Schema) -> pa.Table:
    rows = tables.read(path, before)
    added = {
        "features": pa.array([[]] * len(rows), REMEMBERED.field("features").type),
        "donor": rows["donor"] if "donor" in rows.column_names else pa.array([""] * len(rows)),
    }
    return pa.table(
        {name: added.get(name, rows[name] if name in rows.column_names else None) for name in REMEMBERED.names}
    ).cast(REMEMBERED)


def _folders(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _each_once(rows: pa.Table) -> pa.Table:
    """The last row of each candidate, in the order of these."""
    last = {candidate_id: n for n, candidate_id in enumerate(rows["candidate_id"].to_pylist())}
    return rows.take(pa.array(sorted(last.values()), pa.int64()))
