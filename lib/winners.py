"""The fastest right program of each subgraph: finalists timed again in turn, and checked.

What was chosen is kept with the run: as long as its finalists stay the same, nobody times them again, be it for another
model of the night that has the subgraph as well, or for a library that others of its subgraphs have improved.

All of that takes a share of what measuring took, at most: after a short tuning the subgraphs with the least time go by
what was measured of them, and the check of the whole model is theirs.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from lib.contracts import digests, manifest, settings
from lib.contracts.errors import TunerError
from lib.measure.runner import Pool
from lib.tir.traces import EMPTY_TRACE
from lib.tuning.history import Foretold, History, SubgraphHistory, TimedCandidate
from lib.tuning.hopeless import is_hopeless
from lib.verification import CompileConfig

Say = Callable[[str], None]

_FORETOLD = "foretold, not measured"
_ONCE = "not timed again; checked with the whole model"
_HOPELESS = 10  # times as slow as the fastest candidate: an untuned program that is not timed again
_NEAR = 1.1  # times the fastest candidate's latency: a finalist that was slower while tuning is not timed again
_WORTH = 0.01  # of an inference's time, for each finalist: which of a light subgraph's best is the fastest is no matter


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of RESULTS; see there for units."""

    subgraph_id: str
    family_id: str
    candidate_id: str | None
    untuned_s: float | None
    tuned_s: float | None
    max_error: float | None
    note: str
    trace: str = ""  # empty: the untuned schedule is shipped


def choose_all(
    subgraphs: Sequence[Mapping[str, Any]],
    so_far: History,
    config: CompileConfig,
    pool: Pool,
    say: Say,
    kept: Path | None = None,
    packed: Collection[str] = (),
) -> list[Choice]:
    """What is shipped of each subgraph; several are compiled and checked side by side, and timed one at a time, those
    with the most time first.

    Args:
        subgraphs: Rows of a SUBGRAPHS table with their families, as `members.join` has them.
        kept: Folder of what was chosen before; None: all is measured.
        packed: Ids of those whose weights stand packed for others: with an untuned program they would stand twice.
    """
    choices: dict[int, Choice] = {}
    times = [s["weight"] * so_far.of(s["subgraph_id"]).best_s if s["tunable"] else 0.0 for s in subgraphs]
    whole = sum(each for each in times if each < math.inf) or 1.0
    until = time.monotonic() + config.finalists_share * so_far.measured_s
    with ThreadPoolExecutor(pool.width) as executor:
        try:
            chosen = {
                n: executor.submit(
                    choose,
                    subgraphs[n],
                    so_far,
                    config,
                    pool,
                    kept,
                    share=min(1.0, times[n] / whole),
                    until=until,
                    is_packed=subgraphs[n]["subgraph_id"] in packed,
                )
                for n in sorted(range(len(subgraphs)), key=lambda n: -times[n])
            }
            for n, choice in chosen.items():
                say(f"measuring the finalists of subgraph {len(choices) + 1} of {len(subgraphs)}")
                choices[n] = choice.result()
        finally:
            executor.shutdown(cancel_futures=True)  # after an error the others are not waited for
    return [choices[n] for n in range(len(subgraphs))]


def choose(
    subgraph: Mapping[str, Any],
    so_far: History,
    config: CompileConfig,
    pool: Pool,
    kept: Path | None = None,
    *,
    share: float = 1.0,
    until: float = math.inf,
    is_packed: bool = False,
) -> Choice:
    """The fastest right finalist of a subgraph, if it beats the untuned program in the same interleaved run.

    Args:
        subgraph: A row of SUBGRAPHS with its family.
        kept: See `choose_all`.
        share: Of an inference's time that it takes: with less of it, fewer finalists are timed again.
        until: The moment (s of `time.monotonic`) from which on none is.
        is_packed: Whether the untuned program is no choice as long as another one works: see `choose_all`.
    """
    untuned = Choice(subgraph["subgraph_id"], subgraph["family_id"], None, None, None, None, subgraph["note"])
    past = so_far.of(subgraph["subgraph_id"])
    if is_packed:
        past = replace(past, untuned_s=None)
    finalists = [p for p in past.fastest if p.trace != EMPTY_TRACE][: config.finalists]
    if not subgraph["tunable"]:
        return untuned
    if not past.fastest and past.unmeasured:
        best = past.unmeasured[0]
        return replace(untuned, candidate_id=best.candidate_id, trace=best.trace, note=_FORETOLD)
    if not finalists:
        return replace(untuned, note="no candidate worked")
    near = sum(each.latency_s <= _NEAR * finalists[0].latency_s for each in finalists)
    n_timed = min(near, max(1, round(share / _WORTH)))
    made_from = digests.of_text(
        settings.digest(settings.deciding(config)), pool.conditions.id, str(past.untuned_s),
        *(finalist.candidate_id for finalist in finalists), *["packed"] * is_packed,
    )  # fmt: skip
    path = kept / f"{subgraph['subgraph_id']}.json" if kept else None
    if path and (known := _known(path, made_from, untuned, finalists, n_timed)):
        return known
    if time.monotonic() >= until:
        return _once(untuned, finalists[0], past)
    is_spared = is_packed or (past.untuned_s is None and is_hopeless(subgraph["flop"]))
    choice = _measured(subgraph["workload"], finalists, n_timed, past, untuned, config, pool, is_spared=is_spared)
    if path and choice.tuned_s is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {key: value for key, value in asdict(choice).items() if key != "trace"}
        manifest.write(path, made_from, {"choice": facts, "timed": n_timed}, [])
    return choice


def _once(untuned: Choice, fastest: TimedCandidate, past: SubgraphHistory) -> Choice:
    """By what tuning measured. An untuned program was compiled with less than a library is (`lowering.for_untuned`), so
    that a small lead says nothing."""
    if past.untuned_s is not None and _NEAR * past.untuned_s <= fastest.latency_s:
        return replace(untuned, untuned_s=past.untuned_s, tuned_s=past.untuned_s, note=_ONCE)
    return replace(untuned, candidate_id=fastest.candidate_id, untuned_s=past.untuned_s, tuned_s=fastest.latency_s,
                   note=_ONCE, trace=fastest.trace)  # fmt: skip


def without_wrong(
    choices: Sequence[Choice],
    subgraphs: Sequence[Mapping[str, Any]],
    so_far: History,
    config: CompileConfig,
    pool: Pool,
) -> list[Choice]:
    """Choices in which each program that nobody checked, and that cannot be built or computes something else, gives way
    to the next best of its subgraph that does, or to the untuned one. Others were checked when they were timed again.

    Args:
        choices: Of these subgraphs, in their order.
    """
    found = []
    for choice, subgraph in zip(choices, subgraphs, strict=True):
        past = so_far.of(choice.subgraph_id)
        if choice.note == _FORETOLD:
            choice = _right(choice, subgraph["workload"], past.unmeasured, config, pool)
        elif choice.note == _ONCE and choice.trace:
            tuned = [each for each in past.fastest if each.trace != EMPTY_TRACE][: config.finalists]
            choice = _right(choice, subgraph["workload"], tuned, config, pool)
        found.append(choice)
    return found


def _right(
    choice: Choice,
    workload: str,
    candidates: Sequence[Foretold] | Sequence[TimedCandidate],
    config: CompileConfig,
    pool: Pool,
) -> Choice:
    for candidate in candidates:
        error = pool.check(workload, candidate.trace, config.timeout_s)
        if error is not None and error <= config.tolerance:
            latency_s = candidate.latency_s if isinstance(candidate, TimedCandidate) else None
            return replace(choice, candidate_id=candidate.candidate_id, trace=candidate.trace, max_error=error,
                           tuned_s=latency_s)  # fmt: skip
    wrong = "what was foretold does not work" if choice.note == _FORETOLD else "with wrong results"
    return replace(choice, candidate_id=None, trace="", tuned_s=choice.untuned_s, note=wrong)


def _known(
    path: Path, made_from: str, untuned: Choice, finalists: Sequence[TimedCandidate], n_timed: int
) -> Choice | None:
    """What was chosen of the same finalists, of which at least so many were timed; None if nothing was, or the file
    cannot be read."""
    try:
        facts = manifest.read(path)
    except TunerError:
        return None
    if facts["inputs"] != made_from or facts.get("timed", 0) < n_timed:
        return None
    traces = {finalist.candidate_id: finalist.trace for finalist in finalists}
    return replace(untuned, **facts["choice"], trace=traces.get(facts["choice"]["candidate_id"], ""))


def _measured(
    workload: str,
    finalists: Sequence[TimedCandidate],
    n_timed: int,
    past: SubgraphHistory,
    untuned: Choice,
    config: CompileConfig,
    pool: Pool,
    *,
    is_spared: bool,
) -> Choice:
    """See `choose`; of the finalists the first `n_timed` are timed again.

    An untuned program that was ten times as slow as the best when it was measured is not timed again: a naive loop nest
    of a large convolution takes seconds a run, and its place is known. Nor is a single finalist then: it goes by what
    it took while tuning, as those do that follow it if it computes something else. It is the same with one that is
    spared, since it is known to be hopeless without a measurement.
    """
    beaten = is_spared or (past.untuned_s is not None and past.untuned_s > _HOPELESS * finalists[0].latency_s)
    others: Sequence[TimedCandidate] = ()
    if beaten and n_timed == 1:
        latencies, base = [[program.latency_s] for program in finalists], list[float]()
    else:
        finalists, others = finalists[:n_timed], finalists[n_timed:]
        traces = [program.trace for program in finalists]
        latencies, base = pool.compare(workload, traces, config.repeats, baseline=None if beaten else EMPTY_TRACE)
    base_s = past.untuned_s if beaten else median(base) if base else None
    ranked = sorted(
        (median(found), program.candidate_id, program.trace)
        for found, program in zip(latencies, finalists, strict=True)
        if found
    )
    if beaten:  # anything is better than the untuned one then
        ranked += [(program.latency_s, program.candidate_id, program.trace) for program in others]
    wrong = 0
    for latency_s, candidate_id, trace in ranked:
        if base_s is not None and latency_s >= base_s:
            break
        error = pool.check(workload, trace, config.timeout_s)
        if error is None or error > config.tolerance:
            wrong += 1
            continue
        note = f"{wrong} faster with wrong results" if wrong else ""
        return replace(untuned, candidate_id=candidate_id, untuned_s=base_s, tuned_s=latency_s, max_error=error,
                       note=note, trace=trace)  # fmt: skip
    note = f"{wrong} with wrong results" if wrong else "none was faster than the untuned one"
    return replace(untuned, untuned_s=base_s, tuned_s=base_s, note=note)
