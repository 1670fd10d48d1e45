"""Reading and writing the tables of `schemas` as Parquet: whole or not at all, and never misread.

Every file says in its footer which schema and version it has, a digest of its content, a digest of the inputs it was
made from, and digests of the files beside it. So a file that no longer fits its inputs is found by content, not by
date; and what was damaged since it was written is found by whoever reads it.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lib.contracts import content, digests
from lib.contracts.errors import ContractError, MissingInput

BUILDING = "building-"  # begins the names of folders that live as long as one stage's work
_PARTIAL = re.compile(r"\..+\.[0-9]+(\.\w+)?")  # see `written_whole`
_STAMP = "2"  # how the stamp below and its digests are made
# What Arrow makes of damaged bytes: broken text in names, JSON and numbers among them.
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, OverflowError)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file says of itself, beside its rows."""

    content: str  # digest of the rows
    inputs: str  # digest of what it was made from
    clock: Mapping[str, float]  # seconds spent, by kind; never part of a digest
    session: str  # the process that wrote it
    files: Mapping[str, str]  # digest of each file written beside it, by name

    @property
    def fingerprint(self) -> str:
        """Content and provenance in one: what a reader's own `inputs` digest is made from."""
        return digests.of_text(self.content, self.inputs)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a file comes from."""

    inputs: str = ""  # digest of what it was made from
    session: str = ""  # the process that made it


def write(
    table: pa.Table,
    path: Path,
    schema: pa.Schema,
    provenance: Provenance,
    *,
    clock: Mapping[str, float] | None = None,
    files: Sequence[Path] = (),
) -> Path:
    """Write the whole table or nothing: whoever finds the file may take it for finished.

    Args:
        table: Rows; columns are put in the schema's order and cast to its types.
        clock: Seconds spent by kind, for the report; not part of any digest.
        files: Files below the table's folder that belong to it and were written before it.

    Raises:
        pyarrow.ArrowInvalid: The table does not fit the schema: a bug of the caller.
    """
    table = table.select(schema.names).cast(schema).combine_chunks()
    stamp = {
        "stamp": _STAMP,
        "inputs": provenance.inputs,
        "session": provenance.session,
        "content": content.digest(table),
        "clock": json.dumps(dict(clock or {})),
        "files": json.dumps({str(file.relative_to(path.parent)): digests.of_file(file) for file in files}),
    }
    sealed = {**schema.metadata, **stamp, "seal": digests.of_text(*stamp.values())}
    with written_whole(path) as partial:
        pq.write_table(table.replace_schema_metadata(sealed), partial, compression="zstd")
    return path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write a file that appears under its name when the block ends, and lasts through a power cut.

    The suffix of the name it has until then is the same, since XGBoost and NumPy go by it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)  # or a disk that is full stays full
        raise


def sweep(folder: Path, *, keep: str = "") -> None:
    """Remove what killed processes left half-written; whoever calls it holds the folder's lock.

    Args:
        keep: Name of a folder in it with a lock of its own, which is left alone.
    """
    for at, folders, names in os.walk(folder):
        for name in [name for name in folders if name.startswith(BUILDING)]:
            shutil.rmtree(Path(at, name), ignore_errors=True)
        folders[:] = [name for name in folders if name != keep and not name.startswith(BUILDING)]
        for name in names:
            if _PARTIAL.fullmatch(name):
                Path(at, name).unlink(missing_ok=True)


def read(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a table and check it against its schema.

    Raises:
        MissingInput: There is no such file.
        ContractError: It is damaged, another table, of another version, or has other columns.
    """
    if not path.exists():
        raise MissingInput(f"{path} does not exist. Run the stage that writes it first.")
    stamped = stamp(path, schema)
    try:
        table = pq.read_table(path)
        found = content.digest(table)
    except _UNREADABLE as error:
        raise ContractError(_damaged(path, schema, _first_line(error))) from error
    _check(path, table.schema, schema)
    if found != stamped.content:
        raise ContractError(_damaged(path, schema, f"rows with the digest {found} in place of {stamped.content}"))
    return table


def stamp(path: Path, schema: pa.Schema) -> Stamp:
    """What a table says of itself; only the footer is read, and only once for one state of the file.

    Raises:
        MissingInput: There is no such file.
        ContractError: It is damaged, or of another table or version.
    """
    try:
        state = path.stat()
    except FileNotFoundError:
        raise MissingInput(f"{path} does not exist. Run the stage that writes it first.") from None
    return _read_stamp(path, _Name(schema), state.st_mtime_ns, state.st_size, state.st_ino)


def is_current(path: Path, schema: pa.Schema, inputs: str) -> bool:
    """Whether the table exists, was made from these inputs, and has its side files.

    Raises:
        ContractError: It is damaged or of another version: what to do is for the user to decide.
    """
    if not path.exists():
        return False
    found = stamp(path, schema)
    return found.inputs == inputs and all(
        (path.parent / name).exists() and digests.of_state(path.parent / name) == digest
        for name, digest in found.files.items()
    )


def made_from(*sources: tuple[Path, pa.Schema]) -> str:
    """Digest of tables by content and provenance: a change anywhere upstream changes it.

    Raises:
        MissingInput, ContractError: See `stamp`.
    """
    return digests.of_text(*(stamp(path, schema).fingerprint for path, schema in sources))


class _Name:
    """A schema's table and version: what a cached stamp was checked against."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.key = (_meta(schema, "table"), _meta(schema, "version"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Name) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=100_000)
def _read_stamp(path: Path, name: _Name, *_state: int) -> Stamp:
    try:
        found = pq.read_schema(path)
        texts = {key: _meta(found, key) for key in ("stamp", "inputs", "session", "content", "clock", "files")}
    except _UNREADABLE as error:
        raise ContractError(_damaged(path, name.schema, _first_line(error))) from error
    _check(path, found, name.schema)
    if texts["stamp"] != _STAMP:
        raise ContractError(
            _foreign(path, name.schema, [f"stamp: expected {_STAMP}, found {texts['stamp'] or 'none'}"])
        )
    if digests.of_text(*texts.values()) != _meta(found, "seal"):
        raise ContractError(_damaged(path, name.schema, "a footer that does not fit its seal"))
    clock, files = (json.loads(texts[key]) for key in ("clock", "files"))
    return Stamp(texts["content"], texts["inputs"], clock, texts["session"], files)


def _meta(schema: pa.Schema, key: str) -> str:
    return str((schema.metadata or {}).get(key.encode(), b"").decode(errors="replace"))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _damaged(path: Path, schema: pa.Schema, reason: str) -> str:
    return (
        f"{path} is damaged: expected a {_meta(schema, 'table')} table in Parquet, found: {reason}\n"
        "Delete it to have it made again; everything else of the run is kept."
    )


def _check(path: Path, found: pa.Schema, wanted: pa.Schema) -> None:
    complaints = _complaints(found, wanted)
    if complaints:
        raise ContractError(_foreign(path, wanted, complaints))


def _foreign(path: Path, wanted: pa.Schema, complaints: Sequence[str]) -> str:
    return (
        f"{path} is not a {_meta(wanted, 'table')} v{_meta(wanted, 'version')} table:\n"
        + "".join(f"  {line}\n" for line in complaints)
        + "Other code wrote it: move it away to keep it, or delete it to have it made again."
    )


def _complaints(found: pa.Schema, wanted: pa.Schema) -> list[str]:
    """Each difference as a line: expected, found."""
    for key in ("table", "version"):
        if _meta(found, key) != _meta(wanted, key):
            return [f"{key}: expected {_meta(wanted, key)}, found {_meta(found, key) or 'none'}"]
    lines = []
    for field in wanted:
        index = found.get_field_index(field.name)
        if index < 0:
            lines.append(f"{field.name}: expected {_describe(field)}, found no such column")
        elif _describe(found.field(index)) != _describe(field):  # how a column is documented may change
            lines.append(f"{field.name}: expected {_describe(field)}, found {_describe(found.field(index))}")
    extra = [name for name in found.names if wanted.get_field_index(name) < 0]
    return lines + [f"{name}: expected no such column" for name in extra]


def _describe(field: pa.Field) -> str:
    unit = (field.metadata or {}).get(b"unit", b"?").decode()
    return f"{field.type}{'' if field.nullable else ' not null'} [{unit}]"
