"""Two runs in, a page with both side by side out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.contracts import tables
from lib.contracts.errors import ConfigError
from lib.contracts.files import ModelFiles, RoundFiles, RunFiles
from lib.report import page, rows
from lib.report.rows import RunRows
from lib.tuning import runs


@dataclass(frozen=True, slots=True)
class _Run:
    """A run, found by its folder."""

    model: ModelFiles
    files: RunFiles
    settings: Mapping[str, Any]  # flat, as `runs.settings_of` has them

    @property
    def families(self) -> Path:
        return self.tuned.families(self.settings["[options] families"])

    @property
    def tuned(self) -> ModelFiles:
        """Of what was tuned: the model, or several models as one."""
        joint = self.settings.get("[options] models")
        return ModelFiles(self.model.folder.parent / "nights" / joint) if joint else self.model

    @property
    def past(self) -> list[RoundFiles]:
        """What was recalled, and the finished rounds."""
        return self.tuned.run(self.files.folder.name).trained()


def run(first: Path, second: Path, *, out: Path) -> Path:
    """Write the page.

    Args:
        first, second: Folders of runs that have a library.

    Raises:
        ConfigError: One of them is no such folder.
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    both = [_run(folder) for folder in (first, second)]
    found = [_rows(each) for each in both]
    text = page.comparison_page(found[0], found[1], (first, second), _differences(*both))
    with tables.written_whole(out) as partial:
        partial.write_text(text, encoding="utf-8")
    return out


def _run(folder: Path) -> _Run:
    files = RunFiles(folder)
    settings = runs.settings_of(files)
    if settings is None or not files.compiled.manifest.exists():
        raise ConfigError(
            f"{folder} is no run with a library: expected a folder like artifacts/<target>/<model>/runs/<run> with "
            "run.json and compiled/manifest.json."
        )
    return _Run(ModelFiles(folder.parent.parent), files, settings)


def _differences(first: _Run, second: _Run) -> list[tuple[str, str, str]]:
    """Settings that the runs have not in common, but for the conditions, of which the rows tell."""
    names = dict.fromkeys([*first.settings, *second.settings])
    values = ((name, str(first.settings.get(name, "-")), str(second.settings.get(name, "-"))) for name in names)
    return [row for row in values if row[1] != row[2] and not row[0].startswith("[conditions]")]


def _rows(each: _Run) -> RunRows:
    title = f"{each.model.folder.name}, {each.files.folder.name}"
    return rows.collect(each.model, each.families, each.past, each.files.compiled, title)
