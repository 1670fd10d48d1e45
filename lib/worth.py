"""Which shapes of a bundle are worth having: one that is no faster than a larger one is not."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lib.measure.runner import Pool
from lib.verification import Built

_TURNS, _TURN_S = 3, 0.2  # of a shape and the larger one, in alternation, where the first look says it is slower

Timed = tuple[Mapping[str, int], Built, Sequence[float]]  # extents by dimension, libraries, latencies (s)


def slower(shapes: Sequence[Timed], pool: Pool, timeout_s: float) -> dict[int, dict[str, Any]]:
    """Places of the shapes that are slower than the larger one which would be taken in their place, with facts: what
    that is, and the latencies of both (s).

    They were timed one after another, maybe beside something else: before one is left out, both are timed in turn.

    Args:
        shapes: The largest first.

    Raises:
        ModelFailed: One of them does not run any more.
    """
    kept: list[int] = []
    found: dict[int, dict[str, Any]] = {}
    for n, (extents, built, latencies) in enumerate(shapes):
        holding = [m for m in kept if all(shapes[m][0][name] >= extent for name, extent in extents.items())]
        if holding:
            larger = min(holding, key=lambda m: math.prod(shapes[m][0].values()))
            if min(latencies) >= min(shapes[larger][2]):
                own_s, larger_s = _in_turn(built, shapes[larger][1], pool, timeout_s)
                if own_s >= larger_s:
                    found[n] = {"taken": dict(shapes[larger][0]), "latency_s": own_s, "taken_s": larger_s}
                    continue
        kept.append(n)
    return found


def _in_turn(first: Built, second: Built, pool: Pool, timeout_s: float) -> tuple[float, float]:
    latencies: dict[str, list[float]] = {"first": [], "second": []}
    with pool.models(timeout_s) as session:
        for name, built in (("first", first), ("second", second)):
            session.open_library(name, *built.library("tuned"), built.inputs)
        for _ in range(_TURNS):
            for name, own in latencies.items():
                own.append(session.time(name, _TURN_S))
    return median(latencies["first"]), median(latencies["second"])
