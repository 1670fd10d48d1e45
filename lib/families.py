"""Families: subgraphs that share a cost model. Static: no measurements needed (FamilySeer, section 4.2)."""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from lib import digests
from lib.errors import ConfigError


class Described(Protocol):
    """What a clustering may look at: the structure of a subgraph, neither its name nor its weight."""

    @property
    def subgraph_id(self) -> str: ...
    @property
    def core_operator(self) -> str: ...
    @property
    def operators(self) -> Sequence[str]: ...


Clustering = Callable[[Described], str]

ALGORITHMS: dict[str, Clustering] = {}


def register(name: str) -> Callable[[Clustering], Clustering]:
    """Add a clustering under the name that `--families` takes; it maps a subgraph to its family's label."""

    def add(clustering: Clustering) -> Clustering:
        ALGORITHMS[name] = clustering
        return clustering

    return add


def cluster(subgraphs: Sequence[Described], algorithm: str) -> list[str]:
    """The family id of each subgraph: a readable file name, equal for equal labels.

    Raises:
        ConfigError: No clustering is registered under that name.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"--families must be one of {', '.join(sorted(ALGORITHMS))}, but got {algorithm!r}.")
    return [_file_name(ALGORITHMS[algorithm](subgraph)) for subgraph in subgraphs]


@register("core-operator")
def core_operator(subgraph: Described) -> str:
    """The operator that decides the schedule; the paper's choice (table 2)."""
    return subgraph.core_operator


@register("operator-count")
def operator_count(subgraph: Described) -> str:
    """The number of operators fused into it."""
    return f"{len(subgraph.operators)}-operators"


@register("operator-sequence")
def operator_sequence(subgraph: Described) -> str:
    """The operators fused into it, in order."""
    return "-".join(subgraph.operators)


@register("single")
def single(_subgraph: Described) -> str:
    """One monolithic model for all, as Ansor and MetaSchedule have it; for ablation."""
    return "all"


@register("each")
def each(subgraph: Described) -> str:
    """One model for each subgraph; for ablation."""
    return subgraph.subgraph_id


def _file_name(label: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", label) or "none"
    return name if name == label and len(name) <= 60 else f"{name[:60]}-{digests.of_text(label)[:8]}"
