"""The best of each subgraph, measured again and checked, in one library that is verified and never slower."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import tvm

from lib import backends, deploy, history, host, search, tables, targets
from lib.clock import Clock
from lib.errors import ConfigError, VerificationError
from lib.history import History
from lib.layout import CompiledFiles, ModelFiles, RoundFiles
from lib.numerics import random_values, relative_error
from lib.runner import Pool
from lib.schemas import FAMILIES, RESULTS, SUBGRAPHS
from lib.tables import Origin
from lib.workers import WorkerDied, WorkerTimeout

Say = Callable[[str], None]

_TURN_S = 0.5  # for which a whole model is timed before the other one has its turn
_HOPELESS = 10  # times as slow as the fastest candidate: an untuned program that is not timed again
_OPERATIONS = 8  # that may take `timeout_s` each, before a device elsewhere ends the session


@dataclass(frozen=True, slots=True)
class CompileConfig:
    """How winners are chosen and the whole model is checked."""

    finalists: int = 4  # candidates of a subgraph that are measured again
    repeats: int = 5  # turns of the finalists
    tolerance: float = 1e-3  # largest difference to the untuned program, relative to its largest value
    turns: int = 5  # of the whole models, tuned and untuned in alternation
    once_above_s: float = 1.0  # an untuned inference that should take longer is not run, but estimated
    timeout_s: float = 900.0  # of a check, and of a whole-model inference

    def __post_init__(self) -> None:
        if min(self.finalists, self.repeats, self.turns) < 1 or self.tolerance <= 0:
            raise ConfigError(f"[compile] needs counts of at least 1 and a positive tolerance, but got {self}.")


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


def run(
    model: ModelFiles,
    families: Path,
    past: Sequence[RoundFiles],
    target: targets.AnyTarget,
    config: CompileConfig,
    pool: Pool,
    *,
    origin: Origin,
    out: CompiledFiles,
    say: Say = lambda _text: None,
) -> Path:
    """Compile the model with the best schedules of a run.

    Args:
        model: Has `module.json`, `weights.npz` and the SUBGRAPHS table.
        families: A FAMILIES table; `past`: the finished rounds.
        pool: Measures the finalists.
        out: Gets `model.so`, `params.npz`, `results.parquet` and, last, `manifest.json`.
        say: Told what is being done.

    Raises:
        VerificationError: The compiled model computes something else. What was compiled before stays.
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    subgraphs = tables.read(model.subgraphs, SUBGRAPHS).to_pylist()
    family_of = dict(zip(*tables.read(families, FAMILIES).to_pydict().values(), strict=True))
    so_far = history.load(past)
    choices = []
    with clock.spent("finalists"):
        for n, subgraph in enumerate(subgraphs, start=1):
            say(f"measuring the finalists of subgraph {n} of {len(subgraphs)}")
            choices.append(choose(subgraph, family_of.get(subgraph["subgraph_id"], ""), so_far, config, pool))
    traces = {name: c.trace for s, c in zip(subgraphs, choices, strict=True) if c.trace for name in s["functions"]}
    out.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.folder) as work:
        with clock.spent("build"):
            say("compiling the model")
            built = Built(Path(work), model)
            interface = deploy.interface(built.module)
            untuned_s = sum(s["weight"] * (c.untuned_s or 0.0) for s, c in zip(subgraphs, choices, strict=True))
            estimate_s = untuned_s if untuned_s > config.once_above_s else None  # an untuned ViT takes minutes
            deploy.build(built.module, traces, target.tvm(), built.tuned, pack=True)
            if estimate_s is None:
                deploy.build(built.reference, {}, target.tvm(), built.untuned, pack=False)
            deploy.build(backends.reference(built.reference, target.tvm()), {}, target.tvm(), built.checked, pack=False)
        with clock.spent("verify"):
            say("checking the model and timing it beside the untuned one")
            facts = verify(built, interface, estimate_s, config, pool)
        if facts["shipped"] == "untuned":
            if estimate_s is not None:
                deploy.build(built.reference, {}, target.tvm(), built.untuned, pack=False)
            choices = [replace(c, candidate_id=None, note="the model as a whole was no faster") for c in choices]
        ship(built, str(facts["shipped"]), out)
    rows = [{k: v for k, v in asdict(choice).items() if k != "trace"} for choice in choices]
    tables.write(pa.Table.from_pylist(rows, schema=RESULTS), out.results, RESULTS, origin)
    manifest = {
        "inputs": origin.inputs,
        "session": origin.session,
        "clock": clock.read(),
        "library": out.library.name,
        "params": out.params.name,
        "entry": "main",
        "model_inputs": interface,
        "target": json.loads(target.text),
        "threads": target.threads,
        "versions": host.versions(),
        "host": host.hostname(),
        "device": host.cpu_name(),
        "n_rounds": so_far.n_rounds,
        "n_trials": so_far.n_trials,
        **facts,
    }
    with tables.written_whole(out.manifest) as partial:
        partial.write_text(json.dumps(manifest, indent=2) + "\n")
    return out.manifest


def choose(subgraph: Mapping[str, Any], family_id: str, so_far: History, config: CompileConfig, pool: Pool) -> Choice:
    """The fastest right finalist of a subgraph, if it beats the untuned program in the same interleaved run.

    An untuned program that was ten times as slow as the best when it was measured is not timed again: a naive loop nest
    of a large convolution takes seconds a run, and its place is known.
    """
    subgraph_id, workload = subgraph["subgraph_id"], subgraph["workload"]
    untuned = Choice(subgraph_id, family_id, None, None, None, None, subgraph["note"])
    past = so_far.of(subgraph_id)
    finalists = [p for p in past.fastest if p.trace != search.EMPTY_TRACE][: config.finalists]
    if not subgraph["tunable"]:
        return untuned
    if not finalists:
        return replace(untuned, note="no candidate worked")
    traces = [program.trace for program in finalists]
    beaten = past.untuned_s is not None and past.untuned_s > _HOPELESS * finalists[0].latency_s
    latencies, base = pool.compare(workload, traces, config.repeats, baseline=None if beaten else search.EMPTY_TRACE)
    base_s = past.untuned_s if beaten else median(base) if base else None
    ranked = sorted(
        (median(found), program.candidate_id, program.trace)
        for found, program in zip(latencies, finalists, strict=True)
        if found
    )
    wrong = 0
    for latency_s, candidate_id, trace in ranked:
        if base_s is not None and latency_s >= base_s:
            break
        error = pool.check(workload, trace, config.timeout_s)
        if error is None or error > config.tolerance:
            wrong += 1
            continue
        note = f"{wrong} faster with wrong results" if wrong else ""
        return Choice(subgraph_id, family_id, candidate_id, base_s, latency_s, error, note, trace)
    note = f"{wrong} with wrong results" if wrong else "none was faster than the untuned one"
    return replace(untuned, untuned_s=base_s, tuned_s=base_s, note=note)


class Built:
    """What is built before one of it is shipped."""

    def __init__(self, folder: Path, model: ModelFiles) -> None:
        self.folder, self.weights = folder, model.weights
        self.module = tvm.ir.load_json(model.module.read_text())
        self.reference, self.reference_weights = self.module, model.weights
        if model.reference.exists():  # convolutions are computed otherwise than the model has them
            self.reference = tvm.ir.load_json(model.reference.read_text())
            self.reference_weights = folder / "reference-weights.npz"
            weights = {**np.load(model.weights), **np.load(model.kernels)}
            np.savez(self.reference_weights, **weights)
        self.tuned, self.untuned, self.checked = (folder / f"{name}.so" for name in ("tuned", "untuned", "checked"))
        self.packed = folder / "packed.npz"

    def library(self, name: str) -> tuple[Path, Path]:
        """Library and parameters of the model `tuned`, `untuned`, or as it is `checked` against."""
        if name == "tuned":
            return self.tuned, self.packed
        return (self.untuned if name == "untuned" else self.checked), self.reference_weights


def verify(
    built: Built, interface: Sequence[Mapping[str, Any]], estimate_s: float | None, config: CompileConfig, pool: Pool
) -> dict[str, Any]:
    """Run the model on a device of its own, tuned and in plain loops on equal inputs, compare the outputs, and time it
    in turn with the untuned one.

    Args:
        estimate_s: What an untuned inference should take, from its subgraphs, if that is too long to run one.

    Raises:
        VerificationError: They differ by more than the tolerance, or one of them does not run.
    """
    inputs = built.folder / "inputs.npz"
    np.savez(
        inputs,
        *[random_values(tuple(i["shape"]), i["dtype"], i["bound"], seed=n) for n, i in enumerate(interface)],
    )
    with pool.models(_OPERATIONS * config.timeout_s) as worker:

        def ask(**request: Any) -> dict[str, Any]:
            try:
                reply = worker.ask(config.timeout_s, **request)
            except (WorkerDied, WorkerTimeout) as error:
                reply = {"error": str(error)}
            if "error" in reply:
                raise VerificationError(f"The compiled model does not run ({request['do']}): {reply['error']}")
            return reply

        ask(do="pack", library=str(built.tuned), weights=str(built.weights), out=str(built.packed))

        def open_library(name: str) -> None:
            library, params = built.library(name)
            ask(do="open_library", name=name, library=str(library), params=str(params), inputs=str(inputs))

        outputs = []
        for name in ("tuned", "checked"):
            out = built.folder / f"outputs-{name}.npz"
            open_library(name)
            ask(do="infer", name=name, out=str(out))
            outputs.append(list(np.load(out).values()))
        error = max(relative_error(a, b) for a, b in zip(*outputs, strict=True))
        if not error <= config.tolerance:
            raise VerificationError(
                f"The tuned model's outputs differ from the untuned model's by {error:.1e} of their largest value; "
                f"{config.tolerance:g} is allowed. Nothing was shipped; the measurements are kept."
            )
        timed = ["tuned"]
        latencies: dict[str, list[float]] = {"tuned": [], "untuned": []}
        if estimate_s is None:
            open_library("untuned")
            timed.append("untuned")
        else:
            latencies["untuned"].append(estimate_s)
        for _ in range(config.turns):  # A B A B ...
            for name in timed:
                latencies[name].append(ask(do="time_library", name=name, seconds=_TURN_S)["latency_s"])
    faster = median(latencies["tuned"]) < median(latencies["untuned"])
    return {
        "shipped": "tuned" if faster else "untuned",
        "max_error": error,
        "latencies_s": latencies,
        "untuned_estimated": estimate_s is not None,
    }


def ship(built: Built, name: str, out: CompiledFiles) -> None:
    """Put library and parameters in their place, each whole."""
    library, params = built.library(name)
    for source, destination in ((library, out.library), (params, out.params)):
        with tables.written_whole(destination) as partial:
            partial.write_bytes(source.read_bytes())
