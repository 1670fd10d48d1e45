"""Libraries of one model in several shapes: checked side by side, timed one at a time, and left out where they are no
faster than that of a larger shape.

What does not agree with its file there may be right all the same: `verification.verify` tells.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from lib.contracts import arrays
from lib.machine import host
from lib.machine.targets import AnyTarget
from lib.measure.model_session import WorkerSession
from lib.measure.process import Worker, WorkerGone
from lib.measure.runner import ModelFailed, ModelSession, Pool
from lib.verification import Built, CompileConfig, Peer, does_not_run

_TURNS, _TURN_S = 2, 0.2  # of a library in turn with its file, or with the library of a larger shape
_GLANCE_S = 0.05  # of one alone


def check_all(
    built: Sequence[Built], peers: Sequence[Peer], target: AnyTarget, config: CompileConfig
) -> list[dict[str, Any] | None]:
    """Facts for the manifest, as `verification.verify` has them but for latencies, of each library that computes what
    its file does; None of one that does not, or does not run, or was not built.

    Args:
        peers: What each file makes of the inputs, computed already.
        target: This machine.
    """

    def check(one: Built, peer: Peer) -> dict[str, Any] | None:
        return _checked(one, peer, target, config) if one.tuned.exists() and peer.by else None

    with ThreadPoolExecutor(min(len(built), host.physical_cores())) as executor:
        return list(executor.map(check, built, peers))


def _checked(built: Built, peer: Peer, target: AnyTarget, config: CompileConfig) -> dict[str, Any] | None:
    worker, out = Worker(target), built.folder / "outputs-tuned.npz"
    session = WorkerSession(worker, config.timeout_s)
    try:
        worker.wait_until_ready()
        session.open_library("tuned", *built.library("tuned"), built.inputs)
        session.infer("tuned", out)
    except (ModelFailed, WorkerGone):
        return None
    finally:
        worker.kill()
    error = peer.error(arrays.values(out))
    tolerance = built.tolerance(config)
    return {"compared_with": peer.by, "max_error": error, "tolerance": tolerance} if error <= tolerance else None


def latencies(
    built: Sequence[Built], peers: Sequence[Peer | None], pool: Pool, timeout_s: float
) -> list[dict[str, list[float]]]:
    """Seconds of an inference of each, of `tuned` and, in turn with it, of `onnxruntime` if there is a peer; by turns.

    Raises:
        VerificationError: A library does not run any more.
    """
    try:
        with pool.models(timeout_s) as session:
            return [_timed(each, peer, session) for each, peer in zip(built, peers, strict=True)]
    except ModelFailed as failure:
        raise does_not_run(failure) from failure


def _timed(built: Built, peer: Peer | None, session: ModelSession) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"tuned": []}
    _open(session, "tuned", built)
    if peer:
        peer.infer(built.inputs, built.peer_outputs)  # of these inputs again
    for _ in range(_TURNS if peer else 1):
        found["tuned"].append(session.time("tuned", _TURN_S if peer else _GLANCE_S))
        if peer and (latency_s := peer.time(_TURN_S)) is not None:
            found.setdefault("onnxruntime", []).append(latency_s)
    return found


def _open(session: ModelSession, name: str, built: Built) -> None:
    """Load a library, and run it once: its weights are mapped, and come in when they are touched."""
    session.open_library(name, *built.library("tuned"), built.inputs)
    session.time(name, 0.0)


def slower(
    shapes: Sequence[tuple[Mapping[str, int], Built, Sequence[float]]], pool: Pool, timeout_s: float
) -> dict[int, dict[str, Any]]:
    """Places of the shapes that are slower than the larger one which would be taken in their place, with facts: what
    that is, and the latencies of both (s).

    They were timed one after another, maybe beside something else: before one is left out, both are timed in turn.

    Args:
        shapes: Extents by dimension, what was built, and latencies (s); the largest first.

    Raises:
        VerificationError: One of them does not run any more.
    """
    kept: list[int] = []
    found: dict[int, dict[str, Any]] = {}
    for n, (extents, built, own) in enumerate(shapes):
        holding = [m for m in kept if all(shapes[m][0][name] >= extent for name, extent in extents.items())]
        if holding:
            larger = min(holding, key=lambda m: math.prod(shapes[m][0].values()))
            if min(own) >= min(shapes[larger][2]):
                own_s, larger_s = _in_turn(built, shapes[larger][1], pool, timeout_s)
                if own_s >= larger_s:
                    found[n] = {"taken": dict(shapes[larger][0]), "latency_s": own_s, "taken_s": larger_s}
                    continue
        kept.append(n)
    return found


def _in_turn(first: Built, second: Built, pool: Pool, timeout_s: float) -> tuple[float, float]:
    found: dict[str, list[float]] = {"first": [], "second": []}
    try:
        with pool.models(timeout_s) as session:
            for name, built in (("first", first), ("second", second)):
                _open(session, name, built)
            for _ in range(_TURNS):
                for name, own in found.items():
                    own.append(session.time(name, _TURN_S))
    except ModelFailed as failure:
        raise does_not_run(failure) from failure
    return median(found["first"]), median(found["second"])
