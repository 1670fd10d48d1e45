"""The best of each subgraph, measured again and checked, in one library that is verified and never slower."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import tvm

from lib import building, deploy
from lib.contracts import digests, manifest, settings, tables
from lib.contracts.clock import Clock
from lib.contracts.errors import CompilationError, TunerError
from lib.contracts.files import CompiledFiles, ModelFiles, RoundFiles
from lib.contracts.schemas import FAMILIES, RESULTS, SUBGRAPHS, TRAINING
from lib.contracts.tables import Provenance
from lib.graph import fusion
from lib.machine import host, targets
from lib.measure import peak
from lib.measure.onnx_peer import OnnxFile
from lib.measure.protocol import BuildModel
from lib.measure.runner import Pool
from lib.tir.traces import EMPTY_TRACE
from lib.tuning import history
from lib.tuning.history import History
from lib.tuning.members import join
from lib.verification import Built, CompileConfig, Estimate, verify

Say = Callable[[str], None]

_HOPELESS = 10  # times as slow as the fastest candidate: an untuned program that is not timed again


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
    provenance: Provenance,
    out: CompiledFiles,
    onnx: OnnxFile | None = None,
    say: Say = lambda _text: None,
) -> Path:
    """Compile the model with the best schedules of a run.

    Args:
        model: Has `module.json`, `weights.npz` and the SUBGRAPHS table.
        families: A FAMILIES table; `past`: the finished rounds.
        pool: Measures the finalists.
        out: Gets `model.so`, `params.npz`, `results.parquet` and, last, `manifest.json`. If it has those of the same
            model, they stay unless the new ones are faster.
        onnx: The file that the model came from, if it is one: to be compared with.
        say: Told what is being done.

    Raises:
        VerificationError: The compiled model computes something else. What was compiled before stays.
        CompilationError: It does not compile in the time and the memory that it may take.
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    subgraphs = join(tables.read(model.subgraphs, SUBGRAPHS), tables.read(families, FAMILIES))
    so_far = history.load(past)
    with clock.spent("finalists"):
        choices = _choose_all(subgraphs, so_far, config, pool, say)
        peak_flops = peak.flops(target, pool)
    out.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.folder, prefix=tables.BUILDING) as work:
        built = Built(Path(work), model)
        interface = deploy.interface(tvm.ir.load_json(model.module.read_text()))
        with clock.spent("build"):
            say("compiling the model")
            untuned = estimate(subgraphs, choices)
            _build(built, subgraphs, choices, target, config, runs_untuned=untuned.at_most(config.once_above_s))
        with clock.spent("verify"):
            say("checking the model and timing it beside the untuned one")
            identity = {"model": _digest(model), "conditions": pool.conditions.id}
            facts = verify(built, interface, untuned, config, pool, onnx, _shipped_before(out, identity))
        if facts["shipped"] == "untuned":
            if not built.untuned.exists():
                _build_all([BuildModel(built.reference, built.untuned)], target, config)
            choices = [replace(c, candidate_id=None, note="the model as a whole was no faster") for c in choices]
        if facts["shipped"] != "previous":
            ship(built, str(facts["shipped"]), out)
            rows = [{k: v for k, v in asdict(choice).items() if k != "trace"} for choice in choices]
            tables.write(pa.Table.from_pylist(rows, schema=RESULTS), out.results, RESULTS, provenance)
    made = {"session": provenance.session, "clock": clock.read()}
    rounds = {"n_rounds": so_far.n_rounds, "n_trials": so_far.n_trials}
    all_facts = {**made, **_how_to_run(out, interface, target), **rounds, "peak_flops": peak_flops, **identity, **facts}
    return manifest.write(out.manifest, provenance.inputs, all_facts, [out.library, out.params, out.results])


def _digest(model: ModelFiles) -> str:
    """Of what a model computes."""
    return digests.of_text(digests.of_state(model.module), digests.of_state(model.weights))


def _shipped_before(out: CompiledFiles, identity: Mapping[str, str]) -> CompiledFiles | None:
    """What is there, if it is tuned, whole, and of the same model under the same conditions."""
    try:
        found = manifest.read(out.manifest)
        is_whole = not manifest.damaged_files(out.manifest)
    except TunerError:
        return None
    is_same = all(found.get(key) == value for key, value in identity.items())
    return out if is_whole and is_same and found["shipped"] != "untuned" else None


def _choose_all(
    subgraphs: Sequence[Mapping[str, Any]], so_far: History, config: CompileConfig, pool: Pool, say: Say
) -> list[Choice]:
    """What is shipped of each subgraph; several are compiled and checked side by side, and timed one at a time."""
    choices = []
    with ThreadPoolExecutor(pool.width) as executor:
        try:
            chosen = [executor.submit(choose, subgraph, so_far, config, pool) for subgraph in subgraphs]
            for n, choice in enumerate(chosen, start=1):
                say(f"measuring the finalists of subgraph {n} of {len(subgraphs)}")
                choices.append(choice.result())
        finally:
            executor.shutdown(cancel_futures=True)  # after an error the others are not waited for
    return choices


def estimate(subgraphs: Sequence[Mapping[str, Any]], choices: Sequence[Choice]) -> Estimate:
    """Of an untuned inference.

    Args:
        subgraphs: Rows of SUBGRAPHS. One that is not tunable is a view, and takes no time.
        choices: In the same order.
    """
    pairs = [(s["weight"], c.untuned_s) for s, c in zip(subgraphs, choices, strict=True) if s["tunable"]]
    known = [weight * seconds for weight, seconds in pairs if seconds is not None]
    return Estimate(float(sum(known)), len(known) == len(pairs))


def _build(
    built: Built,
    subgraphs: Sequence[Mapping[str, Any]],
    choices: Sequence[Choice],
    target: targets.AnyTarget,
    config: CompileConfig,
    *,
    runs_untuned: bool,
) -> None:
    """Compile the tuned model, the one to check it against, and the untuned one if that is to be run."""
    traces = {name: c.trace for s, c in zip(subgraphs, choices, strict=True) if c.trace for name in s["functions"]}
    chosen = built.folder / "traces.json"
    chosen.write_text(json.dumps(traces))
    orders = [
        BuildModel(built.module, built.tuned, chosen, pack=True),
        BuildModel(built.reference, built.checked, in_plain_loops=True),
    ]
    if runs_untuned:  # an untuned ViT takes minutes
        orders.append(BuildModel(built.reference, built.untuned))
    _build_all(orders, target, config)


def _build_all(orders: Sequence[BuildModel], target: targets.AnyTarget, config: CompileConfig) -> None:
    """Raises: CompilationError: One that is shipped or checked could not be built within its limits."""
    limits = {"memory_share": config.memory_share, "timeout_s": config.build_timeout_s}
    failed = building.build_all(orders, target, **limits)
    for library, reason in failed.items():
        library.unlink(missing_ok=True)
        if len(orders) == 1 or library.stem != "untuned":  # which is for comparison alone, else it is what is shipped
            raise CompilationError(
                f"The {library.stem} model could not be compiled: {reason}. Nothing was shipped; the measurements are "
                "kept. [compile] build_timeout_s and memory_share limit the time and the memory of that."
            )


def _how_to_run(
    out: CompiledFiles, interface: Sequence[Mapping[str, Any]], target: targets.AnyTarget
) -> dict[str, Any]:
    """What the manifest says to whoever runs the library."""
    return {
        "library": out.library.name,
        "params": out.params.name,
        "entry": fusion.ENTRY,
        "model_inputs": interface,
        "target": json.loads(target.text),
        "threads": target.threads,
        "versions": host.versions(),
        "host": host.hostname(),
        "device": host.cpu_name(),
    }


def inputs(past: Sequence[RoundFiles], config: CompileConfig) -> str:
    """Digest of what a model is compiled from: the last round stands on all before it."""
    return digests.of_text(settings.digest(settings.deciding(config)), tables.made_from((past[-1].training, TRAINING)))


def choose(subgraph: Mapping[str, Any], so_far: History, config: CompileConfig, pool: Pool) -> Choice:
    """The fastest right finalist of a subgraph, if it beats the untuned program in the same interleaved run.

    Args:
        subgraph: A row of SUBGRAPHS with its family, as `members.join` has it.

    An untuned program that was ten times as slow as the best when it was measured is not timed again: a naive loop nest
    of a large convolution takes seconds a run, and its place is known.
    """
    subgraph_id, family_id, workload = (subgraph[key] for key in ("subgraph_id", "family_id", "workload"))
    untuned = Choice(subgraph_id, family_id, None, None, None, None, subgraph["note"])
    past = so_far.of(subgraph_id)
    finalists = [p for p in past.fastest if p.trace != EMPTY_TRACE][: config.finalists]
    if not subgraph["tunable"]:
        return untuned
    if not finalists:
        return replace(untuned, note="no candidate worked")
    traces = [program.trace for program in finalists]
    beaten = past.untuned_s is not None and past.untuned_s > _HOPELESS * finalists[0].latency_s
    latencies, base = pool.compare(workload, traces, config.repeats, baseline=None if beaten else EMPTY_TRACE)
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


def ship(built: Built, name: str, out: CompiledFiles) -> None:
    """Put library and parameters in their place, each whole."""
    library, params = built.library(name)
    for source, destination in ((library, out.library), (params, out.params)):
        with tables.written_whole(destination) as partial:
            partial.write_bytes(source.read_bytes())
