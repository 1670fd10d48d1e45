"""The identity of a run: which settings decide its candidates and latencies, and which existing run has them all.

A run's folder has a `run.json` with all settings in words. Only those that decide results name a run; limits
(time-outs, patience, where models train) may change, and the same run goes on. A setting that a run's file does not
have is newer than the run, which had what is now its default.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lib.contracts import digests, settings, tables
from lib.contracts.conditions import Conditions
from lib.contracts.files import ModelFiles, RunFiles


@dataclass(frozen=True, slots=True)
class Identity:
    """What a run is asked to be; settings as JSON texts, by section and name."""

    title: str  # begins the name of its folder
    deciding: str
    limits: str
    defaults: str  # of deciding settings that have one


def identity(title: str, configs: Mapping[str, Any], options: Mapping[str, Any], conditions: Conditions) -> Identity:
    """The identity of a run.

    Args:
        configs: Config dataclasses, by their section.
        options: Settings from the command line that are in no config.
        conditions: Under which it measures.
    """
    deciding = {section: settings.deciding(config) for section, config in configs.items()}
    limits = {section: settings.limits(config) for section, config in configs.items()}
    defaults = {section: settings.deciding(type(config)()) for section, config in configs.items()}
    return Identity(
        title,
        json.dumps({**deciding, "options": options, "conditions": asdict(conditions)}),
        json.dumps({section: of for section, of in limits.items() if of}),
        json.dumps(defaults),
    )


@dataclass(frozen=True, slots=True)
class Found:
    """A run's files, and how it differs from those that exist."""

    files: RunFiles
    is_new: bool
    nearest: str = ""  # name of the existing run with the fewest other settings, if it is new and there is one
    differences: tuple[str, ...] = ()  # from that, each as `[section] name = value (there: value)`
    unreadable: tuple[str, ...] = ()  # names of runs whose settings cannot be read

    @property
    def message(self) -> str:
        """For the user, where a new run begins beside others; empty if there is nothing to tell."""
        lines = []
        if self.nearest:
            lines.append(f"a new run: it differs from {self.nearest} in\n  " + "\n  ".join(self.differences))
        if self.is_new and self.unreadable:
            lines.append(f"left alone, since no run.json says what they are: {', '.join(self.unreadable)}")
        return "\n".join(lines)


def find(model: ModelFiles, identity: Identity) -> Found:
    """The existing run of a model with these settings, else a new one; writes nothing."""
    wanted, defaults = _flat(json.loads(identity.deciding)), _flat(json.loads(identity.defaults))
    digest = digests.of_json(wanted)[:8]
    own = model.run(f"{identity.title}-{digest}")
    others, unreadable = [], []
    for folder in sorted(own.folder.parent.iterdir()) if own.folder.parent.is_dir() else []:
        found = settings_of(RunFiles(folder))
        if found is None:
            if folder != own.folder:
                unreadable.append(folder.name)
            continue
        differences = _differences(wanted, {**defaults, **found})
        if not differences:
            return Found(RunFiles(folder), is_new=False)
        others.append((len(differences), folder.name, differences))
    if own.folder.exists():  # its settings were lost; its name is their digest
        return Found(own, is_new=False)
    _, nearest, differences = min(others, default=(0, "", []))
    return Found(own, True, nearest, tuple(differences), tuple(unreadable))


def record(files: RunFiles, identity: Identity) -> None:
    """Write the settings of a run, if they are not there as they are."""
    sections = {"deciding": json.loads(identity.deciding), "limits": json.loads(identity.limits)}
    text = json.dumps(sections, indent=2) + "\n"
    if not files.settings.exists() or files.settings.read_text() != text:
        with tables.written_whole(files.settings) as partial:
            partial.write_text(text)


def settings_of(files: RunFiles) -> dict[str, Any] | None:
    """The settings that name a run, by `[section] name`; None if they are not there or damaged."""
    try:
        return _flat(json.loads(files.settings.read_text())["deciding"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"[{section}] {name}": value for section, of in sections.items() for name, value in of.items()}


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Each setting that differs, those that are wanted first."""
    names: Sequence[str] = list(dict.fromkeys([*wanted, *found]))
    return [
        f"{name} = {wanted.get(name, '(no such setting)')} (there: {found.get(name, '(no such setting)')})"
        for name in names
        if wanted.get(name) != found.get(name)
    ]
