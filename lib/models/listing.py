"""Several models: names and files as a user lists them, on the command line or in a TOML file."""

import glob
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from lib.contracts.errors import ModelError, TunerError
from lib.models.source import Source

_EXPECTED = "expected [[model]] tables, each with `model` (a name of the zoo or a file), and if wanted batch_size, " \
            "sequence, shape, weights, fix and importance"  # fmt: skip


@dataclass(frozen=True, slots=True)
class Listed:
    """A model of a list."""

    source: Source
    importance: float = 1.0  # what a second of it counts, against those of the others

    @property
    def name(self) -> str:
        """That of its folder; of a file that cannot be read, that of the file."""
        try:
            return self.source.name
        except (TunerError, OSError):
            return Path(self.source.model).name


def parse(text: str, batch_size: int = 0, sequence: int = 0) -> list[Listed]:
    """The models of `--models`.

    Args:
        text: Names and paths, separated by commas, with wildcards; or the path of a TOML file.
        batch_size, sequence: Of models of the zoo that the file says nothing else of.

    Raises:
        ModelError: It is no such list, or lists nothing, or a model twice. Whether they are there is not looked at.
    """
    listed = _of_file(Path(text), batch_size, sequence) if text.endswith(".toml") else [
        Listed(_source({"model": name}, batch_size, sequence)) for part in text.split(",") if part.strip()
        for name in _expanded(part.strip())
    ]  # fmt: skip
    if not listed:
        raise ModelError(f"--models {text!r} lists no model.")
    sources = [each.source for each in listed]
    twice = next((source for n, source in enumerate(sources) if source in sources[:n]), None)
    if twice:
        raise ModelError(f"--models {text!r} lists {twice.model} twice.")
    return listed


def _of_file(path: Path, batch_size: int, sequence: int) -> list[Listed]:
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"--models {path}: {error}; {_EXPECTED}.") from error
    rows = found.get("model")
    if set(found) != {"model"} or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ModelError(f"--models {path}: {_EXPECTED}.")
    return [each for row in rows for each in _of_row(row, path, batch_size, sequence)]


def _of_row(row: Mapping[str, Any], path: Path, batch_size: int, sequence: int) -> list[Listed]:
    """Raises: ModelError: A key is unknown or missing, or a value is of another type."""
    kinds = {**{field.name: str if field.type is str else int for field in fields(Source)}, "importance": float}
    for key, value in row.items():
        kind = kinds.get(key)
        if kind is None:
            raise ModelError(f"--models {path}: {key} is unknown; {_EXPECTED}.")
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
            raise ModelError(f"--models {path}: {key} = {value!r} is no {kind.__name__}.")
    if "model" not in row:
        raise ModelError(f"--models {path}: an entry names no model; {_EXPECTED}.")
    importance = float(row.get("importance", 1.0))
    if not 0 < importance < float("inf"):  # false for NaN
        raise ModelError(f"--models {path}: the importance of {row['model']} must be above 0, but is {importance}.")
    files = _expanded(row["model"], path.parent)
    return [Listed(_source({**row, "model": name}, batch_size, sequence), importance) for name in files]


def _source(row: Mapping[str, Any], batch_size: int, sequence: int) -> Source:
    given = {key: value for key, value in row.items() if key != "importance"}
    if Source(row["model"]).is_file:
        return Source(**given)
    return Source(**{"batch_size": batch_size, "sequence": sequence, **given})


def _expanded(name: str, folder: Path = Path()) -> list[str]:
    """Paths that a pattern matches, in order; a name as it is."""
    if not Source(name).is_file:
        return [name]
    path = str(folder / Path(name).expanduser())
    if not glob.has_magic(path) or Path(path).exists():
        return [path]
    return sorted(glob.glob(path)) or [path]  # noqa: PTH207  # of an absolute path, which `Path.glob` does not take
