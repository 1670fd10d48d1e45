"""Families: subgraphs that share a cost model. Static: no measurements needed (FamilySeer, section 4.2)."""

from collections.abc import Callable, Sequence
from typing import Protocol

from lib.contracts import digests
from lib.contracts.errors import ConfigError
from lib.tir.operators import MOVEMENTS


class Described(Protocol):
    """What a clustering may look at: the structure of a subgraph, neither its name nor its weight."""

    @property
    def subgraph_id(self) -> str: ...
    @property
    def core_operator(self) -> str: ...
    @property
    def operators(self) -> Sequence[str]: ...


# One operator of a model may be several blocks of its TIR: these sequences are one each, the longest first. Functions
# of float32 are those of `lib.graph.legalize`, where `rational` stands for erf or tanh; the others are TVM's own.
_ONE_OPERATOR = sorted(
    (
        ("mul", "rational", "mul", "add", "mul"),  # GELU
        ("mul", "erf", "mul", "add", "mul"),
        ("mul", "mul", "mul", "add", "mul", "min", "max", "rational", "mul", "add", "mul"),  # GELU with tanh
        ("mul", "mul", "mul", "mul", "add", "mul", "tanh", "add", "mul"),
        ("min", "max", "rational"),  # tanh
        ("mul", "exp", "add", "div"),  # sigmoid
        ("mul", "exp", "add", "div", "mul"),  # SiLU
        ("sigmoid", "mul"),
        ("max", "min"),  # clip, ReLU6
        ("reduce_max", "sub", "exp", "reduce_sum", "div"),  # softmax
        ("reduce_max", "exp", "reduce_sum", "div"),
        ("reduce_max", "reduce_sum_exp", "log"),  # log softmax
        ("reduce_sum", "div", "reduce_sum", "rsqrt"),  # layer norm
        ("mul", "reduce_sum", "rsqrt", "mul"),  # RMS norm
        ("reduce_moments", "rsqrt"),  # group norm
        ("reduce_sum", "div"),  # mean
        ("avg_pool", "div"),
    ),
    key=len,
    reverse=True,
)

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
    return [digests.file_name(ALGORITHMS[algorithm](subgraph)) for subgraph in subgraphs]


@register("core-operator")
def core_operator(subgraph: Described) -> str:
    """The operator that decides the schedule; the paper's choice (table 2)."""
    return subgraph.core_operator


@register("operator-count")
def operator_count(subgraph: Described) -> str:
    """The number of operators fused into it, as `count` has it."""
    return f"{count(subgraph.operators)}-operators"


def count(operators: Sequence[str]) -> int:
    """How many operators of a model a subgraph is, at least 1.

    Blocks that only move data do not count beside others: the border that a convolution needs is part of it. Blocks
    that TVM makes of one operator count once. An operator that is written out in others (a norm as means and
    differences) counts as those.

    Args:
        operators: What each block computes, in order; see `lib.tir.operators.operators`.
    """
    left = [name for name in operators if name not in MOVEMENTS]
    counted = 0
    while left:
        known = next((one for one in _ONE_OPERATOR if tuple(left[: len(one)]) == one), left[:1])
        left = left[len(known) :]
        counted += 1
    return max(counted, 1)


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
